"""The metrics process: `python -m hpcrl.job.metrics_export CAMPAIGN JOB` sends figures to TensorBoard and W&B.

    extract_figures       the figures of an event, or None (pure)
    EventFigures          the figures of one event, with their step
    FIELDS_BY_HEADING     the headings of a step's fields
    make_sink_factories   the sinks that a recipe asks for, by name, not yet opened
    MetricsSink           the interface of a sink
    TensorBoardSink, WandbSink   its implementations
    MetricsFeeder         read new events and send their figures to every sink
    POLL_INTERVAL_S       the time between two reads

It is a separate process, started by the driver, so that no worker waits for a sink. It continues where the metrics
process of the job before stopped; on SIGTERM it exports the remaining events and ends.
"""

import contextlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import xxhash

from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import CampaignEvent, EvaluationFinished, FaultReported, StepFinished, TrainingResumed
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import MetricsConfig
from hpcrl.plan.records import read_recipe
from hpcrl.system.files import make_private_dir, publish_json, read_json
from hpcrl.system.network import current_node
from hpcrl.system.processes import die_with_parent

FIELDS_BY_HEADING = {
    "reward": ("reward_mean", "reward_std", "num_trajectories", "num_groups", "num_flat_groups", "num_too_long"),
    "length": ("length_mean", "length_max", "num_tokens", "num_padded_tokens"),
    "policy": ("loss", "value_loss", "kl", "kl_reference", "entropy", "clip_fraction", "grad_norm", "learning_rate"),
    "is_ratio": ("is_ratio_mean", "is_ratio_p05", "is_ratio_p50", "is_ratio_p95", "is_truncated_fraction"),
    "staleness": ("lag_mean", "lag_max"),
    "speed": ("tokens_per_s", "mfu", "step_s", "wait_s", "imbalance"),
}
"""The fields of a step, by the heading under which they are shown."""


class EventFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one event that TensorBoard and W&B get, under their headings."""

    time: float
    step: int
    """The training step; for an evaluation, the version of the weights."""
    values: dict[str, float]


def extract_figures(event: CampaignEvent) -> EventFigures | None:
    """Return the figures of a training step or an evaluation; None for other events."""
    match event:
        case StepFinished():
            return _make_figures(event, step=event.step, values=_step_values(event))
        case EvaluationFinished():
            return _make_figures(event, step=event.version, values=_evaluation_values(event))
    return None


def _make_figures(event: CampaignEvent, *, step: int, values: Iterator[tuple[str, Any]]) -> EventFigures:
    numbers = {name: float(value) for name, value in values if isinstance(value, int | float) and math.isfinite(value)}
    return EventFigures(time=event.time, step=step, values=numbers)


def _step_values(event: StepFinished) -> Iterator[tuple[str, Any]]:
    for group, names in FIELDS_BY_HEADING.items():
        yield from ((f"{group}/{name}", getattr(event, name)) for name in names)
    yield from ((f"staleness/lag_{lag}", num) for lag, num in event.lags.items())
    yield from ((f"time/{name}_s", seconds) for name, seconds in event.times.items())


def _evaluation_values(event: EvaluationFinished) -> Iterator[tuple[str, Any]]:
    for name in ("reward_mean", "length_mean", "num_episodes", "num_faults"):
        yield f"evaluation/{name}", getattr(event, name)
    yield from ((f"evaluation/reward_mean/{name}", reward) for name, reward in event.domains.items())


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
        found["wandb"] = partial(WandbSink, campaign, metrics)
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


class WandbSink:
    """A run of Weights & Biases, one for all jobs of a campaign; offline, `wandb sync` sends its directories later."""

    def __init__(self, campaign: CampaignDir, metrics: MetricsConfig) -> None:
        import wandb  # noqa: TID251

        created = read_json(campaign.manifest)["created"]
        mode: Literal["online", "offline"] = "online" if metrics.wandb == "online" else "offline"
        settings = wandb.Settings(
            console="off", disable_code=True, disable_git=True, x_disable_machine_info=True, x_disable_stats=True
        )
        self._run: Any = wandb.init(
            project=metrics.wandb_project,
            name=campaign.name,
            id=xxhash.xxh3_64_hexdigest(f"{campaign.name}/{created}".encode()),
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(make_private_dir(campaign.metrics / "wandb")),
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


POLL_INTERVAL_S = 2.0


class MetricsFeeder:
    """The reader of new events that sends their figures to every sink that still works."""

    def __init__(
        self,
        campaign: CampaignDir,
        factories: Mapping[str, Callable[[], MetricsSink]],
        *,
        emit: Callable[[CampaignEvent], None],
    ) -> None:
        self._state = campaign.metrics / "read.json"
        self._emit = emit
        self._factories = factories
        self._sinks: dict[str, MetricsSink] = {}
        self._reader = EventReader(campaign.events)

    def open(self) -> None:
        """Open the sinks, and continue where the last reader stopped."""
        for name, make in self._factories.items():
            with self._isolate_failure(name):
                self._sinks[name] = make()
        with contextlib.suppress(FileNotFoundError):
            self._reader.offsets = read_json(self._state)

    def feed(self) -> None:
        """Send new figures. If this process is killed before it stores its position, they are sent again."""
        events = sorted(self._reader.poll(), key=lambda event: (event.job, event.time))
        for event in events:
            self._send_event(event)
        for name, sink in list(self._sinks.items()):
            with self._isolate_failure(name):
                sink.flush()
        if events:
            publish_json(self._state, self._reader.offsets)

    def close(self) -> None:
        for name, sink in list(self._sinks.items()):
            with self._isolate_failure(name):
                sink.close()

    def _send_event(self, event: CampaignEvent) -> None:
        if isinstance(event, TrainingResumed):
            self._for_each_sink(lambda sink: sink.rewind_before(event.step + 1))
        elif (figures := extract_figures(event)) is not None:
            self._for_each_sink(lambda sink: sink.write(figures))

    def _for_each_sink(self, action: Callable[[MetricsSink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            with self._isolate_failure(name):
                action(sink)

    @contextlib.contextmanager
    def _isolate_failure(self, name: str) -> Iterator[None]:
        """Report a sink that fails and drop it; the other sinks continue."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a foreign package may raise anything; the campaign continues
            self._sinks.pop(name, None)
            detail = f"{name} was dropped: {type(error).__name__}: {error}"
            self._emit(FaultReported(what="metrics", detail=detail))


def main() -> int:
    campaign, job = CampaignDir(Path(sys.argv[1])), int(sys.argv[2])
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    die_with_parent()
    events = EventLog.open(campaign, "metrics", 0, job=job, role="metrics", node=current_node())
    make_private_dir(campaign.metrics)
    recipe = read_recipe(campaign)
    feeder = MetricsFeeder(campaign, make_sink_factories(recipe.metrics, campaign=campaign), emit=events.emit)
    feeder.open()
    while not stopping.wait(POLL_INTERVAL_S):
        feeder.feed()
    feeder.feed()
    feeder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
