"""Slow rewards against instant ones, in the process of a reward worker: `python -m bench.rewards`.

    judged    `hpcrl.envs.judge:judge` for each of the 512 trajectories of a step, and a program that answers each HTTP
              request after 2 s: time of a step : with an instant reward
    slow      2 s in a plain function, one process a call
    hanging   a reward that never returns for one trajectory in a hundred, with the default `reward_timeout_s`

Segments of 8 trajectories are written at a steady pace, as env workers do when they do not wait for training, and each
is requested at once. A step is complete once 512 more trajectories have a reward or a reason why not; its time is the
mean interval between steps. The scores of a segment are sent together, so that those beside a hanging one wait for it.
"""

import asyncio
import contextlib
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean

import msgspec
from aiohttp import web

from bench import figures
from bench.figures import Figure
from bench.peers import records
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import TinyModel
from hpcrl.models.tiny import make_tiny_model
from hpcrl.rollout.reward_process import RewardProcess
from hpcrl.spool.record import Trajectory
from hpcrl.spool.segment import write_segment
from hpcrl.system.files import publish_file
from hpcrl.testing.recipes import load_recipe

BAR_WAIT = 1.05
PER_STEP, PER_SEGMENT, NUM_STEPS = 512, 8, 3
JUDGE_S = 2.0
MIN_LATE_S = 60.0


def instant(trajectory: Trajectory) -> float:
    del trajectory
    return 1.0


def slow(trajectory: Trajectory) -> float:
    del trajectory
    time.sleep(JUDGE_S)
    return 1.0


def hanging(trajectory: Trajectory) -> float:
    while hangs(int(trajectory.id.split("/")[1])):
        time.sleep(1.0)
    return 1.0


def hangs(number: int) -> bool:
    """Return whether the reward of a trajectory never returns: one in a hundred."""
    return number % 100 == 99


def measure(full: bool) -> list[Figure]:
    step_s = 60.0 if full else 20.0
    base = _run("bench.rewards:instant", step_s=step_s)
    with serve_judge() as url:
        options = {"url": url, "model": "slow", "key_variable": "HPCRL_BENCH_NO_KEY"}
        judged = _run("hpcrl.envs.judge:judge", step_s=step_s, options=options)
    plain, hung = (_run(f"bench.rewards:{name}", step_s=step_s) for name in ("slow", "hanging"))
    lost = {number for number in range(NUM_STEPS * PER_STEP) if hangs(number)}
    late = sum(wait_s > MIN_LATE_S for wait_s in hung.waits_s) / len(hung.waits_s)
    return [
        Figure(name="instant: step", value=base.step_s, unit="s"),
        Figure(name="judged: step / instant", value=judged.step_s / base.step_s, bar=BAR_WAIT, better="lower"),
        Figure(name="judged: trajectories without a reward", value=len(judged.failed), unit="", bar=0, better="lower"),
        Figure(name="judged: mean wait for the scores of a segment", value=fmean(judged.waits_s), unit="s"),
        Figure(name="slow: step / instant", value=plain.step_s / base.step_s),
        Figure(name="hanging: step / instant", value=hung.step_s / base.step_s),
        Figure(name="hanging: longest wait for the scores of a segment", value=max(hung.waits_s), unit="s"),
        Figure(name=f"hanging: segments that wait for more than {MIN_LATE_S:g} s", value=late, unit="share"),
        Figure(name="hanging: trajectories without a reward", value=len(hung.failed), unit=""),
        Figure(
            name="hanging: others without one, or that hang and have one",
            value=len(hung.failed ^ lost),
            unit="",
            bar=0,
            better="lower",
        ),
    ]


@contextlib.contextmanager
def serve_judge() -> Iterator[str]:
    """Serve a judge whose answers take JUDGE_S from a separate process; yield its address."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_forever, args=(theirs,))
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/v1"
    finally:
        process.terminate()
        process.join()


def _serve_forever(connection: Connection) -> None:
    asyncio.run(_serve_answers(connection))


async def _serve_answers(connection: Connection) -> None:
    async def answer(request: web.Request) -> web.Response:
        await request.json()
        await asyncio.sleep(JUDGE_S)
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "7"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    connection.send(runner.addresses[0][1])
    await asyncio.Event().wait()


@dataclass
class RewardRun:
    """What was measured with one reward function."""

    step_s: float
    """The mean time of a step."""
    failed: set[int]
    """The trajectories without a reward."""
    waits_s: list[float]
    """The time from the request of each segment to its scores."""


def _run(reward: str, *, step_s: float, options: dict[str, str] | None = None) -> RewardRun:
    root = Path(tempfile.mkdtemp(prefix="hpcrl-bench-"))
    recipe = load_recipe("quickstart")
    lake = msgspec.structs.replace(recipe.domains["lake"], reward=reward, reward_options=options or {})
    publish_file(CampaignDir(root).recipe, msgspec.json.encode(msgspec.structs.replace(recipe, domains={"lake": lake})))
    make_tiny_model(CampaignDir(root).model, recipe.model.tiny or TinyModel(), seed=0)  # whose tokens judges read
    process = RewardProcess(root, concurrency=recipe.reward.concurrency, num_cpus=1)
    try:
        return _feed(process, root, pace_s=step_s * PER_SEGMENT / PER_STEP)
    finally:
        process.close()
        shutil.rmtree(root)


def _feed(process: RewardProcess, root: Path, *, pace_s: float) -> RewardRun:
    num_written = num_scored = 0
    requested: dict[int, float] = {}
    waits_s: list[float] = []
    failed: set[int] = set()
    completed: list[float] = []
    _request(process, root, PER_STEP * NUM_STEPS)  # imports are not a part of a step
    while process.receive(60.0) is None:
        pass
    start = time.monotonic()
    while len(completed) < NUM_STEPS:
        due = start + num_written // PER_SEGMENT * pace_s
        if num_written < PER_STEP * NUM_STEPS and time.monotonic() >= due:
            requested[num_written] = time.monotonic()
            _request(process, root, num_written)
            num_written += PER_SEGMENT
            continue
        answer = process.receive(
            max(min(due - time.monotonic(), 0.2), 0.0) if num_written < PER_STEP * NUM_STEPS else 0.2
        )
        if answer is not None:
            num_scored += len(answer.scores)
            first = int(Path(answer.segment).stem)
            waits_s.append(time.monotonic() - requested[first])
            failed |= {first + index for index, score in enumerate(answer.scores) if score and score.error}
            if num_scored >= PER_STEP * (len(completed) + 1):
                completed.append(time.monotonic())
    return RewardRun(fmean(after - before for before, after in pairwise(completed)), failed, waits_s)


def _request(process: RewardProcess, root: Path, first: int) -> None:
    path = root / f"{first}.h5"
    batch = records.of_lengths([256] * PER_SEGMENT)
    ids = [f"lake/{number}/0" for number in range(first, first + PER_SEGMENT)]
    write_segment(
        path,
        [msgspec.structs.replace(one, id=id, domain="lake", status="done") for one, id in zip(batch, ids, strict=True)],
    )
    process.request(path)


if __name__ == "__main__":
    sys.exit(figures.main("rewards", measure))
