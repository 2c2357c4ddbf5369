"""The inspection behind `verify`; the campaign may run meanwhile."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from rich.console import Console
from rich.progress import track

from hpcrl.errors import SpoolError
from hpcrl.files import read_json
from hpcrl.rundir import RunDir
from hpcrl.spool import quarantine
from hpcrl.spool.names import listed
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.segment import Segment
from hpcrl.traj.arguments import SPOOLS
from hpcrl.traj.check import flaw, read_checked, stray, unlike
from hpcrl.traj.consumed import ConsumedGroups, read_consumed, sorted_numbers
from hpcrl.traj.history import SeenIds

T = TypeVar("T")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was found."""

    severity: Literal["damage", "note"]
    path: str
    """Below the campaign's directory."""
    reason: str


class Totals(msgspec.Struct, kw_only=True):
    """What was looked at in one spool."""

    num_segments: int = 0
    num_trajectories: int = 0
    num_bytes: int = 0
    num_damaged: int = 0
    num_duplicates: int = 0
    """Records of an episode that the spool has already; readers drop them."""


class Report(msgspec.Struct, kw_only=True):
    """Everything that `verify` has to say."""

    campaign: str
    clean: bool = True
    spools: dict[str, Totals] = {}
    consumed: str = ""
    """What became of the groups that were trained on, in words."""
    findings: list[Finding] = []


class Inspection:
    """A report in the making."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.report = Report(campaign=run.name)
        self._seen: dict[tuple[str, bool], SeenIds] = {}
        self._an_example: dict[str, str] = {}
        self._some_vanished = False

    def report_of_all(self) -> Report:
        """Look at everything."""
        consumed = read_consumed(self.run.checkpoints)  # first: what it names was in a spool by then
        self._look_at_live()
        self._look_at_archive()
        self._look_at_quarantine()
        self._look_for_strays()
        self._tell_duplicates()
        self._compare(consumed)
        self.report.clean = all(finding.severity == "note" for finding in self.report.findings)
        return self.report

    def _look_at_live(self) -> None:
        """Both live spools, twin by twin."""
        names = {spool: set(self._listed(spool)) for spool in ("rollouts", "scored")}
        for name in _progress(sorted(names["rollouts"] | names["scored"]), "live segments"):
            rollouts = self._segment("rollouts", name) if name in names["rollouts"] else None
            scored = self._segment("scored", name, twin=rollouts) if name in names["scored"] else None
            difference = unlike(rollouts, scored) if rollouts is not None and scored is not None else None
            if difference:
                self._add("damage", self.run.spool("scored") / name, f"is not its twin in rollouts: {difference}")

    def _look_at_archive(self) -> None:
        """Listed again while segments vanish: what they held is in others then."""
        done: set[str] = set()
        self._some_vanished = True
        while self._some_vanished:
            self._some_vanished = False
            names = [name for name in self._listed("archive") if name not in done]
            done.update(names)
            for name in _progress(names, "archive"):
                self._segment("archive", name)

    def _look_at_quarantine(self) -> None:
        """What readers put aside. It is damage until the segment is there again, made anew from its twin."""
        for spool in SPOOLS:
            directory = self.run.spool(spool) / quarantine.DIRECTORY
            for name in self._listed_in(directory):
                if (self.run.spool(spool) / name).exists():
                    self._add("note", directory / name, "was put aside as damaged, and was made again since")
                else:
                    self._add("damage", directory / name, f"was put aside: {_why_aside(directory / name)}")

    def _look_for_strays(self) -> None:
        for spool in SPOOLS:
            try:
                for path, reason in stray(self.run.spool(spool)):
                    self._add("note", path, reason)
            except OSError:  # no such spool yet, or told when it was listed
                continue

    def _tell_duplicates(self) -> None:
        for spool, totals in self.report.spools.items():
            if totals.num_duplicates:
                example = f"{totals.num_duplicates:,} episodes are there twice, such as {self._an_example[spool]!r}"
                self._add("note", self.run.spool(spool), f"{example}; readers deliver each once")

    def _compare(self, consumed: ConsumedGroups) -> None:
        """What was trained on must be somewhere, if the recipe keeps everything."""
        for path, reason in consumed.problems:
            self._add("damage", path, reason)
        if not consumed.checkpoint:
            self.report.consumed = "no checkpoint yet"
            return
        keep = _kept(self.run)
        said = f"{consumed.num_groups:,} groups, by checkpoint {consumed.checkpoint}"
        if keep != "all":
            self.report.consumed = f"{said}; the recipe keeps {keep!r} of them, so none has to be there"
            return
        present = sorted_numbers(group for seen in self._seen.values() for group in seen.groups())
        num_missing = 0
        for domain, num, example in consumed.missing(present):
            num_missing += num
            reason = f"trained on, and in no spool: {num:,} of the groups of {domain}, such as '{domain}/{example}'"
            self._add("damage", self.run.checkpoints / consumed.checkpoint, reason)
        self.report.consumed = f"{said}; {f'{num_missing:,} missing' if num_missing else 'all there'}"

    def _segment(self, spool: str, name: str, *, twin: Segment | None = None) -> Segment | None:
        """Read one segment and count it; None if it is damaged or gone."""
        path = self.run.spool(spool) / name
        totals = self.report.spools[spool]
        try:
            segment = read_checked(path)
            num_bytes = path.stat().st_size
            trajectories = list(segment)
        except (OSError, SpoolError) as error:
            if isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError):
                self._some_vanished = True
                return None
            totals.num_segments += 1
            totals.num_damaged += 1
            cure = "; its twin in rollouts is whole: move this one away and it is scored anew" if twin else ""
            self._add("damage", path, f"{error}{cure}")
            return None
        totals.num_segments += 1
        totals.num_bytes += num_bytes
        for trajectory in trajectories:
            self._trajectory(spool, path, trajectory)
        return segment

    def _trajectory(self, spool: str, path: Path, trajectory: Trajectory) -> None:
        self.report.spools[spool].num_trajectories += 1
        seen = self._seen.setdefault((spool, trajectory.status in TRAINABLE), SeenIds())
        if not seen.add(trajectory.id):
            self.report.spools[spool].num_duplicates += 1
            self._an_example.setdefault(spool, trajectory.id)
        wrong = flaw(trajectory, is_scored=spool != "rollouts")
        if wrong:
            self._add("damage", path, f"trajectory {trajectory.id!r}: {wrong}")

    def _listed(self, spool: str) -> list[str]:
        directory = self.run.spool(spool)
        if spool in SPOOLS and directory.is_dir():
            self.report.spools.setdefault(spool, Totals())
        return self._listed_in(directory)

    def _listed_in(self, directory: Path) -> list[str]:
        try:
            return listed(directory)
        except OSError as error:
            self._add("damage", directory, f"cannot be listed: {error.strerror}")
            return []

    def _add(self, severity: Literal["damage", "note"], path: Path, reason: str) -> None:
        shown = str(path.relative_to(self.run.root))
        reason = reason.replace(f"cannot read segment {str(path)!r}: ", "")  # the finding names it already
        self.report.findings.append(Finding(severity=severity, path=shown, reason=reason))


def _why_aside(path: Path) -> str:
    """What is wrong with a segment in quarantine now, or was then."""
    try:
        read_checked(path)
    except SpoolError as error:
        return str(error)
    try:
        reason = path.with_name(f"{path.name}.reason").read_text(errors="replace").strip()
    except OSError:
        reason = "for a reason that was not written down"
    return f"{reason}; it reads well now: move it back to its spool"


def _kept(run: RunDir) -> str:
    """What the recipe says is kept of what was trained on."""
    try:
        return str(read_json(run.recipe)["spool"]["keep"])
    except (OSError, ValueError, KeyError, TypeError):
        return "all"


def _progress(items: Sequence[T], what: str) -> Iterable[T]:
    """A bar beside the answer, where somebody looks on."""
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not items or not console.is_terminal)
