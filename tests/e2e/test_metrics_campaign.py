"""A whole campaign with user nodes that exports its metrics, even if the exporting process is killed."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import read_json
from tests.support.campaigns import SIMULATED, hpcrl, outcome, snapshot, steps, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("own_code")]

RECIPE = """
name = "nodes"
extends = "quickstart"

[metrics]
tensorboard = true

[train.pipeline.shape]
function = "tests.support.nodes:shaped"
inputs = ["score"]
role = "policy"

[train.pipeline.advantage]
inputs = ["shape"]

[train.pipeline.weigh]
function = "tests.support.nodes:first_tokens_only"
inputs = ["rows"]
role = "policy"

[train.pipeline.batches]
inputs = ["weigh"]
"""


def reader_of(campaign: CampaignDir) -> psutil.Process | None:
    """Return the process that feeds the sinks."""
    children = psutil.Process(read_json(campaign.job(0).submission)["pid"]).children(recursive=True)
    found = [process for process in children if "hpcrl.job.metrics_export" in process.cmdline()]
    return found[0] if found else None


def test_metrics_are_complete_though_the_exporter_was_killed(campaigns: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = tmp_path / "nodes.toml"
    sent = tmp_path / "sent"
    recipe.write_text(RECIPE + f'[notices]\ncommand = ["sh", "-c", "cat >> {sent}; echo >> {sent}"]\n')
    hpcrl("submit", str(recipe), "--site", "local", "--name", "m", *SIMULATED, "-s", "train.num_steps=30")
    campaign = CampaignDir(campaigns / "m")
    until((campaign.metrics / "read.json").exists, what="the exporter has read events")
    reader = reader_of(campaign)
    assert reader is not None
    os.kill(reader.pid, signal.SIGKILL)
    assert outcome(campaign)["outcome"] == "done"
    assert snapshot("m")["state"] == "done"
    until(lambda: sent.read_text().count("\n") == 2, what="start and end were reported")
    assert [json.loads(line)["state"] for line in sent.read_text().splitlines()] == ["started", "done"]
    shown = events.EventAccumulator(str(campaign.metrics / "tensorboard"))
    shown.Reload()
    seen = {one.step: one.value for one in shown.Scalars("reward/reward_mean")}
    reported = {step["step"]: pytest.approx(step["reward_mean"], abs=1e-6) for step in steps(campaign)}
    assert len(reported) == 30
    assert seen == reported
