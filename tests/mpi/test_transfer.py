"""Couriers transfer whole versions from the trainer's window to every node, whatever is killed or stopped meanwhile."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from hpcrl.system.wakeups import WakeListener
from hpcrl.testing.nodes import WAIT_S, CourierFleet, fleet, make_content, publish, wait_until
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window.window import Window

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(900)]

LAYOUT = TensorLayout.pack(
    [("embed", "bfloat16", (1 << 20, 16)), ("norm", "float32", (7,)), ("head", "bfloat16", (1 << 20, 4))]
)
"""More than two buckets; one tensor ends in the middle of one, one is not a multiple of 64 bytes."""


def up_to_two(couriers: CourierFleet) -> Window:
    couriers.start()
    window = couriers.trainer(LAYOUT)
    for version in (1, 2):
        publish(window, version)
        couriers.wait_for(version)
    return window


def test_every_node_gets_what_the_trainer_published(four_nodes: CourierFleet) -> None:
    window = up_to_two(four_nodes)
    assert window.layout == LAYOUT
    for node in four_nodes.nodes[1:]:
        assert four_nodes.read(node, 2) == make_content(LAYOUT, 2)
    [first, second] = four_nodes.transfers(2)
    assert (first["version"], second["version"]) == (1, 2)
    assert (second["bytes"], second["to"]) == (LAYOUT.nbytes, ["n1", "n2", "n3"])
    assert second["wall_s"] > 0


def test_a_version_that_has_arrived_wakes_the_engines_of_its_node(four_nodes: CourierFleet) -> None:
    with closing(WakeListener(four_nodes.job.wakeups, "decode-0", host="127.0.0.1")) as engine:
        four_nodes.start()
        publish(four_nodes.trainer(LAYOUT), 1)
        assert engine.wait(WAIT_S)
        assert 1 in [four_nodes.newest(node) for node in four_nodes.receivers]


def test_weights_that_the_trainer_rounds_are_the_same_bits_on_every_node(four_nodes: CourierFleet) -> None:
    masters = {"embed": torch.randn(1 << 20, 16), "norm": torch.randn(7)}
    layout = TensorLayout.pack([("embed", "bfloat16", (1 << 20, 16)), ("norm", "float32", (7,))])
    four_nodes.start()
    trainer = WindowStore(four_nodes.key("n0"), job=four_nodes.job, layout=layout)
    for version in (1, 2):
        masters["embed"] *= 1.001
        trainer.publish(masters, WeightVersion(version=version, step=version))
        four_nodes.wait_for(version)
    trainer.close()
    assert four_nodes.transfers(2)[-1]["bytes"] == layout.nbytes == masters["embed"].nbytes // 2 + 64
    for node in four_nodes.nodes[1:]:
        received = WindowStore(four_nodes.key(node), job=four_nodes.job)
        with received.read_version(2) as tensors:
            assert torch.equal(tensors["embed"], masters["embed"].bfloat16())
            assert torch.equal(tensors["norm"], masters["norm"])
            del tensors
        received.close()


def test_versions_that_follow_fast_may_be_skipped_and_never_go_back(four_nodes: CourierFleet) -> None:
    window = up_to_two(four_nodes)
    for version in range(3, 30):
        publish(window, version)
    four_nodes.wait_for(29)
    sent = [event["version"] for event in four_nodes.events("courier")]
    assert sent == sorted(set(sent))


def test_a_killed_courier_ends_the_step_and_the_next_one_sends_the_newest_version_again(
    four_nodes: CourierFleet,
) -> None:
    window = up_to_two(four_nodes)
    with four_nodes.delay_version("n1", 1):
        publish(window, 3)
        four_nodes.wait_for_start(3, held_up="n1")
        four_nodes.signal("n2", signal.SIGKILL)
        four_nodes.wait_for_end()
        assert {four_nodes.newest(node) for node in ("n1", "n2", "n3")} == {2}
        assert four_nodes.read("n2", 2) == make_content(LAYOUT, 2)
    four_nodes.start()
    four_nodes.wait_for(3)
    assert four_nodes.read("n3", 3) == make_content(LAYOUT, 3)


def test_a_node_that_has_a_version_is_not_sent_it_again(four_nodes: CourierFleet) -> None:
    window = up_to_two(four_nodes)
    four_nodes.signal("n3", signal.SIGKILL)
    four_nodes.wait_for_end()
    four_nodes.start()
    publish(window, 3)
    four_nodes.wait_for(3)
    assert [event["version"] for event in four_nodes.transfers(3)] == [1, 2, 3]


@pytest.mark.parametrize(("stopped", "reporter"), [("n2", "n0"), ("n0", "n1")])
def test_a_rank_that_stops_answering_is_named_with_its_bucket(
    four_nodes: CourierFleet, stopped: str, reporter: str
) -> None:
    window = up_to_two(four_nodes)
    rank = four_nodes.nodes.index(stopped)
    with four_nodes.delay_version("n1", 1):
        publish(window, 3)
        four_nodes.wait_for_start(3, held_up="n1")
        four_nodes.signal(stopped, signal.SIGSTOP)
        four_nodes.wait_for_end()
    faults = [event for event in four_nodes.events("fault") if event["node"] == reporter or stopped == "n0"]
    fault = faults[0]
    assert (fault["rank"], fault["at"]) == (rank, stopped)
    assert {"bucket", "bytes"} <= fault.keys()
    assert f"rank {rank} on {stopped}" in fault["detail"]
    assert f"of {LAYOUT.nbytes} bytes" in fault["detail"]
    standing = four_nodes.read_status()
    assert standing is not None
    assert not standing.ready
    four_nodes.start()
    four_nodes.wait_for(3)


def test_a_rank_that_stops_while_nothing_is_sent_is_detected_too(four_nodes: CourierFleet) -> None:
    up_to_two(four_nodes)
    four_nodes.signal("n3", signal.SIGSTOP)
    four_nodes.wait_for_end()
    assert any("no transfer was under way" in fault["detail"] for fault in four_nodes.events("fault"))


@contextmanager
def program(text: str, couriers: CourierFleet, *, prints: bytes) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a separate trainer; yield once it has printed a line."""
    command = [sys.executable, "-c", text, str(couriers.campaign.root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(LAYOUT.to_json())
        process.stdin.close()
        assert process.stdout.readline() == prints
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


TRAINER = """
import sys, time
from pathlib import Path
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window
run = CampaignDir(Path(sys.argv[1]))
layout = TensorLayout.from_json(sys.stdin.buffer.read())
window = Window.create(WindowKey(campaign=run.root, node="n0"), layout, job=run.job(0))
window.start_version(1, step=1)[:] = (1).to_bytes(8, "little") * (layout.nbytes // 8)
window.commit()
window.start_version(2, step=2)[: layout.nbytes // 2] = b"x" * (layout.nbytes // 2)
print("half", flush=True)
time.sleep(600)
"""
"""A trainer that never finishes its second version."""


def test_a_trainer_that_is_killed_while_it_writes_is_followed_by_another(four_nodes: CourierFleet) -> None:
    four_nodes.start()
    with program(TRAINER, four_nodes, prints=b"half\n"):
        pass  # it is killed at the end of the block
    four_nodes.wait_for(1)
    publish(four_nodes.trainer(LAYOUT), 3)
    four_nodes.wait_for(3)
    assert four_nodes.alive(), "the couriers survived it"
    assert four_nodes.read("n1", 3) == make_content(LAYOUT, 3)


SENDING_TRAINER = """
import sys, time
from pathlib import Path
from hpcrl.testing.nodes import publish
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window
run = CampaignDir(Path(sys.argv[1]))
layout = TensorLayout.from_json(sys.stdin.buffer.read())
window = Window.create(WindowKey(campaign=run.root, node="n0"), layout, job=run.job(0))
publish(window, 3)
print("published", flush=True)
time.sleep(600)
"""


def test_a_trainer_that_is_killed_while_its_version_is_on_the_way_loses_nothing(four_nodes: CourierFleet) -> None:
    up_to_two(four_nodes).close()
    with four_nodes.delay_version("n1", 1), program(SENDING_TRAINER, four_nodes, prints=b"published\n") as trainer:
        time.sleep(0.5)  # the couriers have started by then, or start after the kill: both must work
        trainer.kill()
        trainer.wait()
        assert four_nodes.newest("n1") == 2
    four_nodes.wait_for(3)
    assert four_nodes.alive(), "the couriers survived it"
    assert four_nodes.read("n3", 3) == make_content(LAYOUT, 3)
    publish(four_nodes.trainer(LAYOUT), 4)
    four_nodes.wait_for(4)


def test_a_node_without_room_is_named(four_nodes: CourierFleet) -> None:
    up_to_two(four_nodes).close()
    four_nodes.signal("n0", signal.SIGKILL)
    four_nodes.wait_for_end()
    larger = TensorLayout.pack([("embed", "bfloat16", (1 << 20, 64))])
    four_nodes.before["n2"] = ("prlimit", f"--fsize={LAYOUT.nbytes}")
    four_nodes.start()
    publish(four_nodes.trainer(larger), 3)
    four_nodes.wait_for_end()
    standing = four_nodes.read_status()
    assert standing is not None
    assert standing.hopeless
    assert "node n2: no window of 256.0 MiB (two versions) in /dev/shm" in standing.reason
    assert "node n2" in [event["detail"] for event in four_nodes.events("fault")][-1]


ENGINE = """
import sys, time
from pathlib import Path
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window
window = Window.open(WindowKey(campaign=Path(sys.argv[1]), node="n1"), job=0)
with window.read_version(1) as data:
    print("reads", flush=True)
    time.sleep(600)
"""


def test_an_engine_that_is_killed_while_it_reads_holds_up_no_courier(four_nodes: CourierFleet) -> None:
    window = up_to_two(four_nodes)
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(four_nodes.campaign.root)], stdout=subprocess.PIPE)
    assert engine.stdout is not None
    assert engine.stdout.readline() == b"reads\n"
    publish(window, 3)
    four_nodes.wait_for_start(3, held_up="n1")
    engine.kill()
    engine.wait()
    engine.stdout.close()
    four_nodes.wait_for(3)
    assert four_nodes.alive(), "the couriers survived it"


def test_another_model_replaces_the_windows(four_nodes: CourierFleet) -> None:
    up_to_two(four_nodes).close()
    other = TensorLayout.pack([("w", "float32", (1 << 20,))])
    publish(four_nodes.trainer(other), 3)
    four_nodes.wait_for(3)
    assert four_nodes.read("n2", 3) == make_content(other, 3)


def test_bytes_that_change_on_the_way_are_never_seen(four_nodes: CourierFleet) -> None:
    window = up_to_two(four_nodes)
    slot = window.start_version(3, step=3)
    slot[:] = make_content(LAYOUT, 3)
    sums = {tensor.name: "00" * 16 for tensor in LAYOUT.tensors}
    wrong = [bytes.fromhex(sums[tensor.name]) for tensor in LAYOUT.tensors]
    window.commit(sums=wrong)
    four_nodes.wait_for_end()
    assert {four_nodes.newest(node) for node in ("n1", "n2", "n3")} == {2}
    assert "tensor 'embed'" in four_nodes.events("fault")[0]["detail"]


def test_worlds_of_one_rank_each_report_it_at_once(needs_mpi: None, tmp_path: Path) -> None:
    with fleet(tmp_path / "campaign", "n0", "n1") as couriers:
        command = [sys.executable, "-m", "hpcrl.weights.couriers", str(couriers.campaign.root), "0", "n0,n1", "n0"]
        alone = subprocess.run(
            command, env=os.environ | {"SLURMD_NODENAME": "n0"}, capture_output=True, text=True, check=False, timeout=60
        )
        assert alone.returncode == 1
        assert "a world of 1 where 2 ranks were started" in alone.stderr
        standing = couriers.read_status()
        assert standing is not None
        assert standing.hopeless


def test_couriers_leave_and_remove_their_window_when_the_job_drains(needs_mpi: None, tmp_path: Path) -> None:
    with fleet(tmp_path / "campaign", "n0", "n1") as couriers:
        couriers.start()
        publish(couriers.trainer(LAYOUT), 1)
        couriers.wait_for(1)
        os.kill(couriers.pids()["n0"], signal.SIGSTOP)  # mpiexec ends all with the first that leaves
        couriers.job.drain.touch()
        wait_until(lambda: not couriers.key("n1").path.exists(), what="the receiver has removed its window")
        assert couriers.key("n0").path.exists(), "the trainer's window is the trainer's"


def test_no_version_is_ever_mixed_while_couriers_are_killed_at_random(four_nodes: CourierFleet) -> None:
    four_nodes.start()
    window = four_nodes.trainer(LAYOUT)
    chosen = random.Random(4)
    for version in range(1, 9):
        publish(window, version)
        time.sleep(chosen.random() * 0.1)
        victim = chosen.choice(four_nodes.nodes)
        four_nodes.signal(victim, signal.SIGKILL)
        for node in four_nodes.nodes[1:]:
            if (seen := four_nodes.newest(node)) >= 0:
                assert four_nodes.read(node, seen) == make_content(LAYOUT, seen)
        four_nodes.wait_for_end()
        four_nodes.start()
    four_nodes.wait_for(8)
    assert {four_nodes.read(node, 8) for node in four_nodes.nodes[1:]} == {make_content(LAYOUT, 8)}
