"""The interface and the address that services bind to, on nodes whose interfaces differ."""

import socket

import pytest

from hpcrl.errors import ConfigError
from hpcrl.system import network
from hpcrl.system.network import find_bind_address, find_interface

GPU_NODE = {"lo": "127.0.0.1", "eno1": "10.0.0.7", "hsn0": "10.1.0.7", "hsn1": "10.1.1.7"}
CPU_NODE = {"lo": "127.0.0.1", "eno1": "10.0.0.8"}


def test_the_loopback_has_its_address() -> None:
    assert find_interface(["lo"]) == ("lo", "127.0.0.1")
    assert find_bind_address(["hsn*", "lo"]) == "127.0.0.1"


def test_an_unknown_interface_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"network.interface = 'hsn9' has no address .*it has .*lo 127.0.0.1"):
        find_bind_address(["hsn9"])


@pytest.mark.parametrize(
    ("node", "wanted", "found"),
    [
        (GPU_NODE, ["hsn0"], ("hsn0", "10.1.0.7")),
        (GPU_NODE, ["hsn*"], ("hsn0", "10.1.0.7")),
        (GPU_NODE, ["hsn1", "eno1"], ("hsn1", "10.1.1.7")),
        (CPU_NODE, ["hsn*", "eno*"], ("eno1", "10.0.0.8")),
    ],
)
def test_each_node_takes_the_first_interface_that_it_has(
    monkeypatch: pytest.MonkeyPatch, node: dict[str, str], wanted: list[str], found: tuple[str, str]
) -> None:
    monkeypatch.setattr(network, "_list_addresses", lambda: node)
    assert find_interface(wanted) == found


def test_a_host_name_that_is_the_loopback_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")  # as Debian's images have it
    monkeypatch.setattr(network, "_list_addresses", lambda: CPU_NODE)
    assert find_interface([]) == ("eno1", "10.0.0.8")
    monkeypatch.setattr(network, "_list_addresses", lambda: GPU_NODE)
    with pytest.raises(ConfigError, match=r"resolves to 127.0.1.1, .*set network.interface .*hsn0 10.1.0.7"):
        find_interface([])
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.1.1.7")
    assert find_interface([]) == ("hsn1", "10.1.1.7")
