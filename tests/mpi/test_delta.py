"""Couriers that send deltas: the same bits arrive, whatever is killed, skipped or damaged meanwhile."""

import mmap
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpcrl.testing.nodes import CourierFleet, fleet
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.window.window import Window

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(900)]

LAYOUT = TensorLayout.pack([("embed", "bfloat16", (1 << 20, 16)), ("norm", "float32", (7,))])
CHANGED = 5000


ON_BOTH_WIRES = pytest.mark.parametrize("three_nodes", ["mpi", "tcp"], indirect=True)
"""For tests of what a wire does; the protocol above it is the same on both."""


@pytest.fixture
def three_nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CourierFleet]:
    wire = getattr(request, "param", "mpi")
    if wire == "mpi":
        request.getfixturevalue("needs_mpi")
    with fleet(tmp_path / "campaign", "n0", "n1", "n2", silent_s=6.0, wire=wire, codec="delta") as couriers:
        yield couriers


def version_of(number: int) -> np.ndarray:
    """Make random bits; each version changes some of them."""
    values = np.random.default_rng(0).integers(0, 1 << 16, LAYOUT.nbytes // 2, np.uint16)
    for version in range(1, number + 1):
        at = np.random.default_rng(version).integers(0, len(values), CHANGED)
        values[at] = version
    return values


def publish(window: Window, number: int) -> None:
    slot = window.start_version(number, step=number)
    slot[:] = version_of(number).view(np.uint8).data
    window.commit()


def check(couriers: CourierFleet, number: int) -> None:
    """Return True if every node holds that version, bit for bit."""
    for node in couriers.nodes[1:]:
        assert couriers.read(node, number) == version_of(number).tobytes()


def codecs(couriers: CourierFleet, *, last: int) -> list[tuple[int, str]]:
    return [(event["version"], event["codec"]) for event in couriers.transfers(last)]


def up_to(number: int, couriers: CourierFleet) -> Window:
    couriers.start()
    window = couriers.trainer(LAYOUT)
    for version in range(1, number + 1):
        publish(window, version)
        couriers.wait_for(version)
    return window


@ON_BOTH_WIRES
def test_only_what_has_changed_is_sent_and_every_bit_arrives(three_nodes: CourierFleet) -> None:
    up_to(3, three_nodes)
    check(three_nodes, 3)
    assert codecs(three_nodes, last=3) == [(1, "full"), (2, "delta"), (3, "delta")]
    whole, delta, _ = three_nodes.events("courier")
    assert whole["sent_bytes"] == whole["bytes"] == LAYOUT.nbytes
    assert 0 < delta["sent_bytes"] < LAYOUT.nbytes / 20


def test_a_node_that_has_missed_a_version_gets_the_next_one_in_full(three_nodes: CourierFleet) -> None:
    window = up_to(2, three_nodes)
    three_nodes.signal("n2", signal.SIGKILL)
    three_nodes.wait_for_end()
    for version in (3, 4, 5):
        publish(window, version)
    three_nodes.start()
    three_nodes.wait_for(5)
    check(three_nodes, 5)
    publish(window, 6)
    three_nodes.wait_for(6)
    check(three_nodes, 6)
    assert codecs(three_nodes, last=6)[2:] == [(5, "full"), (6, "delta")]
    assert "no version in common" in three_nodes.events("courier")[2]["reason"]


def damage(couriers: CourierFleet, node: str) -> None:
    """Change one value of both versions of a node: neither is what the trainer has."""
    path = couriers.key(node).path
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for end in (0, -(-LAYOUT.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE):
            memory[len(memory) - end - mmap.PAGESIZE * 2] ^= 1


@ON_BOTH_WIRES
def test_a_base_that_is_not_what_it_was_is_detected_and_the_version_is_sent_in_full(three_nodes: CourierFleet) -> None:
    window = up_to(2, three_nodes)
    damage(three_nodes, "n2")
    publish(window, 3)
    three_nodes.wait_for(3)
    check(three_nodes, 3)
    assert three_nodes.alive(), "the couriers survived it"
    assert codecs(three_nodes, last=3)[2:] == [(3, "full")]
    details = [fault["detail"] for fault in three_nodes.events("fault")]
    assert any("tensor 'embed' arrived with checksum" in detail for detail in details)
    assert any("the delta from version 2 did not become version 3 on n2" in detail for detail in details)
    publish(window, 4)
    three_nodes.wait_for(4)
    assert codecs(three_nodes, last=4)[3:] == [(4, "delta")]


def test_no_version_is_ever_mixed_while_couriers_that_send_deltas_are_killed(three_nodes: CourierFleet) -> None:
    window = up_to(1, three_nodes)
    chosen = random.Random(7)
    for version in range(2, 8):
        publish(window, version)
        time.sleep(chosen.random() * 0.1)
        three_nodes.signal(chosen.choice(three_nodes.nodes), signal.SIGKILL)
        for node in three_nodes.nodes[1:]:
            seen = Window.open(three_nodes.key(node), job=0)
            assert seen is not None
            manifest = seen.newest()
            assert manifest is not None
            with seen.read_version(manifest.version) as data:
                assert bytes(data) == version_of(manifest.version).tobytes()
            seen.close()
        three_nodes.wait_for_end()
        three_nodes.start()
    three_nodes.wait_for(7)
    publish(window, 8)
    three_nodes.wait_for(8)
    check(three_nodes, 8)
