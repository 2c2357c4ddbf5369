"""Measure the CPU share of watching a campaign with 1,000 workers: `python -m bench.monitor`.

idle     nothing is new: the screen is kept up to date all the same
busy     600 env workers write their counts and 399 engines their load every 20 s, as real ones of this number do
start    the first look at an hour of what a tenth of these workers write, from files that are in memory

Event files are real, and the monitor looks and draws as on a terminal, at its own pace: it looks four times a second
for news, and draws the figures as often as its share of a core allows. The share is the CPU time of this process over
the time that has passed, without that of the workers' lines, over 2 %. The first look at all workers is ten times that
of a tenth, as each line is read by itself.
"""

import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
SECONDS, SECONDS_FULL = 30.0, 300.0
NUM_STEPS = 1000
MAX_SHARE = 0.02
ENGINE_INTERVAL_S = round(NUM_WORKERS["decode"] / MAX_LOADS_PER_S)
COUNT_INTERVAL_S = round(find_report_interval(NUM_WORKERS["env"]))
HOUR_S = 3600
LONG_SHARE = 10
"""One worker of this number has an hour of lines for the first look."""


class LargeCampaign:
    """A campaign that runs, and whose workers write when this process lets them."""

    def __init__(self, root: Path) -> None:
        self.directory = CampaignDir(root)
        self._logs: dict[str, EventLog] = {}
        self._num_done = 0

    def start(self) -> None:
        campaign = self.directory
        for path in (campaign.events, campaign.job(0).root, *(campaign.spool(name) for name in SPOOLS)):
            make_private_dir(path)
        publish_json(campaign.manifest, {"name": "large", "site": "bench", "created": time.time()})
        publish_json(campaign.recipe, {"name": "large", "train": {"num_steps": NUM_STEPS}})
        roles = [{"role": role, "component": 0, "num_workers": num} for role, num in NUM_WORKERS.items()]
        component = {"index": 0, "partition": "p", "roles": list(NUM_WORKERS), "nodes": 100}
        publish_json(campaign.plan, {"layout": "hetjob", "components": [component], "roles": roles})
        publish_json(campaign.job(0).submission, {"id": "1", "scheduler": "slurm", "time": time.time()})
        EventLog.open(campaign, "driver", job=0, role="driver", node="n0").emit(JobStarted(node="n0"))
        for role, num in NUM_WORKERS.items():
            for index in range(num):
                self._logs[f"{role}-{index}"] = EventLog.open(
                    campaign, role, index, job=0, role=role, node=f"n{index % 100}"
                )
        for log in self._logs.values():
            log.emit(WorkerStarted(pid=1))
        for step in range(1, NUM_STEPS // 2):
            self._logs["train-0"].emit(make_step(step))
        for second in range(ENGINE_INTERVAL_S):
            self.work(second)

    def work(self, second: int) -> None:
        """Write what the workers report in one second."""
        self._num_done += 1
        episodes = make_counts(self._num_done)
        load = EngineCounted(
            window_s=float(ENGINE_INTERVAL_S), busy_share=0.7, running=9.0, waiting=1.0, num_tokens=900, version=3
        )
        for number, (name, log) in enumerate(self._logs.items()):
            if name.startswith("env") and number % COUNT_INTERVAL_S == second % COUNT_INTERVAL_S:
                log.emit(episodes)
            elif name.startswith(("decode", "prefill")) and number % ENGINE_INTERVAL_S == second % ENGINE_INTERVAL_S:
                log.emit(load)

    def write_hour(self) -> int:
        """Write what a tenth of the workers report in the hour before now; return the number of lines."""
        started = time.time() - HOUR_S
        num_lines = 0
        for role, make_event, interval_s in (
            ("env", make_counts, COUNT_INTERVAL_S),
            ("decode", make_load, ENGINE_INTERVAL_S),
        ):
            events = [(second, make_event(second)) for second in range(interval_s, HOUR_S, interval_s)]
            for index in range(NUM_WORKERS[role] // LONG_SHARE):
                worker = make_worker_name(0, role, index)
                origin = {"job": 0, "role": role, "worker": worker, "node": f"n{index % 100}"}
                lines = [
                    json.dumps(build_line(event, time=round(started + second, 3), origin=origin)) + "\n"
                    for second, event in [(0, WorkerStarted(pid=1)), *events]
                ]
                (self.directory.events / f"{worker}.jsonl").write_text("".join(lines))
                num_lines += len(lines)
        return num_lines


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


def make_load(second: int) -> CampaignEvent:
    return EngineCounted(
        window_s=float(ENGINE_INTERVAL_S),
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


def measure(full: bool) -> list[Figure]:
    directory = Path(tempfile.mkdtemp(prefix="hpcrl-bench-monitor-"))
    try:
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
        console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40, emoji=False)
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
    sys.exit(main("monitor", measure))
