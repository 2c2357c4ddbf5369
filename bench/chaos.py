"""Random kills and pauses of a whole campaign on one machine: `python -m bench.chaos [--full]`.

Every process of a campaign with simulated engines may be the victim: guardian, driver, trainer, worker pools, workers,
interchanges. It gets SIGKILL, SIGTERM, or SIGSTOP and SIGCONT after a while. Then either steps continue, or the job
ends, must leave no process and no shared memory, and `hpcrl resume` continues the campaign. Each fault is written to
chaos-report.json in the present directory. Victims and signals are seeded; the moment is the machine's.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.figures import Figure, main
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import SpoolError
from hpcrl.spool.listing import list_segments
from hpcrl.spool.segment import read_segment
from hpcrl.system.files import read_json
from hpcrl.system.network import current_node
from hpcrl.weights.window.file import make_window_key

_SEED = 20260102
_NUM_FAULTS = 8
_NUM_FAULTS_FULL = 300
_GROUPS_PER_STEP = 2
_SETTINGS = (
    *("train.num_steps=1000000", f"train.groups_per_step={_GROUPS_PER_STEP}", "rollout.group_size=4"),
    *("engine.backend=sim", "train.checkpoint_every_steps=5", "job.drain_s=10", "job.walltime_min=600"),
    *("resources.env.num_workers=2", "resources.decode.num_workers=2", "spool.keep=all"),
)
_RECOVERY_TIMEOUT_S = 240.0
_FREED_BAR: dict[str, Any] = {"bar": 120.0, "better": "lower"}
_MAX_PAUSE_S = 8.0


@dataclass
class ChaosFault:
    """One fault, and what followed."""

    victim: str
    signal: str
    pause_s: float = 0.0
    job: int = 0
    ended_job: bool = False
    recovered_s: float | None = None
    """The time until another step was made."""
    freed_s: float | None = None
    """The time until no process of a job that ended was left."""
    violations: list[str] = field(default_factory=list)


class ChaosCampaign:
    """A campaign in a separate home, and what was seen of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.run = CampaignDir(home / "campaigns" / "chaos")
        self.num_jobs = 1
        self.acknowledged: set[str] = set()
        self._events = EventReader(self.run.events)
        self._seen_segments: set[str] = set()
        self._steps: list[int] = []
        self._published: list[tuple[float, int]] = []

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"HPCRL_HOME": str(self.home)}
        command = [sys.executable, "-m", "hpcrl.cli", *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)

    def start(self) -> None:
        options = [word for setting in _SETTINGS for word in ("-s", setting)]
        done = self.command("submit", "quickstart", "--site", "local", "--name", "chaos", *options)
        assert done.returncode == 0, done.stderr

    def resume(self) -> str:
        """Continue in another job; return why that was refused, if it was."""
        done = self.command("resume", "chaos")
        self.num_jobs += done.returncode == 0
        return "" if done.returncode == 0 else f"resume was refused: {done.stderr.strip()[-300:]}"

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return all processes of the campaign, by what they run."""
        found: dict[str, list[psutil.Process]] = defaultdict(list)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_own = process.environ().get("HPCRL_HOME") == str(self.home)
                if is_own and process.status() != psutil.STATUS_ZOMBIE and "hpcrl.cli" not in process.cmdline():
                    found[_name_program(process.cmdline())].append(process)
        return found

    def num_steps(self) -> int:
        self.look()
        return len(self._steps)

    def look(self) -> None:
        """Read new events and segments."""
        for line in self._events.poll_lines():
            if line.get("event") == "step":
                self._steps.append(line["step"])
            elif line.get("event") == "published":
                self._published.append((line["time"], line["version"]))
        rollouts = self.run.spool("rollouts")
        for name in set(list_segments(rollouts)) - self._seen_segments:
            with contextlib.suppress(SpoolError):  # archived since it was listed: its trajectories are read there
                self.acknowledged |= {one.id for one in read_segment(rollouts / name)}
                self._seen_segments.add(name)

    def find_violations(self) -> list[str]:
        """Return what is wrong with versions and with the newest checkpoint."""
        versions = [version for _, version in sorted(self._published)]
        found = [f"version {b} was published after {a}" for a, b in itertools.pairwise(versions) if b <= a]
        checkpoints = sorted(self.run.checkpoints.glob("*-step-*"))
        if checkpoints:
            step = int(checkpoints[-1].name.rpartition("-")[2])
            runs: dict[str, Any] = read_json(checkpoints[-1] / "consumed.json")["runs"]
            num = sum(end - start for pairs in runs.values() for start, end in pairs)
            if num != step * _GROUPS_PER_STEP:
                found.append(f"{checkpoints[-1].name} has consumed {num} groups: lost, or trained on twice")
        return found

    def list_windows(self) -> list[str]:
        path = make_window_key(self.run, node=current_node()).path
        return [found.name for found in path.parent.glob(f"{path.name}*")]

    def count_lost(self) -> tuple[int, int]:
        """Return the acknowledged trajectories that are in no spool any more, and the files in quarantine."""
        kept: set[str] = set()
        for spool in (self.run.spool(name) for name in ("rollouts", "scored", "archive")):
            for name in list_segments(spool):
                kept |= {one.id for one in read_segment(spool / name)}
        return len(self.acknowledged - kept), len(list(self.run.root.glob("spools/*/quarantine/*.h5")))


def _name_program(words: list[str]) -> str:
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return Path(words[0]).name if words else "unknown"


def run_chaos(home: Path, *, num_faults: int, seed: int) -> tuple[list[ChaosFault], ChaosCampaign]:
    """Make this number of faults; return them with the campaign, which is stopped."""
    rng, campaign, faults = random.Random(seed), ChaosCampaign(home), []
    campaign.start()
    _await(lambda: campaign.num_steps() > 2)
    for _ in range(num_faults):
        fault = _make_fault(campaign, rng)
        faults.append(fault)
        _follow_fault(campaign, fault)
        print(json.dumps(asdict(fault)), file=sys.stderr, flush=True)
        if fault.recovered_s is None:
            break
    campaign.command("stop", "chaos")
    _await(lambda: not campaign.processes())
    campaign.look()
    return faults, campaign


def _make_fault(campaign: ChaosCampaign, rng: random.Random) -> ChaosFault:
    """Choose a program, one of its processes, and a signal."""
    time.sleep(rng.uniform(0.0, 3.0))
    processes = campaign.processes()
    program = rng.choice(sorted(processes))
    kind = rng.choices([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], [6, 3, 1])[0]
    fault = ChaosFault(victim=program, signal=kind.name, job=campaign.num_jobs - 1)
    victim = rng.choice(processes[program])
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(kind)
        if kind == signal.SIGSTOP:
            fault.pause_s = round(rng.uniform(0.5, _MAX_PAUSE_S), 2)
            time.sleep(fault.pause_s)
            victim.send_signal(signal.SIGCONT)
    return fault


def _follow_fault(campaign: ChaosCampaign, fault: ChaosFault) -> None:
    """Wait until steps continue, in this job or in another one; note what is wrong."""
    started, num_before = time.monotonic(), campaign.num_steps()
    ending_since: float | None = None
    while time.monotonic() < started + _RECOVERY_TIMEOUT_S:
        if not campaign.processes():
            fault.ended_job = True
            fault.freed_s = round(time.monotonic() - (ending_since or started), 2)
            if windows := campaign.list_windows():
                fault.violations.append(f"shared memory was left: {', '.join(windows)}")
            if refusal := campaign.resume():
                fault.violations.append(refusal)
                return
            num_before = campaign.num_steps()
        job = campaign.run.job(campaign.num_jobs - 1)
        if job.drain.exists() or job.end.exists() or "hpcrl.job.driver" not in campaign.processes():
            ending_since = ending_since or time.monotonic()
            num_before = campaign.num_steps()  # steps of a job that ends do not count
        elif campaign.num_steps() > num_before + 1:
            fault.recovered_s = round(time.monotonic() - started, 2)
            break
        time.sleep(0.5)
    fault.violations += campaign.find_violations()
    if fault.recovered_s is None:
        fault.violations.append(f"no step was made for {_RECOVERY_TIMEOUT_S:g} s")


def _await(fact: Any, *, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < deadline, "the campaign does not start, or does not end"
        time.sleep(0.2)


def measure(full: bool) -> list[Figure]:
    num_faults = _NUM_FAULTS_FULL if full else _NUM_FAULTS
    with tempfile.TemporaryDirectory(prefix="hpcrl-chaos-", ignore_cleanup_errors=True) as home:
        faults, campaign = run_chaos(Path(home), num_faults=num_faults, seed=_SEED)
        num_lost, num_damaged = campaign.count_lost()
        Path("chaos-report.json").write_text(json.dumps([asdict(fault) for fault in faults], indent=1))
        recovered = [fault.recovered_s for fault in faults if fault.recovered_s is not None]
        freed = [fault.freed_s for fault in faults if fault.freed_s is not None]
        return [
            Figure(name="faults made", value=len(faults), unit=""),
            Figure(name="jobs that they ended", value=sum(fault.ended_job for fault in faults), unit=""),
            Figure(name="faults after which steps continued", value=len(recovered), unit="", bar=num_faults),
            Figure(name="acknowledged trajectories seen", value=len(campaign.acknowledged), unit=""),
            *(
                Figure(name=name, value=value, unit="", bar=0, better="lower")
                for name, value in (
                    ("acknowledged trajectories lost", num_lost),
                    ("files in quarantine", num_damaged),
                    ("invariants that did not hold", sum(len(fault.violations) for fault in faults)),
                )
            ),
            Figure(name="time to the next step, median", value=statistics.median(recovered or [0.0]), unit="s"),
            Figure(name="time until a job was gone, worst", value=max(freed, default=0.0), unit="s", **_FREED_BAR),
        ]


if __name__ == "__main__":
    sys.exit(main("chaos", measure))
