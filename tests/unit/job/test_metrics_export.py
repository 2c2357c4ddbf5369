"""The figures of events, and the metrics process that sends them to sinks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import EpisodesCounted, EvaluationFinished, StepFinished, TrainingResumed
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.recipe import MetricsConfig
from hpcrl.job import metrics_export
from hpcrl.job.metrics_export import (
    MetricsFeeder,
    export_recorded,
    extract_figures,
    main,
    select_valid_figures,
    send_recorded,
)
from hpcrl.job.metrics_process import MetricsProcess
from hpcrl.system.files import make_private_dir, publish_json, read_json
from hpcrl.system.processes import MAX_RESTARTS
from tests.support.campaigns import until
from tests.support.plans import make_recipe

STEP = {
    "reward_mean": 0.5,
    "kl": None,
    "loss": float("nan"),
    "lags": {"0": 6, "1": 2},
    "times": {"learn": 1.5},
    "grad_norm": 2,
    "mfu": None,
}


class SinkRecorder:
    """A sink that keeps all figures, until it fails."""

    def __init__(self, *, breaks_at: int = -1) -> None:
        self.shown: list[tuple[int, dict[str, float]]] = []
        self.calls: list[str] = []
        self._breaks_at = breaks_at

    def write(self, figures):
        if figures.step == self._breaks_at:
            raise OSError("the disk is full")
        self.shown.append((figures.step, figures.values))

    def rewind_before(self, step):
        self.shown = [(shown, values) for shown, values in self.shown if shown < step]

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignDir:
    campaign = CampaignDir(tmp_path)
    for directory in (campaign.events, campaign.metrics, campaign.job(0).logs):
        make_private_dir(directory)
    publish_json(campaign.manifest, {"name": "c", "created": 1.0})
    recipe = make_recipe("metrics.tensorboard=true", "metrics.wandb=offline")
    campaign.recipe.write_bytes(msgspec.json.encode(recipe))
    return campaign


WANTED = MetricsConfig(tensorboard=True)


def trainer(campaign: CampaignDir) -> EventLog:
    return EventLog(campaign.events / "000-train-0.jsonl", job=0, role="train", worker="000-train-0")


def feeder(campaign, **makers):
    reported = []
    made = MetricsFeeder(campaign, makers, emit=reported.append)
    made.open()
    return made, reported


def test_a_step_has_figures_under_headings_and_none_is_left_out():
    figures = extract_figures(StepFinished(time=7.0, step=3, **STEP))
    assert (figures.step, figures.time) == (3, 7.0)
    assert figures.values == {
        "reward/reward_mean": 0.5,
        "policy/grad_norm": 2.0,
        "staleness/lag_0": 6.0,
        "staleness/lag_1": 2.0,
        "time/learn_s": 1.5,
    }


def test_an_evaluation_is_shown_at_its_version_and_other_events_are_not_shown():
    reported = EvaluationFinished(
        number=2, version=20, reward_mean=0.25, num_episodes=4, num_faults=1, domains={"a": 0.25}
    )
    assert extract_figures(reported).values == {
        "evaluation/reward_mean": 0.25,
        "evaluation/num_episodes": 4,
        "evaluation/num_faults": 1,
        "evaluation/reward_mean/a": 0.25,
    }
    assert extract_figures(reported).step == 20
    assert extract_figures(EpisodesCounted()) is None


def test_every_figure_of_the_issue_is_in_a_step_event_and_under_a_heading():
    from hpcrl.job.metrics_export import FIELDS_BY_HEADING

    fields = set(StepFinished.__struct_fields__)
    assert {name for names in FIELDS_BY_HEADING.values() for name in names} <= fields
    assert {"reward_mean", "length_mean", "kl", "entropy", "clip_fraction", "lags", "grad_norm", "times"} <= fields
    assert {"is_ratio_p05", "is_ratio_p50", "is_ratio_p95", "tokens_per_s"} <= fields


def test_a_reader_continues_where_the_last_one_stopped(campaign):
    log, first, second = trainer(campaign), SinkRecorder(), SinkRecorder()
    log.emit(StepFinished(step=1, **STEP))
    one, _ = feeder(campaign, recorder=lambda: first)
    one.feed()
    log.emit(StepFinished(step=2, **STEP))
    two, _ = feeder(campaign, recorder=lambda: second)
    two.feed()
    assert [step for step, _ in first.shown] == [1]
    assert [step for step, _ in second.shown] == [2]


def test_steps_after_the_checkpoint_of_a_resume_are_withdrawn(campaign):
    log, recorder = trainer(campaign), SinkRecorder()
    made, _ = feeder(campaign, recorder=lambda: recorder)
    for step in (1, 2, 3):
        log.emit(StepFinished(step=step, **STEP))
    log.emit(TrainingResumed(step=1, version=4))
    log.emit(StepFinished(step=2, **STEP))
    made.feed()
    assert [step for step, _ in recorder.shown] == [1, 2]


def test_a_sink_that_fails_is_reported_and_the_others_continue(campaign):
    def never():
        raise ImportError("no such package")

    log, bad, good = trainer(campaign), SinkRecorder(breaks_at=2), SinkRecorder()
    made, reported = feeder(campaign, missing=never, bad=lambda: bad, good=lambda: good)
    for step in (1, 2, 3):
        log.emit(StepFinished(step=step, **STEP))
        made.feed()
    made.close()
    assert [step for step, _ in good.shown] == [1, 2, 3]
    assert [step for step, _ in bad.shown] == [1]
    assert [fault.detail.split()[0] for fault in reported] == ["missing", "bad"]
    assert good.calls[-1] == "close"
    assert "close" not in bad.calls


def test_tensorboard_shows_no_withdrawn_steps(campaign):
    pytest.importorskip("tensorboard")
    from hpcrl.job.metric_sinks import make_sink_factories

    log = trainer(campaign)
    made, reported = feeder(campaign, **make_sink_factories(MetricsConfig(tensorboard=True), campaign=campaign))
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3)):
        log.emit(StepFinished(step=step, reward_mean=reward))
    log.emit(TrainingResumed(step=1, version=4))
    log.emit(StepFinished(step=2, reward_mean=0.9))
    made.feed()
    made.close()
    assert reported == []
    assert shown_in(campaign.metrics / "tensorboard") == {1: 0.1, 2: 0.9}


def shown_in(directory: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: TID251

    events = EventAccumulator(str(directory))
    events.Reload()
    return {one.step: round(one.value, 6) for one in events.Scalars("reward/reward_mean")}


def test_the_reader_process_writes_tensorboard_and_wandb_offline_and_ends_when_asked(campaign):
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    trainer(campaign).emit(StepFinished(step=1, reward_mean=0.5))
    faults = []
    place = WorkerPlace(campaign.job(0), "here")
    reporter = MetricsProcess(place, metrics=WANTED, emit=faults.append)
    reporter.keep_running()
    until((campaign.metrics / "read.json").exists, what="the reader has read", timeout_s=240)
    reporter.close()
    assert faults == []
    assert not [line for line in (campaign.events / "000-metrics-0.jsonl").read_text().splitlines() if "fault" in line]
    assert shown_in(campaign.metrics / "tensorboard") == {1: 0.5}
    stored = list((campaign.metrics / "wandb").rglob("*.wandb"))
    assert len(stored) == 1
    assert b"reward/reward_mean" in stored[0].read_bytes()
    assert b"groups_per_step" in stored[0].read_bytes(), "the recipe is the run's config"


def test_a_killed_process_leaves_the_temporary_files_of_wandb_with_the_campaign(campaign, tmp_path):
    pytest.importorskip("wandb")
    elsewhere = make_private_dir(tmp_path / "elsewhere")
    code = "import os, sys; from hpcrl.job.metric_sinks import _import_wandb as load; load(sys.argv[1]); os._exit(0)"
    command = [sys.executable, "-c", code, str(campaign.metrics)]
    subprocess.run(command, env=os.environ | {"TMPDIR": str(elsewhere)}, check=True, timeout=240)
    assert [path.name for path in elsewhere.iterdir()] == []
    assert any(path.name.endswith("wandb-media") for path in campaign.metrics.iterdir())


def test_a_reader_that_always_fails_is_restarted_a_few_times_only(campaign):
    faults = []
    place = WorkerPlace(campaign.job(0), "here")
    reporter = MetricsProcess(place, metrics=WANTED, emit=lambda fault: faults.append(fault.detail))
    campaign.recipe.write_text("{}")  # it cannot even read what it is asked to do

    def is_abandoned() -> bool:
        reporter.keep_running()
        return len(faults) == MAX_RESTARTS + 1

    until(is_abandoned, what="the reader was started a few times", timeout_s=240)
    for _ in range(3):
        reporter.keep_running()
        time.sleep(0.1)
    reporter.close()
    assert len(faults) == MAX_RESTARTS + 1
    assert "exit code 1" in faults[0]
    assert "recipe.json" in faults[0]
    assert "the campaign is damaged" in faults[0]


def test_the_position_is_recorded_only_after_figures_were_sent(campaign):
    class Slow(SinkRecorder):
        def flush(self):
            assert not (campaign.metrics / "read.json").exists()

    trainer(campaign).emit(StepFinished(step=1, **STEP))
    made, _ = feeder(campaign, slow=Slow)
    made.feed()
    assert read_json(campaign.metrics / "read.json")["000-train-0.jsonl"] > 0


def test_a_step_that_was_trained_again_counts_once_in_what_is_sent_afterwards():
    events = [
        StepFinished(time=1.0, step=1, **STEP),
        StepFinished(time=2.0, step=2, **STEP),
        EvaluationFinished(time=2.5, number=1, version=2, reward_mean=0.1, num_episodes=1, num_faults=0, domains={}),
        TrainingResumed(time=3.0, job=1, step=1, version=1),
        StepFinished(time=4.0, job=1, step=2, **STEP),
    ]
    assert [(one.time, one.step) for one in select_valid_figures(events)] == [(1.0, 1), (2.5, 2), (4.0, 2)]


def test_what_is_sent_afterwards_is_sent_once(campaign):
    log = trainer(campaign)
    log.emit(StepFinished(step=1, **STEP))
    recorder = SinkRecorder()
    assert send_recorded(campaign, "wandb", lambda: recorder) == 1
    assert send_recorded(campaign, "wandb", lambda: recorder) == 0
    log.emit(StepFinished(step=2, **STEP))
    assert send_recorded(campaign, "wandb", lambda: recorder) == 1
    assert [step for step, _ in recorder.shown] == [1, 2]


def test_a_tracker_that_fails_gets_everything_the_next_time(campaign):
    log = trainer(campaign)
    for step in (1, 2):
        log.emit(StepFinished(step=step, **STEP))
    with pytest.raises(OSError, match="full"):
        send_recorded(campaign, "wandb", lambda: SinkRecorder(breaks_at=2))
    recorder = SinkRecorder()
    assert send_recorded(campaign, "wandb", lambda: recorder) == 2


def test_mlflow_has_one_run_of_a_campaign_with_its_figures_and_settings(campaign, tmp_path, monkeypatch, capsys):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    log = trainer(campaign)
    for step in (1, 2):
        log.emit(StepFinished(step=step, **STEP))
        assert export_recorded(campaign, "mlflow") == 0
        assert "1 records" in capsys.readouterr().out
    client = mlflow.MlflowClient()
    (sent,) = client.search_runs([client.get_experiment_by_name("hpcrl").experiment_id])
    history = client.get_metric_history(sent.info.run_id, "reward/reward_mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.5)]
    assert sent.data.params["rollout.group_size"] == str(make_recipe().rollout.group_size)
    assert (sent.info.run_name, sent.info.status) == (campaign.name, "FINISHED")


def test_mlflow_is_written_into_the_campaign_unless_another_place_is_named(campaign, tmp_path, monkeypatch, capsys):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(make_private_dir(tmp_path / "elsewhere"))
    trainer(campaign).emit(StepFinished(step=1, **STEP))
    assert export_recorded(campaign, "mlflow") == 0
    store = campaign.metrics / "mlflow" / "mlflow.db"
    assert f"in sqlite:///{store}: `mlflow ui --backend-store-uri sqlite:///{store}`" in capsys.readouterr().out
    assert store.stat().st_size > 0
    assert list(Path.cwd().iterdir()) == []


def test_wandb_is_offline_unless_the_user_chose_a_mode(campaign, monkeypatch, capsys):
    opened = []

    class WandbRecorder(SinkRecorder):
        def __init__(self, campaign, metrics, *, mode):
            super().__init__()
            opened.append(mode)

    monkeypatch.setattr(metrics_export, "WandbSink", WandbRecorder)
    log = trainer(campaign)
    for step, mode in ((1, None), (2, "online")):
        monkeypatch.delenv("WANDB_MODE", raising=False)
        if mode is not None:
            monkeypatch.setenv("WANDB_MODE", mode)
        log.emit(StepFinished(step=step, **STEP))
        assert export_recorded(campaign, "wandb") == 0
    assert opened == ["offline", "online"]
    first, second = capsys.readouterr().out.splitlines()[1::2]
    assert first.startswith(f"in {campaign.metrics}/wandb/wandb: `wandb sync ")
    assert second == "by WANDB_MODE=online"


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_an_export_prints_its_two_lines_and_nothing_of_the_trackers(campaign, monkeypatch, name):
    pytest.importorskip(name)
    if name == "mlflow":
        pytest.importorskip("sqlalchemy")
    for variable in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    trainer(campaign).emit(StepFinished(step=1, **STEP))
    words = [sys.executable, "-m", "hpcrl.job.metrics_export", str(campaign.root), name]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 2


def test_a_tracker_that_cannot_be_reached_is_named_in_one_line(campaign, monkeypatch, capsys):
    pytest.importorskip("mlflow")
    trainer(campaign).emit(StepFinished(step=1, **STEP))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert export_recorded(campaign, "mlflow") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hpcrl: mlflow: ")


def test_a_campaign_of_another_version_is_exported_and_a_damaged_one_is_refused_in_one_line(
    campaign, monkeypatch, capsys
):
    trainer(campaign).emit(StepFinished(step=1, **STEP))
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(sys, "argv", ["metrics_export", str(campaign.root), "wandb"])
    publish_json(campaign.recipe, read_json(campaign.recipe) | {"gone": {"key": 1}})
    assert main() == 2
    assert "pip install 'hpcrl[wandb]'" in capsys.readouterr().err
    campaign.recipe.write_text("{")
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{campaign.recipe} cannot be read" in line


def test_a_tracker_whose_package_is_missing_is_refused_with_a_fix(campaign, monkeypatch, capsys):
    trainer(campaign).emit(StepFinished(step=1, **STEP))
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert export_recorded(campaign, "wandb") == 2
    assert "pip install 'hpcrl[wandb]'" in capsys.readouterr().err
