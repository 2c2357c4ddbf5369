"""Operations on the shared file system by an idle campaign: `python -m bench.control`.

Campaigns of 4, 16 and 64 workers, half of them env workers and half engines (simulated), run with a trainer that is
suspended, as in a long step: the env workers have played what they may, and all processes only wait for each other.
strace then counts, for some seconds, the calls below the campaign's directory that a file system's metadata server
sees (opens, stats, listings, and changes; not the stat of an open file, whose attributes came with it), and the
requests for an engine's load. What a process does with files of single peers grows with their number, the rest does
not; so follow the rates of 100 env workers and 200 engines, and of the steps on their nodes. Couriers, which this
machine does not need, are not counted. The quick run has 16 and 32 workers. `--busy` counts at work: the episodes of
simulated engines are small, so that each worker writes far more than in a real campaign.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figure, main
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import WorkerStarted
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import read_json

ENV_WORKERS, ENGINES, NODES_OF_ENGINES = 100, 200, 50
STEPS = 2 * ENV_WORKERS + NODES_OF_ENGINES + 8
"""The steps of a job of that size: env and reward workers on each env node, engines, trainer."""
MANY = {"reward": ENV_WORKERS, "step": STEPS, "pool": STEPS}
"""The number of processes of kinds without peers, for a campaign of that size; of others there is one."""
BAR_OPERATIONS, BAR_LOADS = 1000.0, 10.0
GROUP_SIZE = 8
"""That of the recipe."""
WINDOW_S = 20.0
QUIET_S, IDLE_S = 4.0, 60.0
"""The time without new segments after which all is played, and the time after that until the count."""
START_TIMEOUT_S = 600.0
KINDS = {
    "open": "open",
    "openat": "open",
    "stat": "stat",
    "lstat": "stat",
    "newfstatat": "stat",
    "statx": "stat",
    "access": "stat",
    "faccessat": "stat",
    "faccessat2": "stat",
    "readlink": "stat",
    "readlinkat": "stat",
    "getdents64": "listing",
}
"""Calls by kind; all others that are traced are changes."""
CHANGES = (
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "link", "linkat"),
    *("symlink", "symlinkat", "utimensat", "fsync", "fdatasync", "chmod", "fchmod", "fchmodat"),
    *("truncate", "ftruncate"),
)
SETTINGS = (
    "engine.backend=sim",
    "train.num_steps=100000",
    *(f"resources.{role}.mem_gib_per_worker=0.5" for role in ("env", "prefill", "decode")),
)
SITE = """
name = "wide"
description = "this machine, with room for many small workers"
scheduler = "local"
het_jobs = "no"
verified = true
checked_on = "2026-11-20"
[network]
interface = "lo"
[partitions.host]
cores_per_node = 4096
mem_gib_per_node = 4096
max_walltime_min = 1440
max_nodes = 1
"""


@dataclass(frozen=True)
class CampaignCount:
    """The operations of one idle campaign."""

    num_env: int
    num_engines: int
    rates: dict[str, dict[str, float]]
    """Operations a second by kind of process, then by kind of operation; all processes of a kind together."""
    peers: dict[str, float]
    """The part of them on files of single workers (endpoints, events), which are more where there are more workers."""
    num_processes: Counter[str]
    loads: float
    """Requests for its load that an engine gets a second."""

    def each(self, process: str) -> float:
        """Return the operations a second of one process of a kind."""
        return sum(self.rates.get(process, {}).values()) / max(self.num_processes[process], 1)

    def each_of(self, process: str, *, num_peers: int) -> tuple[float, float]:
        """Return the operations a second of one process on its own and on common files, and on those of each peer."""
        num = max(self.num_processes[process], 1)
        return (sum(self.rates.get(process, {}).values()) - self.peers.get(process, 0.0)) / num, self.peers.get(
            process, 0.0
        ) / num / num_peers


def measure(full: bool, arguments: argparse.Namespace) -> list[Figure]:
    if shutil.which("strace") is None:
        raise SystemExit("bench.control counts with strace, which is not installed: apt-get install strace")
    sizes = arguments.workers or ((4, 16, 64) if full else (16, 32))
    if len(sizes) < 2:
        raise SystemExit("bench.control extrapolates from two sizes: give --workers two numbers or more")
    counts = [_count_campaign(num, is_busy=arguments.busy) for num in sizes]
    figures = []
    for count in counts:
        size = f"{count.num_env} + {count.num_engines} workers"
        figures += [
            Figure(name=f"{size}: {process}, operations/s each", value=count.each(process), unit="/s")
            for process in sorted(count.rates)
        ]
        figures.append(Figure(name=f"{size}: /load requests/s of an engine", value=count.loads, unit="/s"))
    return [*figures, *_extrapolate(counts[-2], counts[-1], has_bars=not arguments.busy)]


def _extrapolate(small: CampaignCount, large: CampaignCount, *, has_bars: bool) -> list[Figure]:
    """Return the figures of a campaign of 100 env workers and 200 engines, as ratios to their bars."""

    def at(process: str, num_peers: int) -> float:
        """Return the rate of one process beside that many peers; the busier of the two campaigns counts."""
        parts = [
            count.each_of(
                process, num_peers=count.num_engines if process == "env" else count.num_env + count.num_engines
            )
            for count in (small, large)
        ]
        return max(own for own, _ in parts) + num_peers * max(per_peer for _, per_peer in parts)

    rates = {
        "env workers": ENV_WORKERS * at("env", ENGINES),
        "engines": ENGINES * at("engine", 0),
        "driver": at("driver", ENV_WORKERS + ENGINES),
        "monitor": at("monitor", ENV_WORKERS + ENGINES),
    }
    others = sorted({*small.rates, *large.rates} - {"env", "engine", "driver", "monitor"})
    rates |= {f"{kind} processes": MANY.get(kind, 1) * at(kind, 0) for kind in others}
    slope = max(large.loads - small.loads, 0.0) / (large.num_env - small.num_env)
    loads = large.loads + slope * (ENV_WORKERS - large.num_env)
    size = f"{ENV_WORKERS} + {ENGINES}"
    return [
        *(Figure(name=f"{size}: all {kind}, operations/s", value=rate, unit="/s") for kind, rate in rates.items()),
        Figure(name=f"{size}: /load requests/s of an engine", value=loads, unit="/s"),
        Figure(
            name=f"{size}: operations / {BAR_OPERATIONS:g} a second",
            value=sum(rates.values()) / BAR_OPERATIONS,
            bar=1.0 if has_bars else None,
            better="lower",
        ),
        Figure(name=f"{size}: /load / {BAR_LOADS:g} a second", value=loads / BAR_LOADS, bar=1.0, better="lower"),
    ]


def _count_campaign(num_workers: int, *, is_busy: bool) -> CampaignCount:
    """Run a campaign until it is idle, or at its work, and count."""
    num_env, num_prefill = num_workers // 2, num_workers // 4
    num_decode = num_workers - num_env - num_prefill
    sizes = {"env": num_env, "prefill": num_prefill, "decode": num_decode}
    with tempfile.TemporaryDirectory() as home:
        environ = os.environ | {"HPCRL_HOME": home}
        with _run_campaign(Path(home), sizes, environ) as campaign:
            _await_idle(campaign, num_engines=num_prefill + num_decode, num_env=num_env, is_busy=is_busy)
            monitor = [sys.executable, "-m", "hpcrl.cli", "monitor", campaign.name]
            with subprocess.Popen(monitor, env=environ, stdout=subprocess.DEVNULL) as watching:
                time.sleep(0.0 if is_busy else IDLE_S)
                processes = _find_processes(campaign) | {watching.pid: "monitor"}
                calls = _trace(list(processes), Path(home) / "trace")
                watching.terminate()
            return _sum_calls(calls, processes, campaign, num_env=num_env, num_engines=num_prefill + num_decode)


@contextlib.contextmanager
def _run_campaign(home: Path, sizes: dict[str, int], environ: dict[str, str]) -> Iterator[CampaignDir]:
    site = home / "wide.toml"
    site.write_text(SITE)
    room = f"rollout.max_running={GROUP_SIZE * sizes['env']}"
    settings = [*SETTINGS, room, *(f"resources.{role}.num_workers={num}" for role, num in sizes.items())]
    options = [part for setting in settings for part in ("-s", setting)]
    hpcrl = [sys.executable, "-m", "hpcrl.cli"]
    submit = [*hpcrl, "submit", "quickstart", "--site", str(site), "--name", "idle", *options]
    subprocess.run(submit, env=environ, check=True, stdout=subprocess.DEVNULL)
    campaign = CampaignDir(home / "campaigns" / "idle")
    try:
        yield campaign
    finally:
        for pid, kind in _find_processes(campaign).items():
            if kind == "trainer":
                os.kill(pid, signal.SIGCONT)
        subprocess.run([*hpcrl, "stop", "--now", "idle"], env=environ, check=False, stdout=subprocess.DEVNULL)


def _await_idle(campaign: CampaignDir, *, num_engines: int, num_env: int, is_busy: bool) -> None:
    """Suspend the trainer once all workers run, and wait until nothing new is played or scored; not if it is busy."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _is_complete(campaign, num_engines=num_engines, num_env=num_env):
        if time.monotonic() > deadline:
            raise SystemExit(f"the workers of {campaign.root} did not start in {START_TIMEOUT_S:g} s: see its logs")
        time.sleep(0.5)
    if is_busy:
        return
    for pid, kind in _find_processes(campaign).items():
        if kind == "trainer":
            os.kill(pid, signal.SIGSTOP)
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET_S:
        num = sum(1 for spool in ("rollouts", "scored") for _ in campaign.spool(spool).glob("*.h5"))
        if num != seen:
            seen, since = num, time.monotonic()
        time.sleep(0.5)


def _is_complete(campaign: CampaignDir, *, num_engines: int, num_env: int) -> bool:
    env_workers = {event.worker for event in _list_starts(campaign) if event.role == "env"}
    has_segment = campaign.spool("scored").is_dir() and any(campaign.spool("scored").glob("*.h5"))
    return len(list(campaign.endpoints.glob("*.json"))) == num_engines and len(env_workers) == num_env and has_segment


def _list_starts(campaign: CampaignDir) -> list[WorkerStarted]:
    """Return the starts of workers so far."""
    if not campaign.events.is_dir():
        return []
    return [event for event in EventReader(campaign.events).poll() if isinstance(event, WorkerStarted)]


def _find_processes(campaign: CampaignDir) -> dict[int, str]:
    """Return the kind of each process of the campaign's job."""
    submission = campaign.job(0).submission
    if not submission.exists():
        return {}
    guardian = int(read_json(submission)["pid"])
    kinds = {
        event.pid: {"env": "env", "train": "trainer", "reward": "reward"}.get(event.role, "engine")
        for event in _list_starts(campaign)
        if event.pid is not None
    }
    found = {}
    for pid in [guardian, *_list_descendants(guardian)]:
        if not (command := _read_command(pid)):
            continue  # it has ended
        kind = kinds.get(pid) or ("step" if "hpcrl.job.step" in command else None)
        kind = kind or ("guardian" if pid == guardian else "driver" if "hpcrl.job.driver" in command else "pool")
        found[pid] = kind
    return found


def _list_descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in _split(path)]
    except OSError:
        return []
    return [one for child in children for one in (child, *_list_descendants(child))]


def _split(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().split()
    return []


def _read_command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _trace(pids: list[int], output: Path) -> list[tuple[int, str]]:
    """Return the calls of these processes in a while, each with its process."""
    threads = {int(path.name): pid for pid in pids for path in Path(f"/proc/{pid}/task").glob("*")}
    calls = ",".join([*KINDS, *CHANGES, "sendto"])
    strace = ["strace", "-f", "-qq", "-y", "-s", "240", "-e", f"trace={calls}", "-e", "signal=none", "-o", str(output)]
    with subprocess.Popen([*strace, "-p", ",".join(map(str, pids))]) as tracing:
        time.sleep(WINDOW_S)
        threads |= {int(path.name): pid for pid in pids for path in Path(f"/proc/{pid}/task").glob("*")}
        tracing.send_signal(signal.SIGINT)
    return [(threads.get(thread, 0), call) for thread, call in _join_lines(output.read_text(errors="replace"))]


def _join_lines(trace: str) -> Iterator[tuple[int, str]]:
    """Yield each call with its thread; strace divides a call that another one interrupts."""
    unfinished: dict[str, str] = {}
    for line in trace.splitlines():
        thread, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            unfinished[thread] = call.removesuffix("<unfinished ...>")
            continue
        if call.startswith("<... "):
            call = unfinished.pop(thread, "") + call.partition("resumed>")[2]
        if "(" in call:
            yield int(thread), call


def _sum_calls(
    calls: list[tuple[int, str]], processes: dict[int, str], campaign: CampaignDir, *, num_env: int, num_engines: int
) -> CampaignCount:
    inside = str(campaign.root)
    numbers: dict[str, Counter[str]] = {}
    num_loads = 0
    peers: Counter[str] = Counter()
    detail: Counter[tuple[str, str, str]] = Counter()
    for pid, line in calls:
        process, (call, _, rest) = processes.get(pid, "unknown"), line.partition("(")
        if call == "sendto":
            num_loads += '"GET /load ' in rest
        elif inside in rest and not _is_free(call, rest):
            kind = KINDS.get(call, "change")
            numbers.setdefault(process, Counter())[kind] += 1
            place = re.search(re.escape(inside) + r'(/[^">]*)?', rest)
            peers[process] += place is not None and is_of_peer(process, place[1] or "")
            detail[process, kind, re.sub(r"\d+", "N", place[1] or "/") if place else ""] += 1
    if os.environ.get("BENCH_DETAIL"):
        for key, num in detail.most_common(60):
            print(json.dumps([*key, round(num / WINDOW_S, 2)]), file=sys.stderr)
    return CampaignCount(
        num_env=num_env,
        num_engines=num_engines,
        rates={process: {kind: num / WINDOW_S for kind, num in found.items()} for process, found in numbers.items()},
        peers={process: num / WINDOW_S for process, num in peers.items()},
        num_processes=Counter(processes.values()),
        loads=num_loads / WINDOW_S / num_engines,
    )


def is_of_peer(process: str, place: str) -> bool:
    """Return whether a place in the campaign is a file of another worker."""
    watched = ("/endpoints/",) if process in ("env", "engine") else ("/endpoints/", "/events/")
    return any(place.startswith(one) and len(place) > len(one) for one in watched)


def _is_free(call: str, rest: str) -> bool:
    """Return whether a call asks no server: the stat of an open file, the end of a listing."""
    return ("AT_EMPTY_PATH" in rest and '""' in rest) or (call == "getdents64" and rest.endswith("= 0"))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", help="two sizes of campaigns or more, in rising order")
    parser.add_argument("--busy", action="store_true", help="count at work; the bars are those of an idle campaign")


if __name__ == "__main__":
    sys.exit(main("control", measure, add_options=add_options))
