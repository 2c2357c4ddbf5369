"""Measure the report of a long campaign, made of real event logs and segments: `python -m bench.report [--full]`.

The campaign has 100,000 trajectories (--full: 1,000,000) in groups of 8, of 64 env workers, 16 engines and 2,000 steps.
An env worker plays a trajectory in 1.28 s and writes its counts after every five, each 6.4 s; real ones write theirs
each second in which they have changed, so the time of counts alone is a figure too. The report is made by its command
in another process; time and memory are that process's. The floor is what every reader has to do: each event line
parsed by json, each trajectory's facts by msgspec into a dict.
"""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.figures import Figure, main
from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import (
    EngineCounted,
    EpisodesCounted,
    JobEnded,
    JobStarted,
    SegmentScored,
    StepFinished,
    WorkerStarted,
)
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir
from hpcrl.report.history import CampaignHistory
from hpcrl.spool.record import COLUMNS, PackedTrajectory
from hpcrl.spool.segment import read_segment, write_packed
from hpcrl.system.files import make_private_dir, publish_json

NUM, NUM_FULL = 100_000, 1_000_000
NUM_ENV_WORKERS, NUM_ENGINES, NUM_STEPS = 64, 16, 2000
GROUP_SIZE, SEGMENT_SIZE, NUM_TOKENS = 8, 256, 24
COUNTS_PER_1000 = 200
NUM_COUNTS = 20_000
"""The lines of counts by which the time of one is measured."""
START = 1_800_000_000.0
MAX_SECONDS, MAX_GIB, MAX_RATIO = 60.0, 2.0, 6.0
FACTS = (
    '{{"id":"{group}/{index}","group":"{group}","domain":"{domain}","seed":7,"status":"{status}","producer":"000-env-0",'
    '"created":{created},"start_version":3,"end_version":4,"turns":[{{"start":0,"end":12,"generate_s":0.4,"step_s":0.01}},'
    '{{"start":12,"end":24,"generate_s":0.4,"step_s":0.01}}],"reset_s":0.1,"outcome":"finished","reward":{reward},'
    '"reward_parts":{{"reward":{reward}}}}}'
)


def write_campaign(campaign: CampaignDir, num: int) -> None:
    """Write a campaign that has ended."""
    for path in (campaign.events, campaign.job(0).root, *(campaign.spool(name) for name in SPOOLS)):
        make_private_dir(path)
    publish_json(campaign.manifest, {"name": "long", "site": "bench", "created": START})
    publish_json(campaign.recipe, {"name": "long", "train": {"num_steps": NUM_STEPS}, "domains": {"a": {}, "b": {}}})
    roles = [
        {"role": role, "component": 0, "num_workers": num_workers}
        for role, num_workers in (("env", NUM_ENV_WORKERS), ("decode", NUM_ENGINES), ("train", 1), ("reward", 8))
    ]
    component = {"index": 0, "partition": "p", "roles": [str(role["role"]) for role in roles], "nodes": 8}
    publish_json(campaign.plan, {"layout": "hetjob", "components": [component], "roles": roles})
    publish_json(campaign.job(0).submission, {"id": "1", "scheduler": "slurm", "time": START - 60})
    publish_json(campaign.job(0).outcome, {"outcome": "done", "reason": "every step was made", "time": START})
    write_events(campaign, num)
    write_segments(campaign, num)


def write_events(campaign: CampaignDir, num: int) -> None:
    """Write the event files, with the clock of the campaign."""
    duration_s = num / 50.0
    emit(campaign, "driver", [(0.0, JobStarted(node="n0")), (duration_s, JobEnded(outcome="done"))])
    num_counts = num * COUNTS_PER_1000 // 1000 // NUM_ENV_WORKERS
    for worker in range(NUM_ENV_WORKERS):
        counts = ((duration_s * n / num_counts, count_episodes(n * num // num_counts // NUM_ENV_WORKERS))
                  for n in range(1, num_counts))  # fmt: skip
        emit(campaign, f"env-{worker}", [(0.0, WorkerStarted(pid=1)), *counts])
    rewards = {"a": [0.5] * (SEGMENT_SIZE // 2), "b": [0.25] * (SEGMENT_SIZE // 2)}
    num_segments = num // SEGMENT_SIZE
    scored = [
        (duration_s * n / num_segments, SegmentScored(segment=f"{n}.h5", num=SEGMENT_SIZE, rewards=rewards))
        for n in range(num_segments)
    ]
    emit(campaign, "reward-0", scored)
    for engine in range(NUM_ENGINES):
        loads = [
            (10.0 * n, EngineCounted(window_s=10.0, busy_share=0.7, running=9.0, waiting=1.0, num_tokens=900))
            for n in range(int(duration_s / 10.0))
        ]
        emit(campaign, f"decode-{engine}", loads)
    steps = [
        (
            duration_s * n / NUM_STEPS,
            StepFinished(step=n, version=n, reward_mean=n / NUM_STEPS, kl=0.01, entropy=1.0, grad_norm=0.5, step_s=4.0),
        )
        for n in range(1, NUM_STEPS + 1)
    ]
    emit(campaign, "train-0", steps)


def count_episodes(num: int) -> EpisodesCounted:
    outcomes = {domain: {"finished": num // 2, "exit": num // 100} for domain in ("a", "b")}
    fates = {domain: {"trained": 10 * num} for domain in ("a", "b")}
    return EpisodesCounted(running=8, done=num, num_tokens=24 * num, outcomes=outcomes, token_fates=fates)


def emit(campaign: CampaignDir, worker: str, events: Any) -> None:
    """Write the file of one worker at once; an event log would sync nothing, and write each line alone."""
    name = f"000-{worker}"
    role = worker.rpartition("-")[0] or worker
    log = EventLog(campaign.events / f"{name}.jsonl", job=0, role=role, worker=name, node="n0")
    for offset_s, event in events:
        log.emit(msgspec.structs.replace(event, time=round(START + offset_s, 3)))
    log.close()


def write_segments(campaign: CampaignDir, num: int) -> None:
    """Write the scored segments."""
    columns = {name: np.ones(NUM_TOKENS, dtype) for name, dtype in COLUMNS.items()}
    for segment in range(num // SEGMENT_SIZE):
        batch = []
        for place in range(SEGMENT_SIZE):
            number, index = divmod(segment * SEGMENT_SIZE + place, GROUP_SIZE)
            domain = "ab"[number % 2]
            facts = FACTS.format(
                group=f"{domain}/{number}", index=index, domain=domain, created=START + segment,
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


def measure_counts(campaign: CampaignDir) -> float:
    """Return the CPU seconds that a million lines of counts take a report, each second of each env worker."""
    make_private_dir(campaign.events)
    for worker in range(NUM_ENV_WORKERS):
        counts = ((float(second), count_episodes(second)) for second in range(NUM_COUNTS // NUM_ENV_WORKERS))
        emit(campaign, f"env-{worker}", counts)
    history, num = CampaignHistory(), 0
    started = time.process_time()
    for event in EventReader(campaign.events).poll_merged():
        history.add(event)
        num += 1
    return (time.process_time() - started) * 1_000_000 / num


def measure(full: bool) -> list[Figure]:
    """Measure one campaign, and one without trajectories for what every report needs."""
    num = NUM_FULL if full else NUM
    directory = Path(tempfile.mkdtemp(prefix="hpcrl-bench-report-"))
    try:
        empty, campaign, page = (
            CampaignDir(directory / "empty"),
            CampaignDir(directory / "long"),
            directory / "page.html",
        )
        make_private_dir(empty.root)
        publish_json(empty.manifest, {"name": "empty", "site": "bench", "created": START})
        empty_s = run_report(empty, page)
        counts_s = measure_counts(CampaignDir(directory / "counts"))
        write_campaign(campaign, num)
        floor_s = read_all(campaign)
        started = time.perf_counter()
        cpu_s = run_report(campaign, page)
        report_s = time.perf_counter() - started
        peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        return [
            Figure(
                name="CPU time beyond an empty report over parsing alone",
                value=(cpu_s - empty_s) / floor_s,
                bar=MAX_RATIO,
                better="lower",
            ),
            Figure(
                name="CPU time of 1 million trajectories over a minute",
                value=cpu_s * NUM_FULL / num / MAX_SECONDS,
                bar=1.0,
                better="lower",
            ),
            Figure(name="peak memory over 2 GiB", value=peak_gib / MAX_GIB, bar=1.0, better="lower"),
            Figure(name="page over 5 MB", value=page.stat().st_size / 5e6, bar=1.0, better="lower"),
            Figure(name="CPU time of the report", value=cpu_s, unit="s"),
            Figure(name="CPU time of an empty report", value=empty_s, unit="s"),
            Figure(name="CPU time of a million lines of counts", value=counts_s, unit="s"),
            Figure(name="time of the report, on a machine that may be busy", value=report_s, unit="s"),
            Figure(name="trajectories", value=num, unit=""),
        ]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main("report", measure))
