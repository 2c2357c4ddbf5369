"""Where figures are shown: TensorBoard and Weights & Biases, each behind the same four methods.

sinks_of   the sinks that a recipe asks for, by name, not yet opened
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import xxhash

from hpcrl.files import private_dir, read_json
from hpcrl.metrics.figures import Figures
from hpcrl.recipe import Metrics
from hpcrl.rundir import RunDir


class Sink(Protocol):
    """Shows figures. Whatever it raises is its own end, and nobody else's."""

    def write(self, figures: Figures) -> None: ...

    def go_back_before(self, step: int) -> None:
        """What was shown of this step and later ones is of a past that a resume left."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


def sinks_of(metrics: Metrics, *, run: RunDir) -> dict[str, Callable[[], Sink]]:
    """What makes each sink that the recipe asks for."""
    found: dict[str, Callable[[], Sink]] = {}
    if metrics.tensorboard:
        found["tensorboard"] = partial(TensorBoard, run.metrics / "tensorboard")
    if metrics.wandb != "off":
        found["wandb"] = partial(WeightsAndBiases, run, metrics)
    return found


class TensorBoard:
    """Event files of TensorBoard: `tensorboard --logdir CAMPAIGN/metrics/tensorboard` shows them."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._writer = EventFileWriter(str(private_dir(directory)))

    def write(self, figures: Figures) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.values.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=figures.time, step=figures.step, summary=summary))

    def go_back_before(self, step: int) -> None:
        began = self._session(status=self._session.START)
        self._writer.add_event(self._event(step=step, session_log=began))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, one for all jobs of a campaign; offline, `wandb sync` sends its directories later."""

    def __init__(self, run: RunDir, metrics: Metrics) -> None:
        import wandb

        created = read_json(run.campaign)["created"]
        mode: Literal["online", "offline"] = "online" if metrics.wandb == "online" else "offline"
        settings = wandb.Settings(
            console="off", disable_code=True, disable_git=True, x_disable_machine_info=True, x_disable_stats=True
        )
        self._run: Any = wandb.init(
            project=metrics.wandb_project,
            name=run.name,
            id=xxhash.xxh3_64_hexdigest(f"{run.name}/{created}".encode()),
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(private_dir(run.metrics / "wandb")),
            config=read_json(run.recipe),
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # steps may go back, and W&B's own count may not

    def write(self, figures: Figures) -> None:
        self._run.log({"step": figures.step, **figures.values})

    def go_back_before(self, step: int) -> None:
        """What is shown again lies over what was shown before."""

    def flush(self) -> None:
        """Its own process writes as it goes."""

    def close(self) -> None:
        self._run.finish()
