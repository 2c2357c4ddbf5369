"""Whole campaigns with two trainer ranks: they publish and save together, and are exported as one model."""

import os
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hpcrl.campaign_dir.event_log import read_events
from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import (
    SMALL,
    driver_of,
    hpcrl,
    num_consumed_groups,
    outcome,
    processes_of,
    snapshot,
    steps,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TWO = ("-s", "resources.train.num_workers=2", "-s", 'train.sharding="full"', "-s", "train.checkpoint_every_steps=2")


def test_two_ranks_train_publish_and_save_together(home: Path, tmp_path: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "local", "--watch", "--name", "two", *SMALL, *TWO)
    run = CampaignDir(home / "campaigns" / "two")
    assert snapshot("two")["state"] == "done"
    events = list(read_events(run.events))
    assert [event["rung"] for event in events if event["event"] == "rung"] == ["window"]
    assert {event["version"] for event in events if event["event"] == "published"} >= {0, 1, 2, 3, 4}
    newest = sorted(run.checkpoints.iterdir())[-1]
    assert len(list(newest.glob("state-*.safetensors"))) == 2
    hpcrl("export", "two", "--hf", str(tmp_path / "model"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "qwen2"


def test_two_ranks_killed_while_they_prefetch_train_on_every_group_once(home: Path) -> None:
    every = ("-s", "train.num_steps=6", "-s", "train.checkpoint_every_steps=1")
    hpcrl("submit", "quickstart", "--site", "local", "--name", "k", *SMALL, *TWO, *every)
    run = CampaignDir(home / "campaigns" / "k")
    until(lambda: len(steps(run)) >= 2, what="two steps were made", timeout_s=240)
    os.kill(driver_of(run), signal.SIGKILL)
    assert "killed by signal 9" in outcome(run)["reason"]
    until(lambda: not processes_of(home), what="nothing is left", timeout_s=60)
    hpcrl("resume", "k", "--watch")
    seen = snapshot("k")
    assert (seen["state"], seen["step"], len(seen["jobs"])) == ("done", 6, 2)
    assert num_consumed_groups(run) == 6 * 2  # a group that is trained on twice counts once
