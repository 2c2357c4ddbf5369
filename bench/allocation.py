"""Useful share of the allocation over jobs in a row that end at their walltime: `python -m bench.allocation`.

A campaign with simulated engines on a strict lab (as root). Each job ends at its real walltime, after a drain with a
checkpoint, and the next one continues, until the campaign has made its last step: `hpcrl extend` keeps it some steps
away until the last of the jobs runs. The useful time of a job is from the start of its first step to the end of its
last one; steps that were made again count once, in the job that made them last. What Slurm accounts beside it is
starting and ending. Jobs of minutes are the worst case: the time to start and end one is the same for jobs of a day,
for which the share follows.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from bench.faults.places import LabPlace
from bench.faults.watch import CampaignWatch
from bench.figures import Figure, main
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import JobStarted, StepFinished
from hpcrl.campaign_dir.job_end import read_job_end
from hpcrl.campaign_dir.paths import CampaignDir

_GROUPS_PER_STEP = 2
_BAR = 0.9
_START_TIMEOUT_S = 120.0
_STEPS_PER_MIN = 300
"""More than the first job makes in a minute."""
_SETTINGS = (
    *(f"train.groups_per_step={_GROUPS_PER_STEP}", "rollout.group_size=4", "engine.backend=sim"),
    *("engine.sim.speed=0.002", "rollout.max_running=16", "train.checkpoint_every_steps=1000000", "spool.keep=all"),
)


@dataclass(frozen=True)
class JobUse:
    """The use of one job's allocation."""

    allocated_s: float
    startup_s: float
    """Until the first step that was kept starts."""
    ending_s: float
    """After the last one."""
    num_steps: int
    outcome: str

    @property
    def useful_s(self) -> float:
        return self.allocated_s - self.startup_s - self.ending_s


def measure(full: bool, arguments: argparse.Namespace) -> list[Figure]:
    num_jobs = arguments.jobs or (20 if full else 8)
    walltime_min = arguments.walltime or (5 if full else 2)
    with tempfile.TemporaryDirectory(prefix="hpcrl-", ignore_cleanup_errors=True) as directory:
        place = LabPlace(Path(directory))
        with place.running():
            uses, violations, is_done = run_chain(place, num_jobs=num_jobs, walltime_min=walltime_min)
    for use in uses:
        print(json.dumps(vars(use) | {"useful_s": use.useful_s}), file=sys.stderr)
    for violation in violations:
        print(violation, file=sys.stderr)
    ended = uses[:-1]  # the last job ends with the campaign, whenever that is
    overhead = fmean(use.startup_s + use.ending_s for use in ended)
    share = sum(use.useful_s for use in ended) / sum(use.allocated_s for use in ended)
    return [
        Figure(name="jobs of the campaign", value=len(uses), unit="", bar=num_jobs),
        Figure(name="jobs that ended at their walltime with a checkpoint", value=_count_drained(ended), bar=len(ended)),
        Figure(name="campaigns that made their last step", value=float(is_done), unit="", bar=1),
        Figure(name="invariants that did not hold", value=len(violations), unit="", bar=0, better="lower"),
        Figure(name="start of a job until its first step, mean", value=fmean(use.startup_s for use in ended), unit="s"),
        Figure(name="end of a job after its last step, mean", value=fmean(use.ending_s for use in ended), unit="s"),
        Figure(name=f"useful share of {walltime_min} min", value=share, unit="", bar=_BAR if full else None),
        Figure(name=f"computed: job whose useful share is {_BAR:g}", value=overhead / (1.0 - _BAR) / 60, unit="min"),
        Figure(name="computed: useful share of 60 min", value=1.0 - overhead / 3600, unit="", bar=_BAR),
    ]


def _count_drained(uses: list[JobUse]) -> int:
    return sum(use.outcome == "drained (walltime)" for use in uses)


def run_chain(place: LabPlace, *, num_jobs: int, walltime_min: int) -> tuple[list[JobUse], list[str], bool]:
    """Run a campaign over this many jobs; return their use, what was wrong, and whether it made its last step."""
    last_step = _STEPS_PER_MIN * walltime_min
    options = [*_SETTINGS, f"train.num_steps={last_step}", f"job.walltime_min={walltime_min}", "job.drain_s=15"]
    options.append(f"job.num_jobs={num_jobs + 4}")
    words = [word for setting in options for word in ("-s", setting)]
    done = place.command("submit", "quickstart", *place.site_words, "--name", "chain", *words)
    assert done.returncode == 0, done.stderr
    campaign = CampaignDir(place.home / "campaigns" / "chain")
    watch = CampaignWatch(campaign, groups_per_step=_GROUPS_PER_STEP)
    violations: list[str] = []
    first_steps: dict[int, int] = {}
    deadline = time.monotonic() + (num_jobs + 4) * (walltime_min * 60 + _START_TIMEOUT_S)
    while not place.is_over() and time.monotonic() < deadline:
        violations += [one for one in watch.find_violations() if one not in violations]
        first_steps.setdefault(watch.last_job, watch.last_step)
        num_most = max((after - before for before, after in pairwise(first_steps.values())), default=0)
        # A job continues to the step that was the last one when it started.
        if watch.last_job < num_jobs - 1 and last_step < watch.last_step + 1.5 * num_most:
            last_step = watch.last_step + 2 * num_most
            extended = place.command("extend", "chain", "--steps", str(last_step))
            assert extended.returncode == 0, extended.stderr
        time.sleep(2.0)
    place.command("stop", "--now", "chain")
    violations += [one for one in watch.find_violations() if one not in violations]
    steps = [event for event in EventReader(campaign.events).poll() if isinstance(event, StepFinished)]
    made = {event.step for event in steps}
    if left := place.list_shared_memory(campaign):
        violations.append(f"shared memory was left: {', '.join(left)}")
    return _list_uses(campaign, steps, place.list_allocations()), violations, made == set(range(1, last_step + 1))


def _list_uses(
    campaign: CampaignDir, steps: list[StepFinished], allocations: dict[str, tuple[float, float]]
) -> list[JobUse]:
    kept = {event.step: event for event in steps}  # a step that was made again counts once
    ids = {
        event.job: str(event.slurm_id) for event in EventReader(campaign.events).poll() if isinstance(event, JobStarted)
    }
    uses = []
    for number, id in sorted(ids.items()):
        times = sorted(event.time for event in kept.values() if event.job == number)
        end = read_job_end(campaign.job(number))
        started, ended = allocations.get(id, (times[0], times[-1]) if times else (0.0, 0.0))
        first = times[0] - (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else ended
        uses.append(
            JobUse(
                allocated_s=ended - started,
                startup_s=first - started,
                ending_s=ended - times[-1] if len(times) > 1 else 0.0,
                num_steps=len(times),
                outcome=f"{end.outcome} ({end.cause})" if end is not None else "none",
            )
        )
    return uses


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, help="how many jobs (default: 8, with --full 20)")
    parser.add_argument("--walltime", type=int, help="minutes of each (default: 2, with --full 5)")


if __name__ == "__main__":
    sys.exit(main("allocation", measure, add_options=add_options))
