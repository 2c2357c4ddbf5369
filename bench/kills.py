"""Useful share of the time while workers are killed, beside Parsl's retries alone: `python -m bench.kills`.

A campaign and the same work as apps of Parsl (bench/peers/parsl_retries.py) run at the same time on this machine: seven
workers play, two serve, one trains. Turns and training steps take time and no computing. After some undisturbed steps,
one of the ten workers gets SIGKILL in every step, at a random time: 10 % of the workers a step, each of them once in
ten steps, in random order. The useful share is the mean time of an undisturbed step over that of a step with a kill.

A step takes about 50 s here, and minutes in reality: the time until a killed worker works again counts for far more
here. Both have the same interval of heartbeats, 5 s, and a checkpoint after each step, which costs nothing here; with
`--checkpoint-every N` the campaign has fewer, and the steps that a killed trainer has lost do not count twice. In a
campaign the engines that are left serve what runs; an app of Parsl that asks a killed engine fails, and is retried from
its start. Where no step is made for 300 s, the kills end.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Protocol, TypeVar

import psutil

from bench.control import SITE
from bench.faults.watch import CampaignWatch
from bench.figures import Figure, main
from bench.peers.parsl_retries import GROUP_SIZE, GROUPS_PER_STEP, NUM_ENGINES, NUM_ROLLOUT_WORKERS
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CampaignEvent, StepFinished, WorkerStarted
from hpcrl.campaign_dir.paths import CampaignDir

EventType = TypeVar("EventType", bound=CampaignEvent)

_BAR = 0.85
_NUM_WARM = 2
"""The first steps, which do not count."""
_STEP_TIMEOUT_S = 300.0
_SEED = 20260103
_SETTLE_S = 0.2
_EPISODES = "bench.faults.slow_episodes"
_RECIPE = f"""
name = "kills"
[model.tiny]
[domains.slow]
env = "{_EPISODES}:SlowEnv"
reward = "{_EPISODES}:draw_reward"
max_turns = 8
[rollout]
group_size = {GROUP_SIZE}
max_lag = 2
max_running = {GROUPS_PER_STEP * GROUP_SIZE}
max_new_tokens = 1
[spool]
seal_after_s = 0.2
[train]
num_steps = 100000
groups_per_step = {GROUPS_PER_STEP}
checkpoint_every_steps = {{num_steps}}
learning_rate = 1e-4
[train.pipeline.wait]
function = "{_EPISODES}:wait_step"
inputs = ["score"]
role = "policy"
[train.pipeline.advantage]
inputs = ["wait"]
[engine]
backend = "sim"
[resources.env]
num_workers = {NUM_ROLLOUT_WORKERS}
mem_gib_per_worker = 0.5
[resources.decode]
num_workers = {NUM_ENGINES}
mem_gib_per_worker = 0.5
[job]
walltime_min = 600
"""


class KilledSystem(Protocol):
    """What makes steps while its workers are killed."""

    def list_workers(self) -> list[str]:
        """Return the names of its workers."""

    def list_step_times(self) -> list[float]:
        """Return when each step was made."""

    def find_process(self, worker: str) -> int | None:
        """Return the present process of a worker."""


@dataclass
class CampaignSystem:
    """A campaign on this machine."""

    campaign: CampaignDir

    def list_workers(self) -> list[str]:
        num = {"env": NUM_ROLLOUT_WORKERS, "decode": NUM_ENGINES, "train": 1}
        return [f"{role}-{index}" for role in num for index in range(num[role])]

    def list_step_times(self) -> list[float]:
        """Return when each step was made for the first time: a trainer that was killed makes some again."""
        times: dict[int, float] = {}
        for event in sorted(self._list_events(StepFinished), key=lambda event: event.time):
            times.setdefault(event.step, event.time)
        return list(times.values())

    def find_process(self, worker: str) -> int | None:
        started = [event for event in self._list_events(WorkerStarted) if event.worker == f"000-{worker}"]
        return max(started, key=lambda event: event.time).pid if started else None

    def _list_events(self, kind: type[EventType]) -> list[EventType]:
        events = EventReader(self.campaign.events).poll() if self.campaign.events.is_dir() else []
        return [event for event in events if isinstance(event, kind)]


@dataclass
class ParslSystem:
    """The apps of Parsl on this machine."""

    directory: Path

    def list_workers(self) -> list[str]:
        num = {"rollout": NUM_ROLLOUT_WORKERS, "engine": NUM_ENGINES, "train": 1}
        return [f"{role}-{index}" for role in num for index in range(num[role])]

    def list_step_times(self) -> list[float]:
        path = self.directory / "steps"
        return [json.loads(line)["time"] for line in path.read_text().splitlines()] if path.exists() else []

    def find_process(self, worker: str) -> int | None:
        path = self.directory / "workers" / worker
        return int(path.read_text()) if path.exists() else None


@dataclass(frozen=True)
class KillFigures:
    """The times of steps without kills and with them."""

    undisturbed: list[float]
    disturbed: list[float]
    """Of those that were made: fewer than kills were planned if no step is made any more."""
    num_kills: int

    @property
    def share(self) -> float:
        return fmean(self.undisturbed) / fmean(self.disturbed) if self.disturbed else 0.0


def follow_kills(system: KilledSystem, *, num_undisturbed: int, num_killed: int) -> KillFigures:
    """Let steps be made, then kill one worker in each."""
    rng = random.Random(_SEED)
    first = _NUM_WARM + num_undisturbed
    times = _await_steps(system, first + 1)
    undisturbed = [after - before for before, after in itertools.pairwise(times[_NUM_WARM:])]
    deck: list[str] = []
    num_kills = 0
    for number in range(num_killed):
        deck = deck or rng.sample(system.list_workers(), k=len(system.list_workers()))
        times = _await_steps(system, first + 1 + number)
        time.sleep(rng.uniform(0.0, 0.9 * median(undisturbed)))
        if len(times) <= first + number:
            break
        num_kills += _kill(system, deck.pop())
    times = _await_steps(system, first + 1 + num_killed)[first:]
    disturbed = [after - before for before, after in itertools.pairwise(times)][:num_killed]
    return KillFigures(undisturbed=undisturbed[:num_undisturbed], disturbed=disturbed, num_kills=num_kills)


def _await_steps(system: KilledSystem, num: int) -> list[float]:
    """Return the times of the steps once there are this many, or when none was made for long."""
    deadline, seen = time.monotonic() + _STEP_TIMEOUT_S, 0
    while len(times := system.list_step_times()) < num and time.monotonic() < deadline:
        if len(times) > seen:
            deadline, seen = time.monotonic() + _STEP_TIMEOUT_S, len(times)
        time.sleep(_SETTLE_S)
    return times


def _kill(system: KilledSystem, worker: str) -> bool:
    pid = system.find_process(worker)
    with contextlib.suppress(psutil.NoSuchProcess):
        if pid is not None:
            psutil.Process(pid).kill()
            print(json.dumps({"system": type(system).__name__, "killed": worker, "time": time.time()}), file=sys.stderr)
            return True
    return False


@contextlib.contextmanager
def running_campaign(home: Path, *, checkpoint_every: int) -> Iterator[CampaignSystem]:
    """Run the campaign for a block."""
    home.mkdir()
    (home / "wide.toml").write_text(SITE)
    (home / "kills.toml").write_text(_RECIPE.format(num_steps=checkpoint_every))
    environ = _make_environ() | {"HPCRL_HOME": str(home)}
    hpcrl = [sys.executable, "-m", "hpcrl.cli"]
    words = ["submit", str(home / "kills.toml"), "--site", str(home / "wide.toml"), "--name", "kills"]
    subprocess.run([*hpcrl, *words], env=environ, check=True, stdout=subprocess.DEVNULL)
    try:
        yield CampaignSystem(CampaignDir(home / "campaigns" / "kills"))
    finally:
        subprocess.run([*hpcrl, "stop", "kills"], env=environ, check=False, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120.0
        while not (home / "campaigns/kills/jobs/000/outcome.json").exists() and time.monotonic() < deadline:
            time.sleep(0.5)
        subprocess.run([*hpcrl, "stop", "--now", "kills"], env=environ, check=False, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def running_apps(directory: Path) -> Iterator[ParslSystem]:
    """Run the apps for a block."""
    directory.mkdir()
    code = f"from bench.peers.parsl_retries import main; main({str(directory)!r})"
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=_make_environ(), stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield ParslSystem(directory)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


def _make_environ() -> dict[str, str]:
    """Return the environment in which both import this package, and Parsl finds its programs."""
    first = {"PYTHONPATH": Path(__file__).parents[1], "PATH": Path(sys.executable).parent}
    return os.environ | {
        name: os.pathsep.join(filter(None, (str(path), os.environ.get(name)))) for name, path in first.items()
    }


def measure(full: bool, arguments: argparse.Namespace) -> list[Figure]:
    num_undisturbed, num_killed = (8, 20) if full else (4, 10)
    num_killed = arguments.kills or num_killed
    with (
        tempfile.TemporaryDirectory(prefix="hpcrl-", ignore_cleanup_errors=True) as home,
        running_campaign(Path(home) / "campaign", checkpoint_every=arguments.checkpoint_every) as campaign,
        running_apps(Path(home) / "apps") as apps,
        ThreadPoolExecutor() as pool,
    ):
        running = [
            pool.submit(follow_kills, system, num_undisturbed=num_undisturbed, num_killed=num_killed)
            for system in (campaign, apps)
        ]
        ours, theirs = (one.result() for one in running)
        violations = CampaignWatch(campaign.campaign, groups_per_step=GROUPS_PER_STEP).find_violations()
    for figures in (ours, theirs):
        print(json.dumps(vars(figures)), file=sys.stderr)
    for violation in violations:
        print(violation, file=sys.stderr)
    return [
        Figure(name="useful share with a kill in every step", value=ours.share, unit="", bar=_BAR),
        Figure(name="the same by medians of steps", value=_compare_medians(ours), unit=""),
        Figure(name=f"steps made of {num_killed} with a kill", value=len(ours.disturbed), unit="", bar=num_killed),
        Figure(name="kills", value=ours.num_kills, unit="", bar=num_killed),
        Figure(name="Parsl's retries alone: useful share of the steps that were made", value=theirs.share, unit=""),
        Figure(name=f"Parsl's retries alone: steps made of {num_killed}", value=len(theirs.disturbed), unit=""),
        Figure(name="Parsl's retries alone: kills", value=theirs.num_kills, unit=""),
        Figure(name="undisturbed step", value=fmean(ours.undisturbed), unit="s"),
        Figure(name="undisturbed step of Parsl's apps", value=fmean(theirs.undisturbed), unit="s"),
        Figure(name="invariants that did not hold", value=len(violations), unit="", bar=0, better="lower"),
    ]


def _compare_medians(figures: KillFigures) -> float:
    return median(figures.undisturbed) / median(figures.disturbed) if figures.disturbed else 0.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, help="steps with a kill (default: 10, with --full 20)")
    parser.add_argument("--checkpoint-every", type=int, default=1, help="steps from one checkpoint to the next")


if __name__ == "__main__":
    sys.exit(main("kills", measure, add_options=add_options))
