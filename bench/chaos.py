"""Random faults in whole campaigns, here and on a strict lab: `python -m bench.chaos [--place lab] [--faults N]`.

A campaign with simulated engines meets one fault after the other. Any of its processes gets SIGKILL, SIGTERM or SIGSTOP
and SIGCONT after a while; its file system, or that of one process, returns errors, lags or hangs (a preloaded library);
on the lab, nodes lose power, slurmctld falls silent, jobs are cancelled, and preempted (`--place spare`). Then either
steps continue, or the job ends, must leave no process, no job in the queue and no shared memory, and `hpcrl resume`
continues the campaign. After each fault: no acknowledged trajectory is lost, none was trained on twice, versions rise,
every checkpoint is whole. Victims and kinds are seeded; the moment is the machine's. With `--burst N`, N faults follow
each other within seconds, whatever the ones before have done, and steps must continue after the last: what must hold is
checked after each, and the time until nodes are free counts from the first. The pauses are below most of the times
after which something counts as dead; `--pauses 30 150` goes beyond them. `--report FILE` collects runs: the figures are
those of all of them. The lab needs root.
"""

import argparse
import contextlib
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bench.faults.places import CampaignPlace, LabPlace, LocalPlace
from bench.faults.report import ChaosRun, add_run, make_figures
from bench.faults.strikes import PAUSES_S, CampaignGoneError, ChaosFault, make_fault
from bench.faults.watch import CampaignWatch
from bench.figures import Figure, main
from hpcrl.campaign_dir.endpoints import list_endpoints
from hpcrl.campaign_dir.job_end import read_job_end
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import publish_file

_SEED = 20260102
_NUM_FAULTS = 8
_NUM_FAULTS_FULL = 300
_GROUPS_PER_STEP = 2
_SETTINGS = (
    *("train.num_steps=1000000", f"train.groups_per_step={_GROUPS_PER_STEP}", "rollout.group_size=4"),
    *("engine.backend=sim", "engine.sim.speed=0.1", "rollout.max_running=32", "train.checkpoint_every_steps=5"),
    *("job.drain_s=10", "job.walltime_min=600", "resources.env.num_workers=2", "resources.decode.num_workers=2"),
    "spool.keep=all",
)
_RECOVERY_TIMEOUT_S = 240.0


class ChaosCampaign:
    """A campaign in a place, which is resumed whenever its job has ended."""

    def __init__(self, home: Path, place: CampaignPlace) -> None:
        self.place = place
        self.directory = CampaignDir(home / "campaigns" / "chaos")
        self.watch = CampaignWatch(self.directory, groups_per_step=_GROUPS_PER_STEP)
        self.num_jobs = 1
        self.pauses_s = PAUSES_S

    def start(self) -> None:
        options = [word for setting in _SETTINGS for word in ("-s", setting)]
        done = self.place.command("submit", "quickstart", *self.place.site_words, "--name", "chaos", *options)
        assert done.returncode == 0, done.stderr
        _await(lambda: self.watch.look() > 2)

    def resume(self) -> str:
        """Continue in another job; return why that was refused, if it was."""
        done = self.place.command("resume", "chaos")
        self.num_jobs += done.returncode == 0
        return "" if done.returncode == 0 else f"resume was refused: {done.stderr.strip()[-300:]}"

    def stop(self) -> None:
        self.place.command("stop", "chaos")
        with contextlib.suppress(AssertionError):
            _await(self.place.is_over)
            return
        self.place.command("stop", "--now", "chaos")
        _await(self.place.is_over)

    @property
    def is_ending(self) -> bool:
        job = self.directory.job(self.num_jobs - 1)
        return job.drain.exists() or job.end.exists() or "hpcrl.job.driver" not in self.place.find_processes()


def run_chaos(
    home: Path,
    place: CampaignPlace,
    *,
    num_faults: int,
    seed: int,
    burst: int = 1,
    longest_s: float = math.inf,
    pauses_s: tuple[float, float] = PAUSES_S,
) -> ChaosRun:
    """Make faults in a campaign, which is stopped then; one that does not recover is the last."""
    deadline = time.monotonic() + longest_s
    rng, campaign = random.Random(seed), ChaosCampaign(home, place)
    campaign.pauses_s = pauses_s
    run = ChaosRun(place=place.name, seed=seed)
    campaign.start()
    last: list[ChaosFault] = []
    try:
        while len(run.faults) < num_faults and time.monotonic() < deadline:
            try:
                last = faults = make_burst(campaign, rng, most=burst)
                run.faults += faults
            except CampaignGoneError:
                faults, last = last, []  # they have ended the job only after some more steps
                if not faults:
                    raise
            follow_burst(campaign, faults)
            for fault in faults:
                print(json.dumps(asdict(fault)), file=sys.stderr, flush=True)
            if faults[-1].recovered_s is None:
                break
    finally:
        campaign.stop()
    run.violations = campaign.watch.find_violations()
    if left := place.list_shared_memory(campaign.directory):
        run.violations.append(f"shared memory was left at the end: {', '.join(left)}")
    run.num_acknowledged, run.num_steps = len(campaign.watch.acknowledged), campaign.watch.num_steps
    return run


def make_burst(campaign: ChaosCampaign, rng: random.Random, *, most: int) -> list[ChaosFault]:
    """Make some faults, fewer if one of them ends the job; check after each what must hold."""
    faults: list[ChaosFault] = []
    while len(faults) < most and not (faults and campaign.is_ending):
        try:
            fault = make_fault(campaign.place, rng, job=campaign.num_jobs - 1, pauses_s=campaign.pauses_s)
        except CampaignGoneError:
            if not faults:
                raise
            break  # the last one has ended the job meanwhile
        fault.violations += campaign.watch.find_violations()
        faults.append(fault)
    return faults


def follow_burst(campaign: ChaosCampaign, faults: list[ChaosFault]) -> None:
    """Wait until steps continue, in this job or in another one; note what is wrong."""
    fault = faults[-1]
    fault.recovered_s = None
    started, num_before = time.monotonic(), campaign.watch.look()
    while time.monotonic() < started + _RECOVERY_TIMEOUT_S:
        if campaign.place.is_over():
            note_end(campaign, faults)
            if refusal := campaign.resume():
                fault.violations.append(refusal)
                return
            num_before = campaign.watch.look()
        if campaign.is_ending:
            num_before = campaign.watch.look()  # steps of a job that ends do not count
        elif campaign.watch.look() > num_before + 1:
            for one in faults:
                one.recovered_s = round(time.time() - fault.at - fault.pause_s, 2)
            break
        time.sleep(0.5)
    fault.violations += campaign.watch.find_violations()
    if fault.recovered_s is None:
        fault.violations.append(f"no step was made for {_RECOVERY_TIMEOUT_S:g} s")
        fault.violations += describe_stall(campaign)


def describe_stall(campaign: ChaosCampaign) -> list[str]:
    """Let all processes write their stacks to their logs; return the load of each engine, as it gives it."""
    publish_file(campaign.directory.job(campaign.num_jobs - 1).dump_stacks, "")
    found = []
    for endpoint in list_endpoints(campaign.directory.endpoints):
        request = urllib.request.Request(f"{endpoint.url}/load", headers={"Authorization": f"Bearer {endpoint.token}"})
        try:
            with urllib.request.urlopen(request, timeout=5.0) as answer:
                load = answer.read().decode(errors="replace")
        except OSError as error:
            load = str(error)
        found.append(f"{endpoint.worker}: {load[:500]}")
    return found


def note_end(campaign: ChaosCampaign, faults: list[ChaosFault]) -> None:
    """Note when nothing of the job was left, and what it has left in shared memory."""
    fault, first = faults[-1], faults[0]
    fault.ended_job, fault.freed_s = True, round(time.time() - first.at - first.pause_s, 2)
    end = read_job_end(campaign.directory.job(campaign.num_jobs - 1))
    fault.outcome = f"{end.outcome} ({end.cause}): {end.reason[:200]}" if end is not None else "none was recorded"
    if all(one.kind.startswith("disk") for one in faults):
        fault.violations.append(f"a file system that failed for {fault.pause_s:g} s has ended the job")
    if left := campaign.place.list_shared_memory(campaign.directory):
        fault.violations.append(f"shared memory was left: {', '.join(left)}")


def _await(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _RECOVERY_TIMEOUT_S
    while not fact():
        assert time.monotonic() < deadline, "the campaign does not start, or does not end"
        time.sleep(0.5)


def run_in_place(arguments: argparse.Namespace, *, num_faults: int) -> ChaosRun:
    """Run the bench in a new home; one in which something is wrong is copied to where `--keep` asks for."""
    name, keep = arguments.place, arguments.keep
    seed, burst, longest_s = arguments.seed, arguments.burst, 60 * arguments.minutes
    run_there = partial(
        run_chaos, num_faults=num_faults, seed=seed, burst=burst, longest_s=longest_s, pauses_s=tuple(arguments.pauses)
    )
    with tempfile.TemporaryDirectory(prefix="hpcrl-", ignore_cleanup_errors=True) as directory:
        home = Path(directory)
        if name == "local":
            run = run_there(home, LocalPlace(home))
        else:
            place = LabPlace(home, is_preemptible=name == "spare")
            place.name = name
            with place.running():
                run = run_there(home, place)
        if keep is not None and (run.violations or any(fault.violations for fault in run.faults)):
            shutil.copytree(home / "campaigns", keep / f"{name}-{arguments.seed}", symlinks=True, dirs_exist_ok=True)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    run.commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return run


def measure(full: bool, arguments: argparse.Namespace) -> list[Figure]:
    num_faults = arguments.faults or (_NUM_FAULTS_FULL if full else _NUM_FAULTS)
    run = run_in_place(arguments, num_faults=num_faults)
    return make_figures(add_run(arguments.report, run) if arguments.report else [run])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--place", choices=["local", "lab", "spare"], default="local")
    parser.add_argument("--faults", type=int, help=f"how many (default: {_NUM_FAULTS}, with --full {_NUM_FAULTS_FULL})")
    parser.add_argument("--burst", type=int, default=1, help="faults that follow each other (default: 1)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="make no fault after this time")
    parser.add_argument(
        "--pauses", type=float, nargs=2, default=PAUSES_S, help="the shortest and the longest pause in seconds"
    )
    parser.add_argument("--seed", type=int, default=_SEED)
    parser.add_argument("--report", type=Path, help="a file that collects runs")
    parser.add_argument("--keep", type=Path, help="where campaigns in which something was wrong are copied to")


if __name__ == "__main__":
    sys.exit(main("chaos", measure, add_options=add_options))
