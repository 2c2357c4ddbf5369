"""`python -m hpcrl.metrics CAMPAIGN JOB`: the one reader that feeds TensorBoard and the like from the events.

A process of its own, started by the driver: neither the trainer nor anybody else waits for a sink. It goes on where
the reader of the job before left off; SIGTERM makes it take what is left and end.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.endpoints import this_node
from hpcrl.events import EventLog, EventReader
from hpcrl.files import private_dir, publish_json, read_json
from hpcrl.metrics.figures import figures_of
from hpcrl.metrics.sinks import Sink, sinks_of
from hpcrl.processes import die_with_parent
from hpcrl.recipe import Recipe
from hpcrl.rundir import RunDir

LOOK_S = 2.0


class Feeder:
    """Reads what is new and gives it to every sink that still works."""

    def __init__(self, run: RunDir, makers: Mapping[str, Callable[[], Sink]], *, emit: Callable[..., None]) -> None:
        self._state = run.metrics / "read.json"
        self._emit = emit
        self._makers = makers
        self._sinks: dict[str, Sink] = {}
        self._reader = EventReader(run.events)

    def open(self) -> None:
        """Open the sinks, and go on where the last reader left off."""
        for name, make in self._makers.items():
            with self._alone(name):
                self._sinks[name] = make()
        with contextlib.suppress(FileNotFoundError):
            self._reader.offsets = read_json(self._state)

    def feed(self) -> None:
        """Give on what is new. What was given and not noted when this process is killed is given again."""
        told = sorted(self._reader.poll(), key=lambda event: (event.get("job", 0), event.get("time", 0.0)))
        for event in told:
            self._give(event)
        for name, sink in list(self._sinks.items()):
            with self._alone(name):
                sink.flush()
        if told:
            publish_json(self._state, self._reader.offsets)

    def close(self) -> None:
        for name, sink in list(self._sinks.items()):
            with self._alone(name):
                sink.close()

    def _give(self, event: dict[str, Any]) -> None:
        if event.get("event") == "resumed":
            self._each(lambda sink: sink.go_back_before(event["step"] + 1))
        elif (figures := figures_of(event)) is not None:
            self._each(lambda sink: sink.write(figures))

    def _each(self, do: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            with self._alone(name):
                do(sink)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """A sink that fails is told of and left out from then on; the others go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a foreign package may raise anything; a campaign outlives it
            self._sinks.pop(name, None)
            detail = f"{name} is left out from now on: {type(error).__name__}: {error}"
            self._emit("fault", what="metrics", detail=detail)


def main() -> int:
    run, job = RunDir(Path(sys.argv[1])), int(sys.argv[2])
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    die_with_parent()
    worker = f"{job:03d}-metrics-0"
    events = EventLog(run.events / f"{worker}.jsonl", job=job, role="metrics", worker=worker, node=this_node())
    private_dir(run.metrics)
    recipe = msgspec.json.decode(run.recipe.read_bytes(), type=Recipe)
    feeder = Feeder(run, sinks_of(recipe.metrics, run=run), emit=events.emit)
    feeder.open()
    while not ending.wait(LOOK_S):
        feeder.feed()
    feeder.feed()
    feeder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
