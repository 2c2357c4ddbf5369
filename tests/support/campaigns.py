"""Helpers for tests of whole campaigns: run the command line, wait for conditions, find leftover processes."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.system.files import read_json
from hpcrl.system.network import current_node
from hpcrl.testing.event_lines import read_events
from hpcrl.weights.window.file import make_window_key

SMALL = ("-s", "train.num_steps=4", "-s", "train.groups_per_step=2", "-s", "rollout.group_size=4")
"""Settings of a small campaign that runs every part; it learns nothing."""
SIMULATED = (*SMALL, "-s", "engine.backend=sim")
"""The same without a model in its engines, which start in a fifth of the time: for what is not about generation."""
CALM = ("-s", "engine.sim.speed=0.002", "-s", "rollout.max_running=16")
"""Simulated episodes that take long: a campaign in which a test waits for something else leaves the cores to others."""


BOUND_BY_MODES = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
"""Starts a command for which the modes of files count, as they do for every user but root."""


def hpcrl(
    *arguments: str, check: bool = True, timeout_s: float = 480.0, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run one command as a user does; `before` are words that start it."""
    command = [*before, sys.executable, "-m", "hpcrl.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if check:
        assert done.returncode == 0, (
            f"hpcrl {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}"
        )
    return done


def snapshot(name: str) -> dict[str, Any]:
    """Return the output of `hpcrl monitor NAME --json`."""
    value: dict[str, Any] = json.loads(hpcrl("monitor", name, "--json").stdout)
    return value


def until(fact: Callable[[], bool], *, what: str | Callable[[], str], timeout_s: float = 240.0) -> None:
    """Wait until a condition holds; a `what` that is called describes what is so at the end of the wait."""
    deadline = time.monotonic() + timeout_s
    while not fact():
        is_early = time.monotonic() < deadline
        assert is_early, f"still not so after {timeout_s:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.2)


@cache
def _open_events(directory: Path) -> tuple[EventReader, list[dict[str, Any]]]:
    return EventReader(directory), []


def events_of(campaign: CampaignDir, name: str) -> list[dict[str, Any]]:
    """Return the events with this name so far; each call reads only new lines, as `until` calls it often."""
    reader, lines = _open_events(campaign.events)
    lines += reader.poll_lines()
    lines.sort(key=lambda event: float(event.get("time", 0.0)))
    return [event for event in lines if event["event"] == name]


def steps(campaign: CampaignDir) -> list[dict[str, Any]]:
    """Return the training steps so far."""
    return events_of(campaign, "step")


def outcome(campaign: CampaignDir, job: int = 0) -> dict[str, Any]:
    """Wait for the end of a job's driver and return its outcome."""
    path = campaign.job(job).outcome
    until(path.exists, what=f"{path} exists")
    value: dict[str, Any] = read_json(path)
    return value


def pids_of(home: Path) -> dict[int, str]:
    """Return every process that inherited this home, with its command line: all that its campaigns started."""
    mark = f"HPCRL_HOME={home}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), os.getppid()):
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name)] = words
        except OSError:
            continue
    return found


def processes_of(home: Path) -> list[str]:
    """Return the command line of every process that inherited this home, in any session."""
    return list(pids_of(home).values())


def driver_of(campaign: CampaignDir, job: int = 0) -> int:
    """Return the driver of a job: the child of the guardian."""
    guardian = read_json(campaign.job(job).submission)["pid"]
    children = Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()
    return int(children[0])


def windows_of(campaign: CampaignDir, *, node: str | None = None) -> list[str]:
    """Return the weight windows of a campaign on this node, or on the lab's nodes whose names start with `node`."""
    path = make_window_key(campaign, node=current_node() if node is None else node).path
    return [found.name for found in path.parent.glob(f"{path.name}*")]


def last_words(campaigns: Path, *, most: int = 8) -> list[tuple[str, str]]:
    """Return for each campaign the last lines of its logs and its last events, only one of each frequent kind."""
    sections = []
    for campaign in map(CampaignDir, sorted(campaigns.glob("*"))):
        lines = [
            f"{path.name}: {line[:300]}"
            for path in sorted(campaign.jobs.glob("*/logs/*.log"))
            for line in path.read_text(errors="replace").splitlines()[-(most if path.stem == "couriers" else 1) :]
        ]
        events = read_events(campaign.events)
        numbers = Counter(event["event"] for event in events)
        left = {kind: most if number < 10 * most else 1 for kind, number in numbers.items()}
        rare = []
        for event in reversed(events):
            left[event["event"]] -= 1
            if left[event["event"]] >= 0:
                rare.insert(0, json.dumps(event)[:300])
        sections.append((f"campaign {campaign.name}", "\n".join(lines + rare)))
    return sections


def num_consumed_groups(campaign: CampaignDir) -> int:
    """Count the groups that the newest checkpoint has consumed; 0 if there is none yet."""
    found = sorted(campaign.checkpoints.iterdir())
    runs = read_json(found[-1] / "consumed.json")["runs"] if found else {}
    return sum(end - start for pairs in runs.values() for start, end in pairs)


def end_campaigns(home: Path) -> None:
    """End all processes that a test has left in its home; no process and no window of a campaign may remain."""
    for campaign in (home / "campaigns").iterdir():
        hpcrl("stop", "--now", campaign.name, check=False)
    until(lambda: not processes_of(home), what=lambda: f"nothing is left: {processes_of(home)}", timeout_s=60)
    assert [campaign.name for campaign in (home / "campaigns").iterdir() if windows_of(CampaignDir(campaign))] == []
