"""A whole campaign whose trainer is two ranks: they publish together, save together, and are exported as one model."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hpcrl.events import read_events
from hpcrl.rundir import RunDir
from tests.campaigns import SMALL, hpcrl, snapshot

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TWO = ("-s", "resources.train.num_workers=2", "-s", 'train.sharding="full"', "-s", "train.checkpoint_every_steps=2")


def test_two_ranks_train_publish_and_save_together(home: Path, tmp_path: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "local", "--watch", "--name", "two", *SMALL, *TWO)
    run = RunDir(home / "campaigns" / "two")
    assert snapshot("two")["state"] == "done"
    events = list(read_events(run.events))
    assert [event["rung"] for event in events if event["event"] == "rung"] == ["window"]
    assert {event["version"] for event in events if event["event"] == "published"} >= {0, 1, 2, 3, 4}
    newest = sorted(run.checkpoints.iterdir())[-1]
    assert len(list(newest.glob("state-*.safetensors"))) == 2
    hpcrl("export", "two", "--hf", str(tmp_path / "model"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "qwen2"
