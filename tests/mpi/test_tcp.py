"""The same couriers where MPI does not work: over TCP, by torch.distributed."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from hpcrl.testing.nodes import CourierFleet, make_content, publish
from hpcrl.weights.layout import TensorLayout

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(900)]

LAYOUT = TensorLayout.pack([("embed", "bfloat16", (1 << 20, 16)), ("norm", "float32", (7,))])


def test_versions_reach_every_node_and_another_model_does_too(over_tcp: CourierFleet) -> None:
    over_tcp.start()
    window = over_tcp.trainer(LAYOUT)
    for version in (1, 2, 3):
        publish(window, version)
        over_tcp.wait_for(version)
        assert over_tcp.read("n2", version) == make_content(LAYOUT, version)
    window.close()
    other = TensorLayout.pack([("w", "float32", (1 << 20,))])
    publish(over_tcp.trainer(other), 4)
    over_tcp.wait_for(4)
    assert over_tcp.read("n1", 4) == make_content(other, 4)


def test_rendezvous_files_are_readable_by_the_user_alone(over_tcp: CourierFleet) -> None:
    over_tcp.start()
    meeting = over_tcp.job.meeting("1")
    assert stat.S_IMODE(meeting.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(note.stat().st_mode) for note in meeting.iterdir()}
    assert modes == {0o600}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_courier_that_is_killed_or_stopped_ends_the_step_and_the_next_one_continues(
    over_tcp: CourierFleet, number: signal.Signals
) -> None:
    over_tcp.start()
    window = over_tcp.trainer(LAYOUT)
    publish(window, 1)
    over_tcp.wait_for(1)
    over_tcp.signal("n2", number)
    over_tcp.wait_for_end()
    if number == signal.SIGSTOP:
        assert "rank 2 on n2 has sent nothing" in over_tcp.events("fault")[0]["detail"]
    over_tcp.start()
    publish(window, 2)
    over_tcp.wait_for(2)


def test_a_courier_on_an_unknown_node_reports_it(over_tcp: CourierFleet) -> None:
    command = [
        sys.executable,
        "-m",
        "hpcrl.weights.couriers",
        str(over_tcp.campaign.root),
        "0",
        "n0,n1",
        "n0",
        "--wire=tcp",
    ]
    stray = subprocess.run(
        command, env=os.environ | {"SLURMD_NODENAME": "n9"}, capture_output=True, text=True, check=False, timeout=60
    )
    assert stray.returncode == 1
    assert "a courier runs on n9, but couriers must run on n0, n1" in stray.stderr
