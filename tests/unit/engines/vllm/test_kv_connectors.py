"""The configuration by which vLLM's KV connectors find each other."""

import json
import tempfile
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import EngineConfig
from hpcrl.config.site import AUTO_CONNECTOR as AUTO
from hpcrl.config.site import OUR_CONNECTOR, InferenceConfig
from hpcrl.engines.vllm.kv_connectors import (
    build_connector_env,
    choose_connector,
    make_fetch_params,
    make_leave_params,
    read_transfer_params,
)
from hpcrl.engines.vllm.kv_files import name_job_directory
from hpcrl.engines.vllm.server import VllmLaunch, build_command
from hpcrl.roles.serve import make_vllm_launch
from tests.support.plans import make_site, plan_recipe

HERE, ADDRESS = Path("/scratch"), ("10.0.0.7", 6001)
NIXL_PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "10.0.0.7", "remote_block_ids": [1]}


def config_of(connector: str, **changes: object) -> dict[str, object]:
    launch = VllmLaunch(model=HERE, log=HERE, kv_connector=connector, **changes)  # type: ignore[arg-type]
    given = build_command(launch, scratch=HERE)
    config: dict[str, object] = json.loads(given[given.index("--kv-transfer-config") + 1])
    return config


@pytest.mark.parametrize(
    ("connector", "options"),
    [
        ("NixlConnector", {"backends": ["UCX"]}),
        ("MooncakeConnector", {"mooncake_protocol": "rdma"}),
        ("OffloadingConnector", {"cpu_bytes_to_use": 1 << 30}),
        ("MultiConnector", {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]}),
    ],
)
def test_the_configuration_of_a_vllm_connector_is_accepted_by_vllm(connector: str, options: dict[str, object]) -> None:
    """Parse it with vLLM's own class, where vLLM is installed."""
    config = config_of(connector, kv_options=options, kv_address=ADDRESS)
    assert (config["kv_connector"], config["kv_connector_extra_config"]) == (connector, options)
    vllm = pytest.importorskip("vllm.config.kv_transfer")
    read = vllm.KVTransferConfig(**config)
    assert read.is_kv_producer
    assert read.is_kv_consumer


def test_ours_names_its_directory_and_where_the_version_is() -> None:
    config = config_of(OUR_CONNECTOR, kv_dir=Path("/job/kv"))
    assert config["kv_connector_extra_config"] == {"directory": "/job/kv", "version_file": "/scratch/version"}


def test_engines_on_one_node_listen_on_different_ports_that_others_reach() -> None:
    given = build_connector_env(ADDRESS)
    assert (given["VLLM_NIXL_SIDE_CHANNEL_HOST"], given["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("10.0.0.7", "6001")
    assert (given["VLLM_HOST_IP"], given["VLLM_MOONCAKE_BOOTSTRAP_PORT"]) == ("10.0.0.7", "6001")


def test_an_engine_without_an_address_stays_on_loopback() -> None:
    assert build_connector_env(None) == {"VLLM_HOST_IP": "127.0.0.1"}


def test_the_parameters_from_one_engine_are_given_to_the_other() -> None:
    answer = {"kv_transfer_params": NIXL_PARAMS}
    transfer = read_transfer_params("NixlConnector", answer, name="n", address=ADDRESS)
    assert make_fetch_params(transfer) == NIXL_PARAMS


def test_the_parameters_of_mooncake_name_the_engine_and_the_transfer() -> None:
    transfer = read_transfer_params("MooncakeConnector", {}, name="n", address=ADDRESS)
    assert make_leave_params("n")["transfer_id"] == "n"
    assert make_fetch_params(transfer) == {
        "transfer_id": "n",
        "remote_engine_id": config_of("MooncakeConnector", kv_address=ADDRESS)["engine_id"],
        "remote_bootstrap_addr": "http://10.0.0.7:6001",
        "do_remote_prefill": True,
        "do_remote_decode": False,
    }


@pytest.mark.parametrize("answer", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {"saved": False}}])
def test_kv_that_was_not_left_has_no_handle(answer: dict[str, object]) -> None:
    assert read_transfer_params(OUR_CONNECTOR, answer, name="n", address=None) is None


def launched(connector: str | None, root: Path, *, has_handover: bool = True) -> VllmLaunch:
    campaign = CampaignDir(root)
    role = plan_recipe(recipe="quickstart-vllm").role("decode")
    site = msgspec.structs.replace(make_site("local"), inference=InferenceConfig(kv_connector=connector))
    place = WorkerPlace(campaign.job(0), "here")
    log = campaign.job(0).log("decode-0-vllm")
    return make_vllm_launch(
        EngineConfig(),
        role=role,
        partition="host",
        site=site,
        place=place,
        log=log,
        host="127.0.0.1",
        has_handover=has_handover,
    )


def test_each_worker_of_a_campaign_gets_an_address_for_the_sites_connector(tmp_path: Path) -> None:
    nixl = launched("NixlConnector", tmp_path)
    assert nixl.kv_dir is None
    assert nixl.kv_address is not None
    host, port = nixl.kv_address
    assert host == "127.0.0.1"
    assert 1024 < port < 65536


@pytest.mark.parametrize("connector", [OUR_CONNECTOR, AUTO])
def test_a_worker_with_our_connector_gets_a_directory_of_its_node_and_job(tmp_path: Path, connector: str) -> None:
    ours = launched(connector, tmp_path)
    parent = Path(tempfile.gettempdir()) / name_job_directory(CampaignDir(tmp_path).job(0).root)
    assert (ours.kv_connector, ours.kv_address, ours.kv_dir) == (OUR_CONNECTOR, None, parent / "decode-0-vllm")


@pytest.mark.parametrize(
    ("asked", "has_network", "packages", "chosen"),
    [
        (AUTO, True, ["nixl", "mooncake"], "NixlConnector"),
        (AUTO, True, ["mooncake"], "MooncakeConnector"),
        (AUTO, True, [], OUR_CONNECTOR),
        (AUTO, False, ["nixl", "mooncake"], OUR_CONNECTOR),
        (OUR_CONNECTOR, True, ["nixl"], OUR_CONNECTOR),
        ("MultiConnector", False, [], "MultiConnector"),
        (None, True, ["nixl"], None),
    ],
)
def test_the_connector_is_the_fastest_that_engines_have(
    asked: str | None, has_network: bool, packages: list[str], chosen: str | None
) -> None:
    assert choose_connector(asked, has_network=has_network, has_package=packages.__contains__) == chosen


def test_a_site_without_a_connector_hands_over_nothing(tmp_path: Path) -> None:
    alone = launched(None, tmp_path)
    assert (alone.kv_connector, alone.kv_address, alone.kv_dir) == (None, None, None)


@pytest.mark.parametrize("connector", [OUR_CONNECTOR, AUTO, "NixlConnector"])
def test_one_pool_of_engines_has_no_connector(tmp_path: Path, connector: str) -> None:
    alone = launched(connector, tmp_path, has_handover=False)
    assert (alone.kv_connector, alone.kv_address, alone.kv_dir) == (None, None, None)
