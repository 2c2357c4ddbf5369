"""Reward functions of many kinds: slow, hanging, dying, async, of lists, and such that return what is not a reward."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

from hpcrl.spool.record import Trajectory


def number(trajectory: Trajectory) -> int:
    """Return a trajectory's index in its group."""
    return int(trajectory.id.rpartition("/")[2])


def note(trajectory: Trajectory, *, directory: str) -> float:
    """Leave a file for each call."""
    (Path(directory) / f"{number(trajectory)}-{time.monotonic_ns()}").touch()
    return float(number(trajectory))


def refuse(trajectory: Trajectory) -> float:
    """Raise an error whose text is another for each trajectory."""
    raise ValueError(f"no {trajectory.id!r} with {time.monotonic()}")


def hang_for(trajectory: Trajectory, *, index: int) -> float:
    """Hang for one trajectory, in a loop that ignores signals, after starting a program that hangs too."""
    if number(trajectory) == index:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "86399"], start_new_session=True)
        while True:
            pass
    return float(number(trajectory))


def die_for(trajectory: Trajectory, *, index: int) -> float:
    """End the process that computes it, for one trajectory."""
    if number(trajectory) == index:
        os.kill(os.getpid(), signal.SIGKILL)
    return float(number(trajectory))


async def wait_together(trajectory: Trajectory, *, directory: str, num: int) -> float:
    """Return once `num` calls are under way at the same time."""
    (Path(directory) / str(number(trajectory))).touch()
    while len(list(Path(directory).iterdir())) < num:
        await asyncio.sleep(0.01)
    return float(number(trajectory))


def block_together(trajectory: Trajectory, *, directory: str, num: int) -> float:
    """Do the same in a plain function."""
    (Path(directory) / str(number(trajectory))).touch()
    while len(list(Path(directory).iterdir())) < num:
        time.sleep(0.01)
    return float(number(trajectory))


async def block_for(trajectory: Trajectory, *, index: int) -> float:
    """Block the event loop for one trajectory."""
    if number(trajectory) == index:
        time.sleep(86400)
    await asyncio.sleep(0)
    return float(number(trajectory))


async def wait_for(trajectory: Trajectory, *, index: int) -> float:
    """Wait forever for one trajectory."""
    await asyncio.sleep(86400 * (number(trajectory) == index))
    return float(number(trajectory))


def of_all(trajectories: list[Trajectory], *, texts: list[str]) -> list[float]:
    """Score a list by its rank."""
    return [number(one) + len(trajectories) / 100 + bool(text) for one, text in zip(trajectories, texts, strict=True)]


def of_a_list_with(trajectories: list[Trajectory], *, index: int, fault: str) -> list[object]:
    """Fail for any list that has one trajectory."""
    if index in map(number, trajectories):
        match fault:
            case "hang":
                time.sleep(86400)
            case "raise":
                raise LookupError("not this one")
            case "value":
                return [float("nan") if number(one) == index else float(number(one)) for one in trajectories]
    return [float(number(one)) for one in trajectories]


def mean_of_list(trajectories: list[Trajectory]) -> list[float]:
    """Return one reward for all of them."""
    return [sum(map(number, trajectories)) / len(trajectories)]


def odd(trajectory: Trajectory, *, values: list[object]) -> object:
    """Return one of these values."""
    value = values[number(trajectory)]
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "huge": 10**400, "parts": {"a": 1, "b": 2.5}}.get(
        str(value), value
    )
