"""A whole campaign with two trainer ranks: killed while they prefetch, resumed, and exported as one model."""

import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.testing.event_lines import read_events
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.versions import list_versions
from tests.support.campaigns import (
    SIMULATED,
    driver_of,
    hpcrl,
    num_consumed_groups,
    outcome,
    processes_of,
    snapshot,
    steps,
    until,
    windows_of,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_STEPS = 20
TWO = ("-s", "resources.train.num_workers=2", "-s", 'train.sharding="full"', "-s", "train.checkpoint_every_steps=1")
ROUNDED = ("-s", 'train.publish_dtype="bfloat16"')


def test_two_ranks_killed_with_their_driver_resume_train_every_group_once_and_save_one_model(
    campaigns: Path, home: Path, tmp_path: Path
) -> None:
    settings = (*SIMULATED, *TWO, *ROUNDED, "-s", f"train.num_steps={NUM_STEPS}")
    hpcrl("submit", "quickstart", "--site", "local", "--name", "two", *settings)
    campaign = CampaignDir(campaigns / "two")
    until(lambda: len(steps(campaign)) >= 2, what="two steps were made")
    assert windows_of(campaign)
    os.kill(driver_of(campaign), signal.SIGKILL)
    assert "killed by signal 9" in outcome(campaign)["reason"]
    until(lambda: not processes_of(home), what="no process is left", timeout_s=60)
    assert not windows_of(campaign)
    assert snapshot("two")["state"] == "failed"
    hpcrl("resume", "two", "--watch")
    seen = snapshot("two")
    assert (seen["state"], seen["step"], len(seen["jobs"])) == ("done", NUM_STEPS, 2)
    assert num_consumed_groups(campaign) == NUM_STEPS * 2  # a group that is trained on twice counts once
    events = list(read_events(campaign.events))
    assert [event["transport"] for event in events if event["event"] == "transport"] == ["window", "window"]
    assert {event["version"] for event in events if event["event"] == "published"} >= set(range(NUM_STEPS + 1))
    newest = sorted(campaign.checkpoints.iterdir())[-1]
    assert len(list(newest.glob("state-*.safetensors"))) == 2
    hpcrl("export", "two", "--hf", str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (model.config.model_type, model.dtype) == ("qwen2", torch.float32)
    published, trained = (
        FileStore(campaign.weights).load(list_versions(campaign.weights)[-1]),
        dict(model.named_parameters()),
    )
    assert all(torch.equal(tensor, trained[name].bfloat16()) for name, tensor in published.items())
