"""The sinks that show the figures of training: TensorBoard, Weights & Biases and MLflow.

EventFigures          the figures of one event, with their step
MetricsSink           the interface of a sink
TensorBoardSink, WandbSink, MlflowSink   its implementations
make_sink_factories   the sinks that a recipe asks for, by name, not yet opened
choose_wandb_mode     how W&B gets figures afterwards: offline unless the user chose otherwise
find_mlflow_store     where MLflow keeps them
identify_campaign     the id of a campaign's run
MLFLOW_MAX_METRICS, MLFLOW_MAX_PARAMETERS, MLFLOW_VALUE_CHARS, MLFLOW_ID_TAG   constants
"""

import itertools
import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import msgspec
import xxhash

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import MetricsConfig
from hpcrl.config.toml import flatten_table
from hpcrl.system.files import make_private_dir, read_json

MLFLOW_MAX_METRICS, MLFLOW_MAX_PARAMETERS = 1000, 100
"""The most that one request to MLflow may hold."""
MLFLOW_VALUE_CHARS = 6000
MLFLOW_ID_TAG = "hpcrl.campaign"
"""The tag by which the run of a campaign is found again."""


class EventFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one event that a sink gets, under their headings."""

    time: float
    step: int
    """The training step; for an evaluation, the version of the weights."""
    values: dict[str, float]


class MetricsSink(Protocol):
    """The interface of a sink that shows figures. A sink that raises is dropped; the others continue."""

    def write(self, figures: EventFigures) -> None: ...

    def rewind_before(self, step: int) -> None:
        """Mark figures of this step and later as obsolete: training was resumed before it."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


def make_sink_factories(metrics: MetricsConfig, *, campaign: CampaignDir) -> dict[str, Callable[[], MetricsSink]]:
    """Return functions that open the sinks that the recipe asks for, by name."""
    found: dict[str, Callable[[], MetricsSink]] = {}
    if metrics.tensorboard:
        found["tensorboard"] = partial(TensorBoardSink, campaign.metrics / "tensorboard")
    if metrics.wandb != "off":
        found["wandb"] = partial(WandbSink, campaign, metrics, mode=metrics.wandb)
    if metrics.mlflow:
        found["mlflow"] = partial(MlflowSink, campaign, metrics)
    return found


class TensorBoardSink:
    """The event files of TensorBoard: `tensorboard --logdir CAMPAIGN/metrics/tensorboard` shows them."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: TID251
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: TID251
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: TID251

        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._writer = EventFileWriter(str(make_private_dir(directory)))

    def write(self, figures: EventFigures) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.values.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=figures.time, step=figures.step, summary=summary))

    def rewind_before(self, step: int) -> None:
        restart = self._session(status=self._session.START)
        self._writer.add_event(self._event(step=step, session_log=restart))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _import_wandb(directory: Path) -> ModuleType:
    """Import W&B, which makes temporary directories at once; a killed process leaves them, in the given directory."""
    usual, tempfile.tempdir = tempfile.tempdir, str(directory)
    try:
        import wandb  # noqa: TID251
    finally:
        tempfile.tempdir = usual
    return wandb


class WandbSink:
    """A run of Weights & Biases, one for all jobs of a campaign; offline, `wandb sync` sends its directories later."""

    def __init__(self, campaign: CampaignDir, metrics: MetricsConfig, *, mode: str) -> None:
        directory = make_private_dir(campaign.metrics / "wandb")
        wandb = _import_wandb(directory)
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            silent=mode != "online",  # the address of a run on the server is worth reading
        )
        self._run: Any = wandb.init(
            project=metrics.wandb_project,
            name=campaign.name,
            id=identify_campaign(campaign),
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(directory),
            config=read_json(campaign.recipe),
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # our step may decrease, W&B's own may not

    def write(self, figures: EventFigures) -> None:
        self._run.log({"step": figures.step, **figures.values})

    def rewind_before(self, step: int) -> None:
        """Do nothing: new figures are drawn over the obsolete ones."""

    def flush(self) -> None:
        """Do nothing: W&B's process writes continuously."""

    def close(self) -> None:
        self._run.finish()


def choose_wandb_mode() -> str:
    """Return the mode that WANDB_MODE names; offline without it, so that nothing leaves this machine unasked."""
    return os.environ.get("WANDB_MODE") or "offline"


def find_mlflow_store(campaign: CampaignDir) -> str:
    """Return the server or database that MLFLOW_TRACKING_URI names; without it, a database in the campaign.

    MLflow needs further packages for that.
    """
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    for name in ("sqlalchemy", "alembic"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)
    return f"sqlite:///{make_private_dir(campaign.metrics / 'mlflow').absolute()}/mlflow.db"


class MlflowSink:
    """A run of MLflow, one for all jobs of a campaign, in the store that `find_mlflow_store` names."""

    def __init__(self, campaign: CampaignDir, metrics: MetricsConfig) -> None:
        from mlflow import MlflowClient  # noqa: TID251
        from mlflow.entities import Metric, Param  # noqa: TID251

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._metric = Metric
        store, name = find_mlflow_store(campaign), metrics.mlflow_experiment
        self._client = MlflowClient(tracking_uri=store)
        experiment = self._client.get_experiment_by_name(name)
        # A database would have artifacts in the current directory.
        artifacts = (
            (campaign.metrics / "mlflow" / "artifacts").absolute().as_uri() if store.startswith("sqlite:") else None
        )
        experiment_id = (
            self._client.create_experiment(name, artifact_location=artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        id = identify_campaign(campaign)
        found = self._client.search_runs([experiment_id], f"tags.`{MLFLOW_ID_TAG}` = '{id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        run = self._client.create_run(experiment_id, run_name=campaign.name, tags={MLFLOW_ID_TAG: id})
        self._run_id = run.info.run_id
        values = ((key, str(value)) for key, value in flatten_table(read_json(campaign.recipe)))
        parameters = (Param(key, value[:MLFLOW_VALUE_CHARS]) for key, value in values if value)
        while batch := list(itertools.islice(parameters, MLFLOW_MAX_PARAMETERS)):
            self._client.log_batch(self._run_id, params=batch)

    def write(self, figures: EventFigures) -> None:
        time_ms = round(figures.time * 1000)
        values = iter([self._metric(name, value, time_ms, figures.step) for name, value in figures.values.items()])
        while batch := list(itertools.islice(values, MLFLOW_MAX_METRICS)):
            self._client.log_batch(self._run_id, metrics=batch)

    def rewind_before(self, step: int) -> None:
        """Do nothing: MLflow keeps both values of a step, and shows the later one last."""

    def flush(self) -> None:
        """Do nothing: each request is written at once."""

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def identify_campaign(campaign: CampaignDir) -> str:
    """Return an id that no other campaign of this name has."""
    created = read_json(campaign.manifest)["created"]
    return xxhash.xxh3_64_hexdigest(f"{campaign.name}/{created}".encode())
