"""A trainer on two nodes: each courier sends its own part, and what arrives is one version, whole, or nothing."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcrl.testing.nodes import CourierFleet, fleet, publish, wait_until
from hpcrl.testing.shards import split_tensor
from hpcrl.weights.layout import PartAssignment, TensorLayout, TensorShard, make_whole_shard
from hpcrl.weights.stores.sharded_store import _fill_slot
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.window.window import Window

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(900)]

LAYOUT = TensorLayout.pack(
    [("embed", "bfloat16", (1 << 20, 32)), ("out", "bfloat16", (512, 1 << 14)), ("norm", "float32", (64,))]
)
"""Tensors held in rows or columns of more than one bucket, and one that is on one node alone."""
EMBED, OUT, NORM = LAYOUT.tensors
ROWS, COLUMNS = split_tensor(EMBED, axis=0, num_shards=2), split_tensor(OUT, axis=1, num_shards=2)
HELD: list[list[TensorShard]] = [[ROWS[0], COLUMNS[0]], [ROWS[1], COLUMNS[1], make_whole_shard(NORM)]]


ON_BOTH_WIRES = pytest.mark.parametrize("two_and_two", ["mpi", "tcp"], indirect=True)
"""For tests of what a wire does; the protocol above it is the same on both."""


@pytest.fixture
def two_and_two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CourierFleet]:
    """The trainer's two nodes and two others; their couriers do not run yet."""
    wire = getattr(request, "param", "mpi")
    if wire == "mpi":
        request.getfixturevalue("needs_mpi")
    nodes = ("n0", "n1", "n2", "n3")
    with fleet(tmp_path / "campaign", *nodes, silent_s=6.0, wire=wire, num_sources=2) as couriers:
        yield couriers


def windows(couriers: CourierFleet, held: list[list[TensorShard]] = HELD) -> list[Window]:
    """The trainer's ends, one per node."""
    parts = PartAssignment.from_shards(LAYOUT, nodes=couriers.sources, held_by_rank=held)
    return [couriers.trainer(parts.layouts[node], node=number) for number, node in enumerate(couriers.sources)]


def publish_on_all(trainer: list[Window], version: int) -> None:
    for window in trainer:
        publish(window, version)


def up_to_two(couriers: CourierFleet) -> list[Window]:
    couriers.start()
    trainer = windows(couriers)
    for version in (1, 2):
        publish_on_all(trainer, version)
        couriers.wait_for(version)
    return trainer


def check(couriers: CourierFleet, node: str, version: int) -> None:
    """Return True if all tensors are there, and every 8 bytes of them belong to this version."""
    window = Window.open(couriers.key(node), job=0)
    assert window is not None
    assert {(t.name, t.dtype, t.shape) for t in window.layout.tensors} == {
        (t.name, t.dtype, t.shape) for t in LAYOUT.tensors
    }
    with window.read_version(version) as data:
        for tensor in window.layout.tensors:
            values = np.frombuffer(data[tensor.offset : tensor.offset + tensor.nbytes], np.uint64)
            assert (values == version).all()
            del values
    window.close()


@ON_BOTH_WIRES
def test_every_node_gets_the_whole_from_the_nodes_with_its_parts(two_and_two: CourierFleet) -> None:
    up_to_two(two_and_two)
    for node in two_and_two.receivers:
        check(two_and_two, node, 2)
    [first, second] = two_and_two.transfers(2)
    assert (first["version"], second["version"]) == (1, 2)
    assert second["sources"] == ["n0", "n1"]
    assert second["to"] == ["n2", "n3"]
    assert second["bytes"] == second["sent_bytes"] == LAYOUT.nbytes
    assert (second["codec"], second["reason"]) == ("full", "the trainer's ranks are on several nodes")


def test_parts_that_each_node_rounds_are_one_rounded_version(two_and_two: CourierFleet) -> None:
    masters = {tensor.name: torch.randn(tensor.shape) for tensor in LAYOUT.tensors}
    two_and_two.start()
    for window, held in zip(windows(two_and_two), HELD, strict=True):
        slot = window.start_version(1, step=1)
        _fill_slot(slot, window.layout, [(shard, masters[shard.name][shard.index]) for shard in held])
        slot.release()
        window.commit()
    two_and_two.wait_for(1)
    assert two_and_two.transfers(1)[0]["bytes"] == LAYOUT.nbytes
    for node in two_and_two.receivers:
        received = WindowStore(two_and_two.key(node), job=two_and_two.job)
        for name, tensor in received.load(1).items():
            assert torch.equal(tensor, masters[name].to(tensor.dtype)), name
            assert tensor.dtype == (torch.float32 if name == "norm" else torch.bfloat16)
        received.close()


@pytest.mark.parametrize("late", [0, 1])
def test_a_version_is_sent_only_once_every_node_of_the_trainer_has_its_part(
    two_and_two: CourierFleet, late: int
) -> None:
    trainer = up_to_two(two_and_two)
    publish(trainer[1 - late], 3)
    time.sleep(1.0)
    assert {two_and_two.newest(node) for node in two_and_two.receivers} == {2}
    publish(trainer[late], 3)
    two_and_two.wait_for(3)
    check(two_and_two, "n3", 3)


@ON_BOTH_WIRES
@pytest.mark.parametrize("killed", ["n1", "n3"])
def test_a_killed_courier_ends_the_step_and_the_next_one_sends_the_newest_version_again(
    two_and_two: CourierFleet, killed: str
) -> None:
    trainer = up_to_two(two_and_two)
    with two_and_two.delay_version("n2", 1):
        publish_on_all(trainer, 3)
        two_and_two.wait_for_start(3, held_up="n2")
        two_and_two.signal(killed, signal.SIGKILL)
        two_and_two.wait_for_end()
        for node in two_and_two.receivers:
            check(two_and_two, node, 2)
        publish_on_all(trainer, 4)
    two_and_two.start()
    two_and_two.wait_for(4)
    check(two_and_two, "n3", 4)


@ON_BOTH_WIRES
def test_a_contributor_that_stops_answering_is_named_with_its_bucket(two_and_two: CourierFleet) -> None:
    trainer = up_to_two(two_and_two)
    with two_and_two.delay_version("n2", 1):
        publish_on_all(trainer, 3)
        two_and_two.wait_for_start(3, held_up="n2")
        two_and_two.signal("n1", signal.SIGSTOP)
        two_and_two.wait_for_end()
    fault = two_and_two.events("fault")[0]
    assert (fault["node"], fault["rank"], fault["at"]) == ("n0", 1, "n1")
    assert {"bucket", "bytes"} <= fault.keys()
    assert "rank 1 on n1 has sent nothing" in fault["detail"]
    assert f"of {LAYOUT.nbytes} bytes" in fault["detail"]
    assert two_and_two.newest("n3") == 2
    two_and_two.start()
    two_and_two.wait_for(3)


def test_a_part_that_is_overwritten_while_it_is_sent_is_never_read_and_the_newest_is_sent(
    two_and_two: CourierFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.weights.window.window.LEASE_TIMEOUT_S", 0.05)  # of the trainer, which is here
    trainer = up_to_two(two_and_two)
    with two_and_two.delay_version("n2", 1):
        publish_on_all(trainer, 3)
        two_and_two.wait_for_start(3, held_up="n2")
        for version in (4, 5):
            publish(trainer[1], version)
    wait_until(
        lambda: any("was overwritten on n1" in fault["detail"] for fault in two_and_two.events("fault")),
        what="the overwritten part is reported",
    )
    assert {two_and_two.newest(node) for node in two_and_two.receivers} == {2}
    publish(trainer[0], 5)
    two_and_two.wait_for(5)
    check(two_and_two, "n2", 5)
    assert two_and_two.alive(), "the couriers survived it"
    assert [event["version"] for event in two_and_two.transfers(5)] == [1, 2, 5]


def test_versions_that_follow_fast_may_be_skipped_and_never_go_back(two_and_two: CourierFleet) -> None:
    trainer = up_to_two(two_and_two)
    for version in range(3, 20):
        publish_on_all(trainer, version)
    two_and_two.wait_for(19)
    sent = [event["version"] for event in two_and_two.events("courier")]
    assert sent == sorted(set(sent))
    check(two_and_two, "n2", 19)


@pytest.mark.parametrize("giving", [0, 1])
def test_a_node_of_the_trainer_that_holds_nothing_is_not_a_source(two_and_two: CourierFleet, giving: int) -> None:
    two_and_two.start()
    everything = [make_whole_shard(tensor) for tensor in LAYOUT.tensors]
    trainer = windows(two_and_two, [everything if node == giving else [] for node in range(2)])
    publish_on_all(trainer, 1)
    two_and_two.wait_for(1)
    for node in two_and_two.receivers:
        check(two_and_two, node, 1)
    [event] = two_and_two.transfers(1)
    assert event["sources"] == [f"n{giving}"]


@ON_BOTH_WIRES
def test_bytes_of_a_part_that_change_on_the_way_are_never_seen(two_and_two: CourierFleet) -> None:
    trainer = up_to_two(two_and_two)
    publish(trainer[0], 3)
    slot = trainer[1].start_version(3, step=3)
    slot[:] = (3).to_bytes(8, "little") * (len(slot) // 8)
    trainer[1].commit(sums=[bytes(16)] * len(trainer[1].layout.tensors))
    two_and_two.wait_for_end()
    assert {two_and_two.newest(node) for node in two_and_two.receivers} == {2}
    assert any("shard 'embed@524288,0' of rank 1" in fault["detail"] for fault in two_and_two.events("fault"))


def test_no_version_is_ever_mixed_while_couriers_are_killed_at_random(two_and_two: CourierFleet) -> None:
    two_and_two.start()
    trainer = windows(two_and_two)
    chosen = random.Random(11)
    for version in range(1, 5):
        publish_on_all(trainer, version)
        time.sleep(chosen.random() * 0.15)
        two_and_two.signal(chosen.choice(two_and_two.nodes), signal.SIGKILL)
        for node in two_and_two.receivers:
            if (seen := two_and_two.newest(node)) >= 0:
                check(two_and_two, node, seen)
        two_and_two.wait_for_end()
        two_and_two.start()
    two_and_two.wait_for(4)
    for node in two_and_two.receivers:
        check(two_and_two, node, 4)
