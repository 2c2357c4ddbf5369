"""Run ten thousand episodes at once on one env worker, in real time: memory, CPU and lag of the event loop.

measure    runs a crowd in a separate process -> Crowd
"""

import asyncio
import gc
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bench.rolling.campaign import RollingSetting, opened
from bench.rolling.world import plain

GROUP_SIZE = 8
SAMPLE_S = 0.01
NUM_TURNS = 3
NUM_SHOWN, NUM_GENERATED = 40, 20
"""Tokens of a turn."""
PER_ENGINE = 1250
"""Episodes per engine; all their KV fits, so that the env worker is what is measured."""


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """The measurements of a crowd."""

    num_running: int
    """The most that ran at once."""
    num_done: int
    lag_p99_s: float
    bytes_per_episode: float
    cpu_per_episode_s: float


def measure(num: int, *, step_s: float) -> Crowd:
    """Run `num` light episodes to their ends, all at once; each step takes `step_s` on average."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(num, step_s, theirs))
    process.start()
    theirs.close()
    try:
        crowd: Crowd = ours.recv()
    finally:
        process.join()
    return crowd


def _run(num: int, step_s: float, pipe: Connection) -> None:
    pipe.send(asyncio.run(_crowd(num, step_s=step_s)))


async def _crowd(num: int, *, step_s: float) -> Crowd:
    setting = RollingSetting(
        plays=plain(
            mean_s=step_s, sigma_s=step_s / 4, num_turns=NUM_TURNS, num_shown=NUM_SHOWN, num_generated=NUM_GENERATED
        ),
        num_steps=1,
        groups_per_step=num // GROUP_SIZE,
        max_running=num,
        max_lag=0,
        mode="sync",
        num_gpus=-(-num // PER_ENGINE),
        max_batch=PER_ENGINE,
    )
    gc.collect()
    before = _resident()
    async with opened(setting) as stage:
        cpu = time.process_time()
        lags: list[float] = []
        watching = asyncio.create_task(_watch(lags))
        most, most_bytes = 0, 0
        while len(stage.spool.durable) < num:
            await asyncio.sleep(0.5)
            if stage.living.done():
                stage.living.result()
            most = max(most, stage.host.accounts.groups.num_running)
            most_bytes = max(most_bytes, _resident() - before)
        watching.cancel()
        cpu = time.process_time() - cpu
    lags.sort()
    return Crowd(
        num_running=most,
        num_done=num,
        lag_p99_s=lags[int(len(lags) * 0.99)],
        bytes_per_episode=most_bytes / num,
        cpu_per_episode_s=cpu / num,
    )


async def _watch(lags: list[float]) -> None:
    """Sample the lag of the event loop without end."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + SAMPLE_S
        await asyncio.sleep(SAMPLE_S)
        lags.append(loop.time() - due)


def _resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
