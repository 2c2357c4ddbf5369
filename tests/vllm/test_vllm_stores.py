"""The stores at which processes of vLLM meet."""

from collections.abc import Callable

import psutil
import pytest

pytest.importorskip("vllm")

from torch.distributed import rendezvous

from hpcrl.engines.vllm.store_address import MODULES, bind_stores, utils
from hpcrl.system.network import find_free_address

HOST = "127.0.0.2"


def meet_at_address() -> object:
    """Meet as the parts of an engine over several nodes do."""
    _, port = find_free_address(HOST)
    return next(rendezvous(f"tcp://{HOST}:{port}", 0, 1))[0]


def open_for_copies() -> object:
    """Open a store as vLLM does for the copies of a model."""
    return utils.create_tcp_store(HOST, 0, is_master=True, world_size=-1, wait_for_workers=False)


@pytest.mark.parametrize("open_store", [meet_at_address, open_for_copies])
def test_a_store_of_vllm_listens_at_one_address_only(
    monkeypatch: pytest.MonkeyPatch, open_store: Callable[[], object]
) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "TCPStore", module.TCPStore)
    bind_stores()
    own = psutil.Process()
    before = {one.laddr for one in own.net_connections("tcp")}
    store = open_store()
    listening = [one.laddr for one in own.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert [place.ip for place in listening if place not in before] == [HOST], store
