"""Whatever values the files of a campaign have, its report and its monitor are made."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.campaign_dir.events import EngineCounted, EpisodesCounted, StepFinished
from hpcrl.monitor.collect import SnapshotCollector
from hpcrl.monitor.screen import render_screen
from hpcrl.monitor.snapshot import encode_snapshot
from hpcrl.monitor.workers import list_workers, split_numbers
from hpcrl.report.builder import build_document, build_report
from hpcrl.report.figures import CampaignReport, TrajectoryFigures
from hpcrl.report.page import render_page
from hpcrl.system.files import publish_json
from hpcrl.system.terminal import PipeConsole
from tests.support.synthetic import SyntheticCampaign
from tests.unit.report.test_builder import play

NUM_ROUNDS = 60
ODD_VALUES: tuple[Any, ...] = (
    10**400, -(10**400), 10**200, 10**30, 2**53, 2**63, -1, 0, 1e308, -1e308, 1e99, 1e-320, float("nan"), float("inf"),
    float("-inf"), None, True, "", "sha256:abc", "9" * 5000, "\u00b2", "\ud800", "\x1b[2J", [], [None], [[1]], {},
    {"a": None},
    {"recipe.json": []}, {"9" * 5000: 1}, {"\u00b2": 3}, {"5000": 1}, {"7+": 10**30}, {"tokens": 1e308},
)  # fmt: skip
NO_TRAJECTORIES = TrajectoryFigures(
    num=0, num_groups=0, num_flat_groups=0, sampled=[], groups=[], charts=[], problems=[]
)


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[SyntheticCampaign]:
    campaign = SyntheticCampaign(tmp_path / "lakes", num_steps=20)
    yield play(campaign)
    campaign.close()


def report_on(campaign: SyntheticCampaign) -> CampaignReport:
    return build_report(campaign.directory, read_trajectories=lambda _: NO_TRAJECTORIES)


def show_all(campaign: SyntheticCampaign) -> None:
    """Make the report, and all that the monitor shows."""
    document = build_document([campaign.directory], read_trajectories=lambda _: NO_TRAJECTORIES)
    msgspec.json.encode(document)
    render_page(document).encode()
    collector = SnapshotCollector(campaign.directory, query=lambda ids: {}, clock=lambda: campaign.now)
    snapshot = collector.poll()
    encode_snapshot(snapshot)
    with (campaign.directory.root / "screen").open("w", errors="replace") as file:
        PipeConsole(file=file).print(render_screen(snapshot, height=40))
    for role in ("env", "decode", "train"):
        list_workers(collector.inputs, role)


def list_places(value: Any) -> list[tuple[Any, Any]]:
    """List each container in a value with each of its keys."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    return [(value, key) for key, _ in items] + [place for _, inner in items for place in list_places(inner)]


def damage(text: str, source: random.Random) -> str:
    """Replace one value of a JSON text."""
    value = json.loads(text)
    places = list_places(value)
    container, key = source.choice(places)
    container[key] = source.choice(ODD_VALUES)
    return json.dumps(value)


def test_a_campaign_with_damaged_values_has_a_report_and_a_snapshot(campaign: SyntheticCampaign) -> None:
    source = random.Random(0)
    manifest = {"name": "lakes", "site": "lab", "created": 1.8e9, "digests": {"recipe.json": "sha256:abc"},
                "source": {"recipe": "lake", "settings": ["a=1"]}, "software": {"git": {"x": {"commit": "1"}}},
                "changes": [{"a": 1}]}  # fmt: skip
    publish_json(campaign.directory.manifest, manifest)
    lengths = {"done": {"8+": 2, "8+tokens": 18, "9": 1, "tokens": 18}}
    campaign.emit("env-0", EpisodesCounted(done=400, lengths=lengths))
    figures = {"reward_mean": 0.5, "loss": 0.1, "reward_std": 0.1, "lag_max": 3, "too_long_tokens": {"lake": 3}}
    campaign.emit("train-0", StepFinished(step=21, lengths=lengths["done"], lags={"0": 2}, **figures))
    records = [*campaign.directory.root.glob("*.json"), *campaign.directory.jobs.rglob("*.json")]
    events = sorted(campaign.directory.events.iterdir())
    intact = {path: path.read_text() for path in [*records, *events]}
    for _ in range(NUM_ROUNDS):
        for path in records:
            path.write_text(damage(intact[path], source) if source.random() < 0.3 else intact[path])
        for path in events:
            lines = intact[path].splitlines()
            for number in source.sample(range(len(lines)), k=min(len(lines), 6)):
                lines[number] = damage(lines[number], source)
            path.write_text("\n".join([*lines, ""]))
        show_all(campaign)


def test_digests_that_are_no_table_are_left_out(campaign: SyntheticCampaign) -> None:
    publish_json(campaign.directory.manifest, {"name": "lakes", "digests": "sha256:abc"})
    assert "digest of recipe.json" not in {one.name for one in report_on(campaign).provenance}


@pytest.mark.parametrize("reward", [1e308, -1e308, 10**200, 10**400])
def test_a_reward_that_cannot_be_computed_with_is_none(campaign: SyntheticCampaign, reward: float) -> None:
    for step, value in ((21, reward), (22, -reward)):
        with (campaign.directory.events / "000-train-0.jsonl").open("a") as file:
            line = {"time": campaign.now, "event": "step", "job": 0, "role": "train", "worker": "000-train-0"}
            file.write(json.dumps(line | {"step": step, "reward_mean": value}) + "\n")
    report = report_on(campaign)
    assert report.key_figures.step == 22
    assert report.key_figures.reward_best == 1.0


def test_a_length_that_is_too_large_is_damage(campaign: SyntheticCampaign) -> None:
    campaign.emit("env-0", EpisodesCounted(done=400, lengths={"done": {"8+": 10**30}}))
    report = report_on(campaign)
    assert any("000-env-0.jsonl is damaged" in problem for problem in report.problems)


def test_a_worker_whose_number_is_very_long_comes_last(campaign: SyntheticCampaign) -> None:
    names = ["env-" + "9" * 5000, "env-10", "env-9", "env-0"]
    assert sorted(names, key=split_numbers) == names[::-1]
    campaign.emit("decode-0", EngineCounted(window_s=1.0))
    path = campaign.directory.events / "000-decode-0.jsonl"
    path.write_text(path.read_text().replace("000-decode-0", "000-decode-" + "1" * 5000))
    show_all(campaign)
