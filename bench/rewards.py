"""Slow rewards against instant ones, in the process of a reward worker: `python -m bench.rewards`.

    judge     an async reward of 2 s for each of the 512 trajectories of a step: time of a step : with an instant reward
    plain     the same as a plain function, one process a call
    hang      a reward that never returns for one trajectory in a hundred, with `reward_timeout_s` = 5

Segments of 8 trajectories are written at a steady pace, as env workers do when they do not wait for training, and each
is requested at once. A step is complete once 512 more trajectories have a reward or a reason why not; its time is the
mean interval between steps.
"""

import asyncio
import shutil
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import msgspec

from bench import figures
from bench.figures import Figure
from bench.peers import records
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import load_recipe
from hpcrl.rollout.reward_process import RewardProcess
from hpcrl.spool.record import Trajectory
from hpcrl.spool.segment import write_segment
from hpcrl.system.files import publish_file

BAR_WAIT = 1.05
PER_STEP, PER_SEGMENT, NUM_STEPS = 512, 8, 3
JUDGE_S = 2.0


def instant(trajectory: Trajectory) -> float:
    del trajectory
    return 1.0


async def judged(trajectory: Trajectory) -> float:
    del trajectory
    await asyncio.sleep(JUDGE_S)
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
    base, _ = _run(instant.__name__, step_s=step_s)
    found = [Figure(name="instant: step", value=base, unit="s")]
    for function, bar in ((judged.__name__, BAR_WAIT), (slow.__name__, None), (hanging.__name__, None)):
        mean, failed = _run(function, step_s=step_s)
        found.append(Figure(name=f"{function}: step / instant", value=mean / base, bar=bar, better="lower"))
        if function == hanging.__name__:
            wrong = failed ^ {number for number in range(NUM_STEPS * PER_STEP) if hangs(number)}
            found.append(Figure(name=f"{function}: trajectories without a reward", value=len(failed), unit=""))
            name = f"{function}: others without one, or that hang and have one"
            found.append(Figure(name=name, value=len(wrong), unit="", bar=0, better="lower"))
    return found


def _run(function: str, *, step_s: float) -> tuple[float, set[int]]:
    """Return the mean time of a step, and the trajectories without a reward."""
    root = Path(tempfile.mkdtemp(prefix="hpcrl-bench-"))
    recipe = load_recipe("quickstart")
    lake = msgspec.structs.replace(
        recipe.domains["lake"], reward=f"bench.rewards:{function}", reward_timeout_s=5.0, reward_options={}
    )
    publish_file(CampaignDir(root).recipe, msgspec.json.encode(msgspec.structs.replace(recipe, domains={"lake": lake})))
    process = RewardProcess(root, concurrency=recipe.reward.concurrency, num_cpus=1)
    try:
        return _feed(process, root, pace_s=step_s * PER_SEGMENT / PER_STEP)
    finally:
        process.close()
        shutil.rmtree(root)


def _feed(process: RewardProcess, root: Path, *, pace_s: float) -> tuple[float, set[int]]:
    num_written = num_scored = 0
    failed: set[int] = set()
    completed: list[float] = []
    _request(process, root, PER_STEP * NUM_STEPS)  # imports are no part of a step
    while process.receive(60.0) is None:
        pass
    start = time.monotonic()
    while len(completed) < NUM_STEPS:
        due = start + num_written // PER_SEGMENT * pace_s
        if num_written < PER_STEP * NUM_STEPS and time.monotonic() >= due:
            _request(process, root, num_written)
            num_written += PER_SEGMENT
            continue
        answer = process.receive(
            max(min(due - time.monotonic(), 0.2), 0.0) if num_written < PER_STEP * NUM_STEPS else 0.2
        )
        if answer is not None:
            num_scored += len(answer.scores)
            first = int(Path(answer.segment).stem)
            failed |= {first + index for index, score in enumerate(answer.scores) if score and score.error}
            if num_scored >= PER_STEP * (len(completed) + 1):
                completed.append(time.monotonic())
    return fmean(after - before for before, after in pairwise(completed)), failed


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
