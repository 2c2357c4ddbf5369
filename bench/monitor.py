"""Measure the CPU share of watching a campaign with 1,000 workers: `python -m bench.monitor`.

idle     nothing is new: the screen is kept up to date all the same
busy     600 env workers write their counts and 399 engines their load every 20 s, as real ones of this number do
start    the first look at an hour of what a tenth of these workers write, from files that are in memory

Event files are real, and the monitor looks and draws as on a terminal, at its own pace: it looks four times a second
for news, and draws the figures as often as its share of a core allows. The share is the CPU time of this process over
the time that has passed, without that of the workers' lines, over 2 %. The first look at all workers is ten times that
of a tenth, as each line is read by itself. `--workers 64 4096` compares campaigns of other sizes, with the same shares
of each role: what a look and a drawing take, in all and for each worker.
"""

import argparse
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from bench.figures import Figure, main
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import (
    CampaignEvent,
    EngineCounted,
    EpisodesCounted,
    JobStarted,
    StepFinished,
    WorkerStarted,
    build_line,
)
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir, make_worker_name
from hpcrl.monitor.collect import SnapshotCollector
from hpcrl.monitor.keys import KeyReader
from hpcrl.monitor.pages import CampaignPages
from hpcrl.monitor.snapshot import CampaignSnapshot
from hpcrl.monitor.view import FRAME_INTERVAL_S, pace_looks, show_frames
from hpcrl.roles.serve import MAX_LOADS_PER_S
from hpcrl.rollout.reporting import find_report_interval
from hpcrl.system.files import make_private_dir, publish_json

NUM_WORKERS = {"env": 600, "decode": 350, "prefill": 49, "train": 1}
MAX_REFRESH_S = 1.0
MAX_COST_RATIO = 1.5
SECONDS, SECONDS_FULL = 30.0, 300.0
NUM_STEPS = 1000
MAX_SHARE = 0.02
HOUR_S = 3600
NUM_REFRESHES = 20
LONG_SHARE = 10
"""One worker of this number has an hour of lines for the first look."""


class LargeCampaign:
    """A campaign that runs, and whose workers write when this process lets them."""

    def __init__(self, root: Path, num_workers: Mapping[str, int] = NUM_WORKERS) -> None:
        self.directory = CampaignDir(root)
        self.num_workers = num_workers
        self.count_interval_s, self.engine_interval_s = find_intervals(
            num_env=num_workers["env"], num_engines=num_workers["decode"]
        )
        self._logs: dict[str, EventLog] = {}
        self._num_done = 0

    def start(self) -> None:
        campaign = self.directory
        for path in (campaign.events, campaign.job(0).root, *(campaign.spool(name) for name in SPOOLS)):
            make_private_dir(path)
        publish_json(campaign.manifest, {"name": "large", "site": "bench", "created": time.time()})
        publish_json(campaign.recipe, {"name": "large", "train": {"num_steps": NUM_STEPS}})
        roles = [{"role": role, "component": 0, "num_workers": num} for role, num in self.num_workers.items()]
        component = {"index": 0, "partition": "p", "roles": list(self.num_workers), "nodes": 100}
        publish_json(campaign.plan, {"layout": "hetjob", "components": [component], "roles": roles})
        publish_json(campaign.job(0).submission, {"id": "1", "scheduler": "slurm", "time": time.time()})
        EventLog.open(campaign, "driver", job=0, role="driver", node="n0").emit(JobStarted(node="n0"))
        for role, num in self.num_workers.items():
            for index in range(num):
                self._logs[f"{role}-{index}"] = EventLog.open(
                    campaign, role, index, job=0, role=role, node=f"n{index % 100}"
                )
        for log in self._logs.values():
            log.emit(WorkerStarted(pid=1))
        for step in range(1, NUM_STEPS // 2):
            self._logs["train-0"].emit(make_step(step))
        for second in range(self.engine_interval_s):
            self.work(second)

    def work(self, second: int) -> None:
        """Write what the workers report in one second."""
        self._num_done += 1
        episodes = make_counts(self._num_done)
        load = make_load(3, window_s=self.engine_interval_s)
        for number, (name, log) in enumerate(self._logs.items()):
            if name.startswith("env") and number % self.count_interval_s == second % self.count_interval_s:
                log.emit(episodes)
            elif (
                name.startswith(("decode", "prefill"))
                and number % self.engine_interval_s == second % self.engine_interval_s
            ):
                log.emit(load)

    def write_hour(self) -> int:
        """Write what a tenth of the workers report in the hour before now; return the number of lines."""
        started = time.time() - HOUR_S
        num_lines = 0
        for role, make_event, interval_s in (
            ("env", make_counts, self.count_interval_s),
            ("decode", partial(make_load, window_s=self.engine_interval_s), self.engine_interval_s),
        ):
            events = [(second, make_event(second)) for second in range(interval_s, HOUR_S, interval_s)]
            for index in range(self.num_workers[role] // LONG_SHARE):
                worker = make_worker_name(0, role, index)
                origin = {"job": 0, "role": role, "worker": worker, "node": f"n{index % 100}"}
                lines = [
                    json.dumps(build_line(event, time=round(started + second, 3), origin=origin)) + "\n"
                    for second, event in [(0, WorkerStarted(pid=1)), *events]
                ]
                (self.directory.events / f"{worker}.jsonl").write_text("".join(lines))
                num_lines += len(lines)
        return num_lines


def find_intervals(*, num_env: int, num_engines: int) -> tuple[int, int]:
    """Return the seconds between two reports of an env worker, and of an engine, in a campaign of this size."""
    return max(1, round(find_report_interval(num_env))), max(1, round(num_engines / MAX_LOADS_PER_S))


def make_console() -> Console:
    """Make a terminal in memory."""
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=40, emoji=False)


def make_counts(second: int) -> CampaignEvent:
    """Make the counts of an env worker, with the domains, outcomes and lengths that real ones have."""
    outcomes = {"finished": second, "max-turns": second // 9, "overflow": second // 99, "env-fault": second // 999}
    lengths = {"tokens": 300 * second}
    for length in (112, 128, 160, 192, 224, 256):
        lengths |= {f"{length}+": second // 6, f"{length}+tokens": second * length // 6}
    return EpisodesCounted(
        running=8,
        done=second,
        truncated=second // 9,
        num_tokens=300 * second,
        turns=5 * second,
        outcomes={"lake": outcomes, "taxi": outcomes},
        token_fates={"lake": {"trained": 200 * second}, "taxi": {"trained": 100 * second}},
        lengths={"done": lengths},
        loop_share=0.2,
    )


def make_load(second: int, *, window_s: float = 1.0) -> CampaignEvent:
    return EngineCounted(
        window_s=window_s,
        busy_share=0.7,
        running=9.0,
        waiting=1.0,
        num_tokens=900,
        version=second,
        kv_share=0.5,
    )


def make_step(number: int) -> StepFinished:
    reward = min(number / NUM_STEPS, 1.0)
    return StepFinished(step=number, version=number, reward_mean=reward, loss=0.1, step_s=4.0, wait_s=1.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", help="compare campaigns of these numbers of workers")


def measure(full: bool, arguments: argparse.Namespace) -> list[Figure]:
    directory = Path(tempfile.mkdtemp(prefix="hpcrl-bench-monitor-"))
    try:
        if arguments.workers:
            return compare_sizes(directory, arguments.workers)
        campaign = LargeCampaign(directory / "large")
        campaign.start()
        figures = list(measure_campaign(campaign, seconds=SECONDS_FULL if full else SECONDS))
        return [*figures, *measure_first_look(directory / "long")]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure_campaign(campaign: LargeCampaign, *, seconds: float) -> Iterator[Figure]:
    collector = SnapshotCollector(campaign.directory, query=lambda _: {})
    collector.poll()
    num_workers = sum(NUM_WORKERS.values())
    for name, works in (("idle", False), ("busy", True)):
        watch = TimedWatch(campaign, collector, seconds=seconds, works=works)
        share = watch.run()
        yield Figure(
            name=f"share of a core over 2 %, {num_workers:,} workers, {name}",
            value=share / MAX_SHARE,
            bar=1.0,
            better="lower",
        )
        yield Figure(name=f"CPU time of a look, {name}", value=1000 * watch.look_s / watch.num_looks, unit="ms")
        yield Figure(name=f"time between two looks over 0.25 s, {name}", value=4 * seconds / watch.num_looks, unit="x")
        yield Figure(name=f"time between two drawings without news, {name}", value=seconds / watch.num_built, unit="s")


def compare_sizes(directory: Path, sizes: Sequence[int]) -> list[Figure]:
    """Measure a look and a drawing of busy campaigns of several sizes."""
    seconds: dict[int, float] = {}
    figures = []
    for size in sizes:
        campaign = LargeCampaign(directory / str(size), scale_workers(size))
        campaign.start()
        collector = SnapshotCollector(campaign.directory, query=lambda _: {})
        collector.poll()
        refreshes = [measure_refresh(campaign, collector, second) for second in range(NUM_REFRESHES)]
        seconds[size] = statistics.median(refreshes)
        figures.append(
            Figure(
                name=f"{size:,} workers: look, figures and screen",
                value=seconds[size],
                unit="s",
                bar=MAX_REFRESH_S,
                better="lower",
            )
        )
    few, many = min(sizes), max(sizes)
    ratio = (seconds[many] / many) / (seconds[few] / few)
    name = f"the same per worker: {many:,} workers / {few:,} workers"
    return [*figures, Figure(name=name, value=ratio, bar=MAX_COST_RATIO, better="lower")]


def scale_workers(size: int) -> dict[str, int]:
    """Return the numbers of workers of a campaign with `size` of them: one trains, the others have the usual shares."""
    total = sum(NUM_WORKERS.values())
    numbers = {role: max(1, round(size * num / total)) for role, num in NUM_WORKERS.items()} | {"train": 1}
    return numbers | {"env": size - sum(num for role, num in numbers.items() if role != "env")}


def measure_refresh(campaign: LargeCampaign, collector: SnapshotCollector, second: int) -> float:
    """Measure a look at what the workers wrote in a second, the figures, and the screen."""
    campaign.work(second)
    console, pages = make_console(), CampaignPages(collector)
    started = time.process_time()
    collector.look()
    console.print(pages.render(collector.build(), keys=KeyReader(), height=console.height - 1))
    return time.process_time() - started


def measure_first_look(root: Path) -> list[Figure]:
    """Measure the first look at a campaign whose workers have written for an hour."""
    campaign = LargeCampaign(root)
    campaign.start()
    num_lines = campaign.write_hour()
    started, cpu = time.monotonic(), time.process_time()
    SnapshotCollector(campaign.directory, query=lambda _: {}).poll()
    look_s, wall_s = time.process_time() - cpu, time.monotonic() - started
    workers = f"{NUM_WORKERS['env'] // LONG_SHARE} env workers and {NUM_WORKERS['decode'] // LONG_SHARE} engines"
    return [
        Figure(name=f"CPU time of the first look at {num_lines:,} lines, an hour of {workers}", value=look_s, unit="s"),
        Figure(name="time that has passed meanwhile", value=wall_s, unit="s"),
        Figure(name=f"CPU time for all workers, {LONG_SHARE} times that", value=LONG_SHARE * look_s, unit="s"),
    ]


@dataclass
class TimedWatch:
    """A monitor that is watched for a while, and the time that it takes."""

    campaign: LargeCampaign
    collector: SnapshotCollector
    seconds: float
    works: bool
    num_looks: int = 0
    num_built: int = 0
    look_s: float = 0.0
    _spent_s: float = 0.0
    _num_worked: int = 0
    _started: float = 0.0

    def run(self) -> float:
        """Watch; return the share of a core."""
        console = make_console()
        self._started, cpu = time.monotonic(), time.process_time()
        looks = pace_looks(self, interval_s=FRAME_INTERVAL_S, wait=self._wait)
        show_frames(looks, console, KeyReader(), CampaignPages(self.collector))
        return (time.process_time() - cpu - self._spent_s) / (time.monotonic() - self._started)

    def look(self) -> bool:
        started = time.process_time()
        has_news = self.collector.look()
        self.look_s += time.process_time() - started
        self.num_looks += 1
        return has_news

    def build(self) -> CampaignSnapshot:
        self.num_built += 1
        return self.collector.build()

    def _wait(self, seconds: float) -> None:
        """Wait as for keys, while workers write; the time that they take is not the monitor's."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            if self.works and now - self._started > self._num_worked:
                before = time.process_time()
                self.campaign.work(self._num_worked)
                self._num_worked += 1
                self._spent_s += time.process_time() - before
            time.sleep(max(0.0, min(0.1, until - time.monotonic())))
        if now - self._started > self.seconds:
            raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main("monitor", measure, add_options=add_options))
