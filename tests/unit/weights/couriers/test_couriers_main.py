"""The process of a courier: how it ends when another one has."""

import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.testing.event_lines import read_events
from hpcrl.weights.couriers.protocol import CourierStatus
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.window.file import make_window_key
from hpcrl.weights.window.window import Window

LOSE_A_RANK = """
import os, sys
os.environ["SLURMD_NODENAME"] = sys.argv.pop(1)
from hpcrl.weights.couriers import __main__ as courier
from hpcrl.weights.couriers.protocol import RankLostError
from hpcrl.weights.couriers.receiver import VersionReceiver

class LosingTransport:
    rank = 1
    def lose(self, *_, **__):
        raise RankLostError("rank 2 can no longer be reached")
    poll_messages = send_message = lose

courier._join_tcp = lambda settings: (LosingTransport(), list(settings.nodes))
courier.main()
"""


@pytest.mark.parametrize("is_draining", [True, False])
@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_lost_rank_is_a_fault_unless_the_job_drains(tmp_path: Path, node: str, is_draining: bool) -> None:
    campaign = CampaignDir(tmp_path / "campaign")
    campaign.events.mkdir(parents=True)
    job = campaign.job(0)
    job.root.mkdir(parents=True)
    if is_draining:
        job.drain.touch()
    key = make_window_key(campaign, node=node, part=False)
    window = Window.create(key, TensorLayout.pack([("w", "uint8", (64,))]), job=job)
    window.close()
    arguments = [str(campaign.root), "0", "n0,n1,n2", "n0", "--wire=tcp"]
    command = [sys.executable, "-c", LOSE_A_RANK, node, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    has_window = key.path.exists()
    key.path.unlink(missing_ok=True)
    faults = [event["detail"] for event in read_events(campaign.events) if event["event"] == "fault"]
    status = CourierStatus.read(job.courier_status("0"))
    assert has_window == (node == "n0" or not is_draining), (
        "a receiver removes its window, the trainer's is the trainer's"
    )
    if is_draining:
        assert (done.returncode, done.stderr, faults, status) == (0, "", [], None)
    else:
        assert done.returncode == 1, done.stderr
        assert faults == ["rank 2 can no longer be reached"]
        assert status is not None
        assert not status.ready
