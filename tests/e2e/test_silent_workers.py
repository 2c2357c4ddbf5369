"""Workers that stand still among others that work."""

import os
import signal
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import CALM, SIMULATED, events_of, hpcrl, outcome, steps, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SETTINGS = (
    *(*SIMULATED, *CALM),
    *("-s", "train.num_steps=100000", "-s", "job.silence_timeout_s=10"),
    *("-s", "resources.decode.num_workers=2", "-s", "resources.env.num_workers=2"),
)


def test_an_engine_and_an_env_worker_that_stand_still_are_started_again_while_others_work(campaigns: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "local", "--name", "silent", *SETTINGS)
    campaign = CampaignDir(campaigns / "silent")
    until(lambda: len(steps(campaign)) > 2, what="steps are made")
    pids = {event["worker"]: event["pid"] for event in events_of(campaign, "worker-started")}
    for worker in ("000-decode-0", "000-env-0"):
        os.kill(pids[worker], signal.SIGSTOP)
    until(lambda: len(events_of(campaign, "worker-restarted")) >= 2, what="both are started again")
    done = len(steps(campaign))
    until(lambda: len(steps(campaign)) > done + 2, what="steps continue")
    hpcrl("stop", "--now", "silent")
    assert outcome(campaign)["outcome"] == "stopped"
    reasons = {event["of"]: event["reason"] for event in events_of(campaign, "worker-failed")}
    why = "it has stood still for 10 s (job.silence_timeout_s); its stacks are in its log"
    assert reasons == {"decode-0": why, "env-0": why}
    for worker in ("decode-0", "env-0"):
        assert "most recent call first" in campaign.job(0).log(worker).read_text()
