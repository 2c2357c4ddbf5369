"""Held-out tasks in whole campaigns: evaluated beside training, kept out of it, and continued after a crash."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir
from hpcrl.rollout.tasks import NUM_SEEDS
from hpcrl.spool.ids import is_held_out
from hpcrl.spool.segment import read_segment
from hpcrl.system.files import read_json
from tests.support.campaigns import SIMULATED, events_of, hpcrl, outcome, snapshot, steps, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def evaluations(campaign: CampaignDir) -> list[dict[str, Any]]:
    return events_of(campaign, "evaluation")


def test_held_out_tasks_are_evaluated_every_few_versions_and_never_trained_on(campaigns: Path) -> None:
    settings = (
        "-s",
        "evaluation.every_versions=2",
        "-s",
        "evaluation.num_episodes=6",
        "-s",
        "evaluation.temperature=0",
    )
    best = ("-s", "train.checkpoint_every_steps=1", "-s", "train.keep_best=1", "-s", "train.keep_checkpoints=1")
    mode = ("-s", "rollout.mode=one-step-off")
    hpcrl("submit", "quickstart", "--site", "local", "--watch", "--name", "e", *SIMULATED, *settings, *best, *mode)
    campaign, seen = CampaignDir(campaigns / "e"), snapshot("e")
    assert max(step["lag_max"] for step in steps(campaign)) <= 1
    reported = evaluations(campaign)
    assert [event["number"] for event in reported] == list(range(len(reported)))
    versions = [event["version"] for event in reported]
    assert versions == sorted(set(versions))
    assert versions[-1] == steps(campaign)[-1]["step"] == 4, "training waits for the last one"
    assert all(event["num_episodes"] == 6 and event["num_faults"] == 0 for event in reported)
    assert reported[-1]["oldest"] == reported[-1]["newest"] == 4
    assert [(one["version"], one["reward_mean"]) for one in seen["evaluations"]] == [
        (event["version"], event["reward_mean"]) for event in reported
    ]
    assert "held out" in hpcrl("monitor", "e", "--once").stdout
    stored = [
        facts for name in SPOOLS for path in campaign.spool(name).glob("*.h5") for facts in read_segment(path).facts
    ]
    assert stored
    assert not [facts.id for facts in stored if is_held_out(facts.domain) or facts.seed >= NUM_SEEDS]
    assert len(list(campaign.checkpoints.glob("0*"))) == 2, "the newest, and the best of the others"


def test_an_evaluation_interrupted_by_a_crash_is_repeated_and_counts_once(campaigns: Path) -> None:
    settings = ("-s", "evaluation.every_versions=100", "-s", "evaluation.num_episodes=400")
    hpcrl("submit", "quickstart", "--site", "local", "--name", "x", *SIMULATED, *settings, "-s", "train.num_steps=12")
    campaign = CampaignDir(campaigns / "x")
    until((campaign.evaluations / "round.json").exists, what="an evaluation has started")
    guardian = read_json(campaign.job(0).submission)["pid"]
    driver = int(Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()[0])
    os.kill(driver, signal.SIGKILL)
    assert outcome(campaign)["outcome"] == "failed"
    assert evaluations(campaign) == []
    hpcrl("resume", "x", "--watch")
    assert snapshot("x")["state"] == "done"
    reported = evaluations(campaign)
    assert [(event["number"], event["job"], event["num_episodes"]) for event in reported] == [(1, 1, 400)]
    assert not (campaign.evaluations / "000000.json").exists()
    assert [one["num_episodes"] for one in snapshot("x")["evaluations"]] == [400]
