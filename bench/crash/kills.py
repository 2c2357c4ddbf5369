"""SIGKILL at any moment, to writer, scorer and consumer."""

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.crash.campaign import Consumer, Losses, Scorer, Writer, judge
from hpcrl.errors import SpoolError

_FORK = multiprocessing.get_context("fork")
_MEAN_TOKENS = 4000


@dataclass
class Child:
    """A process that writes what happened into a pipe, a line each."""

    process: multiprocessing.process.BaseProcess
    pipe: int

    @classmethod
    def start(cls, run: Callable[[int], None]) -> "Child":
        ours, theirs = os.pipe()
        process = _FORK.Process(target=run, args=(theirs,))
        process.start()
        os.close(theirs)
        return cls(process, ours)

    def kill(self) -> list[str]:
        """Its last words; a line that was cut off does not count."""
        self.process.kill()
        self.process.join()
        with os.fdopen(self.pipe) as lines:
            return [line.rstrip("\n") for line in lines if line.endswith("\n")]


def campaign(root: Path, *, num_kills: int, seed: int) -> tuple[Losses, int]:
    """Kill `num_kills` times in one campaign; the losses, and how many trajectories were acknowledged."""
    rng = random.Random(seed)
    losses = Losses()
    acknowledged: list[str] = []
    for number in range(num_kills // 3):
        first = 1 + max((int(name.split("/")[1]) for name in acknowledged), default=-1)
        writer = Child.start(partial(_write, root, first, seed + number))
        others = [Child.start(partial(_score, root)), Child.start(partial(_consume, root))]
        time.sleep(rng.uniform(0.01, 0.15))
        for child in rng.sample([writer, *others], 3):
            if child is writer:
                acknowledged += child.kill()
            else:
                losses.unreadable += child.kill()
            time.sleep(rng.uniform(0.0, 0.03))
    losses.add(judge(root, acknowledged))
    return losses, len(set(acknowledged))


def _write(root: Path, first: int, seed: int, pipe: int) -> None:
    writer = Writer(root, first=first, seed=seed, mean_tokens=_MEAN_TOKENS)
    while True:
        for name in writer.step():
            os.write(pipe, f"{name}\n".encode())


def _score(root: Path, pipe: int) -> None:
    scorer = Scorer(root)
    while True:
        try:
            scorer.step()
        except SpoolError as error:
            _report(pipe, str(error))
        time.sleep(0.002)


def _consume(root: Path, pipe: int) -> None:
    consumer = Consumer(root, on_damage=lambda what: _report(pipe, what))
    while True:
        if not consumer.step():
            time.sleep(0.002)


def _report(pipe: int, what: str) -> None:
    os.write(pipe, f"{what}\n".replace("\n", " ").encode() + b"\n")
