"""The guardian records the outcome of its driver; a driver whose guardian was killed records its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import make_private_dir, read_json
from tests.support.campaigns import until

PROGRAM = """
import signal, sys
from pathlib import Path
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.job.guardian import run_guarded, send_outcome

campaign = CampaignDir(Path(sys.argv[1]))
place = WorkerPlace(campaign.job(0), "node0")

def drive(outcome_fd):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("ready", flush=True)
    signal.sigwait([signal.SIGTERM])
    send_outcome("drained", "it received SIGTERM", outcome_fd=outcome_fd, job=place.job)
    return 0

sys.exit(run_guarded(drive, place))
"""


def end_guardian(tmp_path: Path, sig: signal.Signals) -> CampaignDir:
    """Start a guardian with a driver, and send the guardian a signal."""
    campaign = CampaignDir(tmp_path)
    make_private_dir(campaign.job(0).root)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as guardian:
        assert guardian.stdout is not None
        assert guardian.stdout.readline() == b"ready\n"
        os.kill(guardian.pid, sig)
    return campaign


def test_the_outcome_of_a_drained_driver_is_recorded(tmp_path: Path) -> None:
    campaign = end_guardian(tmp_path, signal.SIGTERM)
    assert read_json(campaign.job(0).outcome)["outcome"] == "drained"


def test_a_driver_whose_guardian_was_killed_records_its_own_outcome(tmp_path: Path) -> None:
    job = end_guardian(tmp_path, signal.SIGKILL).job(0)
    until(job.outcome.exists, what="the driver records its outcome", timeout_s=30)
    assert (read_json(job.outcome)["outcome"], job.end.exists()) == ("drained", True)
