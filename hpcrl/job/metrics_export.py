"""Send the figures of training to TensorBoard, Weights & Biases and MLflow.

    extract_figures       the figures of an event, or None (pure)
    FIELDS_BY_HEADING     the headings of a step's fields
    FIGURE_KINDS          the events that are read
    MetricsFeeder         read new events and send their figures to every sink
    select_valid_figures  the figures of all events, without those of steps that were trained again
    send_recorded         send what a campaign has recorded to one tracker, and what is new when called again
    export_recorded       the same as the command that `hpcrl export` runs
    FEED_INTERVAL_S       the time between two reads

`python -m hpcrl.job.metrics_export CAMPAIGN JOB` is the metrics process. The driver starts it, so that no worker waits
for a sink. It continues where the metrics process of the job before stopped; on SIGTERM it exports the remaining events
and ends. `python -m hpcrl.job.metrics_export CAMPAIGN wandb|mlflow` is the work of `hpcrl export`.
"""

import contextlib
import math
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcrl.campaign_dir.event_log import EventLog, EventReader, choose_kinds
from hpcrl.campaign_dir.events import CampaignEvent, EvaluationFinished, FaultReported, StepFinished, TrainingResumed
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.job.metric_sinks import (
    EventFigures,
    MetricsSink,
    MlflowSink,
    WandbSink,
    choose_wandb_mode,
    find_mlflow_store,
    make_sink_factories,
)
from hpcrl.plan.records import read_recipe
from hpcrl.system.exit_codes import EXIT_USAGE, run_for_code
from hpcrl.system.files import make_private_dir, publish_json, read_json
from hpcrl.system.network import current_node
from hpcrl.system.processes import die_with_parent
from hpcrl.system.terminal import print_line, print_to_stderr, show_wait, track_progress

FIELDS_BY_HEADING = {
    "reward": ("reward_mean", "reward_std", "num_trajectories", "num_groups", "num_flat_groups", "num_too_long"),
    "length": ("length_mean", "length_max", "num_rows", "num_tokens", "num_padded_tokens"),
    "policy": (
        "loss",
        "value_loss",
        "kl",
        "kl_fresh",
        "kl_reference",
        "entropy",
        "clip_fraction",
        "replayed_fraction",
        "grad_norm",
        "learning_rate",
    ),
    "is_ratio": ("is_ratio_mean", "is_ratio_p05", "is_ratio_p50", "is_ratio_p95", "is_truncated_fraction"),
    "staleness": ("lag_mean", "lag_max"),
    "speed": ("tokens_per_s", "mfu", "step_s", "wait_s", "imbalance"),
}
"""The fields of a step, by the heading under which they are shown."""


FIGURE_KINDS = [str(kind.__struct_config__.tag) for kind in (StepFinished, EvaluationFinished, TrainingResumed)]
"""The kinds of events that have figures, or undo some."""


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


FEED_INTERVAL_S = 2.0


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
        self._reader = EventReader(campaign.events, choose_lines=choose_kinds(FIGURE_KINDS))

    def open(self) -> None:
        """Open the sinks, and continue where the last reader stopped."""
        for name, make in self._factories.items():
            with self._isolate_failure(name):
                self._sinks[name] = make()
        with contextlib.suppress(FileNotFoundError, ValueError):  # without it figures are sent again
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


def select_valid_figures(events: Iterable[CampaignEvent]) -> list[EventFigures]:
    """Return the figures of events in their order; a step that was trained again after a resume counts once."""
    steps: list[EventFigures] = []
    evaluations: list[EventFigures] = []
    for event in sorted(events, key=lambda event: (event.job, event.time)):
        if isinstance(event, TrainingResumed):
            steps = [figures for figures in steps if figures.step <= event.step]
        elif (figures := extract_figures(event)) is not None:
            (steps if isinstance(event, StepFinished) else evaluations).append(figures)
    return sorted([*steps, *evaluations], key=lambda figures: figures.time)


def send_recorded(campaign: CampaignDir, name: str, make_sink: Callable[[], MetricsSink]) -> int:
    """Send the figures that this tracker has not got yet; return their number."""
    state = make_private_dir(campaign.metrics) / f"sent-{name}.json"
    sent_until = 0.0
    with contextlib.suppress(FileNotFoundError):
        sent_until = read_json(state)["time"]
    reader = EventReader(campaign.events, choose_lines=choose_kinds(FIGURE_KINDS))
    figures = [one for one in select_valid_figures(reader.poll()) if one.time > sent_until]
    if not figures:
        return 0
    with show_wait(f"{name} is started"):  # its import alone takes seconds
        sink = make_sink()
    for one in track_progress(figures, f"to {name}"):
        sink.write(one)
    sink.flush()
    sink.close()
    publish_json(state, {"time": figures[-1].time})
    return len(figures)


def export_recorded(campaign: CampaignDir, name: str) -> int:
    """Send what a campaign has recorded to `wandb` or `mlflow`, print how much it was, and return the exit code."""
    metrics = read_recipe(campaign, skips_unknown=True).metrics
    sinks: dict[str, Callable[[], MetricsSink]] = {
        "wandb": lambda: WandbSink(campaign, metrics, mode=choose_wandb_mode()),
        "mlflow": lambda: MlflowSink(campaign, metrics),
    }
    try:
        num = send_recorded(campaign, name, sinks[name])
    except ImportError as error:
        print_to_stderr(
            f"hpcrl: {sys.executable} has no package {error.name or name}: pip install 'hpcrl[{name}]' there"
        )
        return EXIT_USAGE
    except Exception as error:  # noqa: BLE001 - a foreign package may raise anything
        print_to_stderr(f"hpcrl: {name}: {type(error).__name__}: {error}")
        return 1
    print_line(f"{num} records of figures were added to {name}" if num else f"{name} has all figures already")
    print_line(_describe_place(campaign, name))
    return 0


def _describe_place(campaign: CampaignDir, name: str) -> str:
    """Return where a tracker has the figures, and how they are seen."""
    if name == "mlflow":
        store = find_mlflow_store(campaign)
        return f"in {store}: `mlflow ui --backend-store-uri {shlex.quote(store)}` shows them"
    if (mode := choose_wandb_mode()) != "offline":
        return f"by WANDB_MODE={mode}"
    runs = campaign.metrics / "wandb" / "wandb"
    return f"in {runs}: `wandb sync {shlex.quote(str(runs))}/offline-run-*` sends them; WANDB_MODE=online does at once"


def _feed_continuously(campaign: CampaignDir, job: int) -> int:
    """Run the metrics process of a job until SIGTERM."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    die_with_parent()
    events = EventLog.open(campaign, "metrics", 0, job=job, role="metrics", node=current_node())
    make_private_dir(campaign.metrics)
    recipe = read_recipe(campaign)
    feeder = MetricsFeeder(campaign, make_sink_factories(recipe.metrics, campaign=campaign), emit=events.emit)
    feeder.open()
    while not stopping.wait(FEED_INTERVAL_S):
        feeder.feed()
    feeder.feed()
    feeder.close()
    return 0


def main() -> int:
    campaign, target = CampaignDir(Path(sys.argv[1])), sys.argv[2]
    if target.isdigit():
        return _feed_continuously(campaign, int(target))
    return run_for_code(lambda: export_recorded(campaign, target))


if __name__ == "__main__":
    sys.exit(main())
