"""Measure the report of a long campaign, made of real event logs and segments: `python -m bench.report [--full]`.

    small    64 env workers, which write their counts each 2.1 s, and 16 engines
    large    1,000 env workers, which write them each 20 s, and 64 engines

Either has 100,000 trajectories (--full: 1,000,000) of 8 turns in groups of 8, 50 a second, and 2,000 steps in a chain
of 3 jobs. The interval of counts is that of `hpcrl.rollout.reporting`, and the files have the times of their last
events, as those of a real campaign. The report is made by its command in another process; time and memory are that
process's. The floor is what a reader without any choice has to do: each event line parsed by json, each trajectory's
facts by msgspec into a dict; a report parses fewer lines of counts, the fewer the longer it took.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from bench.figures import Figure, main
from hpcrl.campaign_dir.event_log import EVENT_SUFFIX, EventLog
from hpcrl.campaign_dir.events import (
    CampaignEvent,
    EngineCounted,
    EpisodesCounted,
    JobEnded,
    JobStarted,
    SegmentScored,
    StepFinished,
    WorkerStarted,
)
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir, make_worker_name
from hpcrl.rollout.reporting import find_report_interval
from hpcrl.spool.record import COLUMNS, PackedTrajectory
from hpcrl.spool.segment import read_segment, write_packed
from hpcrl.system.files import make_private_dir, publish_json

NUM, NUM_FULL = 100_000, 1_000_000
NUM_STEPS, NUM_JOBS, NUM_TURNS = 2000, 3, 8
GROUP_SIZE, SEGMENT_SIZE, NUM_TOKENS = 8, 256, 24
TRAJECTORIES_PER_S, ENGINE_INTERVAL_S = 50.0, 10.0
START = 1_750_000_000.0
"""A time in the past: a report chooses lines by the age of a campaign."""
MAX_SECONDS, MAX_GIB, MAX_RATIO = 60.0, 2.0, 6.0
TURNS = ",".join(
    f'{{"start":{3 * turn},"end":{3 * turn + 3},"generate_s":0.4,"step_s":0.01}}' for turn in range(NUM_TURNS)
)
FACTS = (
    '{{"id":"{group}/{index}","group":"{group}","domain":"{domain}","seed":7,"status":"{status}","producer":"000-env-0",'
    '"created":{created},"start_version":3,"end_version":4,"turns":[{turns}],"reset_s":0.1,"outcome":"finished",'
    '"reward":{reward},"reward_parts":{{"reward":{reward}}}}}'
)


TimedEvent = tuple[float, CampaignEvent]


@dataclass(frozen=True, kw_only=True)
class ReportSetting:
    """The size of a campaign."""

    name: str
    num_env_workers: int
    num_engines: int


SETTINGS = (
    ReportSetting(name="small", num_env_workers=64, num_engines=16),
    ReportSetting(name="large", num_env_workers=1000, num_engines=64),
)


def write_campaign(campaign: CampaignDir, num: int, setting: ReportSetting) -> None:
    """Write a campaign that has ended."""
    for path in (campaign.events, *(campaign.spool(name) for name in SPOOLS)):
        make_private_dir(path)
    publish_json(campaign.manifest, {"name": "long", "site": "bench", "created": START})
    publish_json(campaign.recipe, {"name": "long", "train": {"num_steps": NUM_STEPS}, "domains": {"a": {}, "b": {}}})
    sizes = (("env", setting.num_env_workers), ("decode", setting.num_engines), ("train", 1), ("reward", 8))
    roles = [{"role": role, "component": 0, "num_workers": num_workers} for role, num_workers in sizes]
    component = {"index": 0, "partition": "p", "roles": [str(role["role"]) for role in roles], "nodes": 8}
    publish_json(campaign.plan, {"layout": "hetjob", "components": [component], "roles": roles})
    job_s = num / TRAJECTORIES_PER_S / NUM_JOBS
    for job in range(NUM_JOBS):
        start, is_last = START + job * job_s, job == NUM_JOBS - 1
        make_private_dir(campaign.job(job).root)
        publish_json(campaign.job(job).submission, {"id": str(job), "scheduler": "slurm", "time": start - 60})
        outcome = "done" if is_last else "drained"
        publish_json(
            campaign.job(job).outcome, {"outcome": outcome, "reason": "its time is over", "time": start + job_s}
        )
        write_events(campaign, num // NUM_JOBS, setting, job=job, start=start)
    write_segments(campaign, num)


def write_events(campaign: CampaignDir, num: int, setting: ReportSetting, *, job: int, start: float) -> None:
    """Write the event files of one job, which makes `num` trajectories."""
    duration_s = num / TRAJECTORIES_PER_S
    write = partial(emit, campaign, job=job, start=start)
    outcome = "done" if job == NUM_JOBS - 1 else "drained"
    write("driver", [(0.0, JobStarted(node="n0")), (duration_s, JobEnded(outcome=outcome))])
    interval_s = find_report_interval(setting.num_env_workers)
    num_counts = int(duration_s / interval_s)
    for worker in range(setting.num_env_workers):
        offset_s = interval_s * worker / setting.num_env_workers
        counts = ((interval_s * n + offset_s, count_episodes(num * n // num_counts // setting.num_env_workers))
                  for n in range(1, num_counts))  # fmt: skip
        write(f"env-{worker}", [(0.0, WorkerStarted(pid=1)), *counts])
    rewards = {"a": [0.5] * (SEGMENT_SIZE // 2), "b": [0.25] * (SEGMENT_SIZE // 2)}
    num_segments = num // SEGMENT_SIZE
    scored = [
        (duration_s * n / num_segments, SegmentScored(segment=f"{n}.h5", num=SEGMENT_SIZE, rewards=rewards))
        for n in range(num_segments)
    ]
    write("reward-0", scored)
    for engine in range(setting.num_engines):
        load = EngineCounted(
            window_s=ENGINE_INTERVAL_S, busy_share=0.7, running=9.0, waiting=1.0, kv_share=0.5, num_tokens=900
        )
        write(f"decode-{engine}", [(ENGINE_INTERVAL_S * n, load) for n in range(int(duration_s / ENGINE_INTERVAL_S))])
    num_steps = NUM_STEPS // NUM_JOBS
    steps = [
        (
            duration_s * n / num_steps,
            StepFinished(
                step=job * num_steps + n,
                version=job * num_steps + n,
                reward_mean=n / num_steps,
                kl=0.01,
                entropy=1.0,
                grad_norm=0.5,
                step_s=4.0,
            ),
        )
        for n in range(1, num_steps + 1)
    ]
    write("train-0", steps)


def count_episodes(num: int) -> EpisodesCounted:
    """Return counts like those of an env worker, which have a dozen lengths."""
    outcomes = {domain: {"finished": num // 2, "exit": num // 100} for domain in ("a", "b")}
    fates = {domain: {"trained": 10 * num} for domain in ("a", "b")}
    lengths = {f"{16 + length}+": num // 12 for length in range(12)} | {"tokens": 24 * num}
    return EpisodesCounted(
        running=8, done=num, num_tokens=24 * num, outcomes=outcomes, token_fates=fates, lengths={"done": lengths}
    )


def emit(campaign: CampaignDir, worker: str, events: Sequence[TimedEvent], *, job: int, start: float) -> None:
    """Write the file of one worker; it was last touched with its last event."""
    name = make_worker_name(job, worker)
    role = worker.rpartition("-")[0] or worker
    path = campaign.events / f"{name}{EVENT_SUFFIX}"
    log, time = EventLog(path, job=job, role=role, worker=name, node="n0"), start
    for offset_s, event in events:
        time = round(start + offset_s, 3)
        log.emit(msgspec.structs.replace(event, time=time))
    log.close()
    os.utime(path, (time, time))


def write_segments(campaign: CampaignDir, num: int) -> None:
    """Write the scored segments."""
    columns = {name: np.ones(NUM_TOKENS, dtype) for name, dtype in COLUMNS.items()}
    for segment in range(num // SEGMENT_SIZE):
        batch = []
        for place in range(SEGMENT_SIZE):
            number, index = divmod(segment * SEGMENT_SIZE + place, GROUP_SIZE)
            domain = "ab"[number % 2]
            facts = FACTS.format(
                group=f"{domain}/{number}", index=index, domain=domain, created=START + segment, turns=TURNS,
                status="env-fault" if place == 0 else "done", reward=round(index / GROUP_SIZE * (number % 5), 4),
            )  # fmt: skip
            batch.append(PackedTrajectory(id=f"{domain}/{number}/{index}", facts=facts.encode(), columns=columns))
        write_packed(campaign.spool("scored") / f"000-env-0-{segment:08d}-{SEGMENT_SIZE}-0123abcd.h5", batch)


def read_all(campaign: CampaignDir) -> float:
    """Return the CPU seconds in which everything is parsed, and nothing else is done."""
    started = time.process_time()
    for path in campaign.events.iterdir():
        with path.open("rb") as file:
            for line in file:
                json.loads(line)
    for path in sorted(campaign.spool("scored").glob("*.h5")):
        segment = read_segment(path, verify=False)
        for index in range(len(segment)):
            msgspec.json.decode(segment.facts.raw(index))
    return time.process_time() - started


def run_report(campaign: CampaignDir, page: Path) -> float:
    """Make a report in another process; return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "hpcrl.report", "-o", str(page), "--", str(campaign.root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(full: bool) -> list[Figure]:
    """Measure both settings, and an empty campaign for what every report needs."""
    num = NUM_FULL if full else NUM
    directory = Path(tempfile.mkdtemp(prefix="hpcrl-bench-report-"))
    try:
        empty, page = CampaignDir(directory / "empty"), directory / "page.html"
        make_private_dir(empty.root)
        publish_json(empty.manifest, {"name": "empty", "site": "bench", "created": START})
        empty_s = run_report(empty, page)
        figures = [Figure(name="CPU time of an empty report", value=empty_s, unit="s")]
        for setting in SETTINGS:
            campaign = CampaignDir(directory / setting.name)
            write_campaign(campaign, num, setting)
            figures += measure_setting(campaign, page, empty_s=empty_s, name=setting.name)
            shutil.rmtree(campaign.root)
        peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        figures.append(Figure(name="peak memory over 2 GiB", value=peak_gib / MAX_GIB, bar=1.0, better="lower"))
        return [*figures, Figure(name="trajectories", value=num, unit="")]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure_setting(campaign: CampaignDir, page: Path, *, empty_s: float, name: str) -> list[Figure]:
    """Measure the report of one campaign."""
    floor_s = read_all(campaign)
    started = time.perf_counter()
    cpu_s = run_report(campaign, page)
    report_s = time.perf_counter() - started
    ratio = (cpu_s - empty_s) / floor_s
    return [
        Figure(name=f"{name}: CPU time over parsing alone", value=ratio, bar=MAX_RATIO, better="lower"),
        Figure(name=f"{name}: CPU time over a minute", value=cpu_s / MAX_SECONDS, bar=1.0, better="lower"),
        Figure(name=f"{name}: page over 5 MB", value=page.stat().st_size / 5e6, bar=1.0, better="lower"),
        Figure(name=f"{name}: CPU time", value=cpu_s, unit="s"),
        Figure(name=f"{name}: time, on a machine that may be busy", value=report_s, unit="s"),
    ]


if __name__ == "__main__":
    sys.exit(main("report", measure))
