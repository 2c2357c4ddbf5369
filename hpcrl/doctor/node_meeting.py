"""The end of a doctor's jobs, for which their nodes meet: each tries to reach the others, and notes its SIGTERM.

MeetingFiles    the files of a node, by which it and the login node exchange all of it
NodeMeeting     a node's side
introduce_nodes, collect_links, judge_term   the login node's side
MIN_TERM_S      how long a step has to live after SIGTERM
"""

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcrl.doctor.result import CheckResult, fail_check, pass_check, warn_check
from hpcrl.system.files import publish_file
from hpcrl.system.network import is_reachable

MIN_TERM_S = 20.0
"""The time in which a trainer saves the checkpoint of a model that is not small."""
TERM_TOLERANCE_S = 1.0
REACH_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.25
BACKLOG = 1024


@dataclass(frozen=True)
class MeetingFiles:
    """The files of a node of a partition; all are published in one folder, which all nodes see."""

    folder: Path
    label: str
    """The partition; its second node has a longer one."""

    @property
    def second(self) -> "MeetingFiles":
        """The files of the partition's second node."""
        return MeetingFiles(self.folder, f"{self.label}, second node")

    @property
    def request(self) -> Path:
        return self.folder / f"{self.label}.json"

    @property
    def script(self) -> Path:
        return self.folder / f"{self.label}.sh"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.label}.log"

    @property
    def looked(self) -> Path:
        """The file that is there once the node has looked for its signal file, and not found it."""
        return self.folder / f"{self.label}.looked"

    @property
    def signal(self) -> Path:
        return self.folder / f"{self.label}.signal"

    @property
    def results(self) -> Path:
        return self.folder / f"{self.label}.results"

    @property
    def address(self) -> Path:
        """The address and the port at which others try to reach the node."""
        return self.folder / f"{self.label}.address"

    @property
    def links(self) -> Path:
        """The results of its tries."""
        return self.folder / f"{self.label}.links"

    @property
    def term(self) -> Path:
        """The time at which it received SIGTERM."""
        return self.folder / f"{self.label}.term"

    @property
    def alive(self) -> Path:
        """The last time after it at which the node was still alive."""
        return self.folder / f"{self.label}.alive"

    @property
    def addresses(self) -> Path:
        """The addresses of all nodes, once all have theirs."""
        return self.folder / "addresses"


class NodeMeeting:
    """A node's server, which accepts nothing, and its wait for the others and for SIGTERM."""

    def __init__(self, files: MeetingFiles) -> None:
        self._files = files
        self._server: socket.socket | None = None
        self._terminated_at: float | None = None

    def open(self, host: str) -> None:
        """Listen at an address of this node."""
        self._server = socket.create_server((host, 0), backlog=BACKLOG)
        publish_file(self._files.address, json.dumps(self._server.getsockname()))

    def attend(self) -> None:
        """Try to reach all others once they are known, and wait for SIGTERM; its time is over after `MIN_TERM_S`."""
        signal.signal(signal.SIGTERM, self._on_term)
        has_tried = False
        while self._terminated_at is None:
            if not has_tried and self._files.addresses.exists():
                publish_file(self._files.links, msgspec.json.encode(self._reach_others()))
                has_tried = True
            time.sleep(POLL_INTERVAL_S)
        publish_file(self._files.term, str(self._terminated_at))
        while (now := time.time()) < self._terminated_at + MIN_TERM_S:
            publish_file(self._files.alive, str(now))
            time.sleep(POLL_INTERVAL_S)

    def _reach_others(self) -> list[CheckResult]:
        addresses: dict[str, tuple[str, int]] = json.loads(self._files.addresses.read_text())
        others = {label: address for label, address in addresses.items() if label != self._files.label}
        reached = [
            label for label, (host, port) in others.items() if is_reachable(host, port, timeout_s=REACH_TIMEOUT_S)
        ]
        failed = [_fail_route(label, host) for label, (host, _) in others.items() if label not in reached]
        return ([pass_check("routes", f"{', '.join(reached)} reached")] if reached else []) + failed

    def _on_term(self, *_: object) -> None:
        self._terminated_at = self._terminated_at or time.time()


def _fail_route(label: str, host: str) -> CheckResult:
    partition = label.partition(",")[0]
    change = (
        f"name an interface that both have (network.interface, partitions.{partition}.interface), or ask the site "
        "whether ports between these nodes are open"
    )
    return fail_check(f"route to {label}", f"no connection to {host} within {REACH_TIMEOUT_S:g} s", change)


def introduce_nodes(files: Iterable[MeetingFiles]) -> list[MeetingFiles]:
    """Give the nodes that listen each other's addresses, also the second ones; return them."""
    present = [one for first in files for one in (first, first.second) if one.address.exists()]
    addresses = {one.label: json.loads(one.address.read_text()) for one in present}
    if present:
        publish_file(present[0].addresses, json.dumps(addresses))
    return present


def collect_links(files: MeetingFiles) -> list[CheckResult]:
    """Return what a node has reached; nothing if it was not there to try."""
    try:
        return msgspec.json.decode(files.links.read_bytes(), type=list[CheckResult])
    except OSError:
        return []


def judge_term(files: MeetingFiles) -> CheckResult:
    """Return whether SIGTERM reached the step of a job that was cancelled, and how long it had then."""
    save_more = (
        "end campaigns by `hpcrl stop`, and lower train.checkpoint_every_steps: scancel and preemption lose steps"
    )
    try:
        terminated_at = float(files.term.read_text())
    except OSError:
        return warn_check("signals", "SIGTERM of scancel did not reach the step", save_more)
    lived_s = 0.0
    with contextlib.suppress(OSError):
        lived_s = float(files.alive.read_text()) - terminated_at
    if lived_s < MIN_TERM_S - TERM_TOLERANCE_S:
        return warn_check("signals", f"SIGTERM reached the step, which was ended {lived_s:.0f} s later", save_more)
    return pass_check("signals", f"SIGTERM reached the step, which lived {MIN_TERM_S:g} s longer")
