"""What can be wrong with a segment, a trajectory, or a file in a spool. Each check answers in words, or with None.

The inspection behind `verify`; the campaign may run meanwhile.

`hpcrl traj verify`: every segment of every spool, every checksum, and whether all that was consumed is still there.

damage    bytes, names or contents are not as they were written, or something is missing: exit code 1
note      worth knowing, and as it should be: duplicates that readers drop, files that are no segments
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.progress import track
from rich.table import Table
from rich.text import Text

from hpcrl.campaign_dir.paths import SPOOLS, RunDir
from hpcrl.errors import SpoolError
from hpcrl.learn.consumed import ConsumedGroups, read_consumed, sorted_numbers
from hpcrl.spool import listing
from hpcrl.spool.ids import get_group, make_group_id
from hpcrl.spool.listing import listed, parse
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.segment import Segment, read_segment
from hpcrl.system.exit_codes import EXIT_FAILED
from hpcrl.system.files import read_json
from hpcrl.system.terminal import in_line, make_console, print_json, size
from hpcrl.traj.history import SeenIds

LEFTOVER_AGE_S = 3600.0


def read_checked(path: Path) -> Segment:
    """Read a segment with all its checksums and hold it against its name."""
    segment = read_segment(path, verify=True)
    name = parse(path.name)
    if name is None:
        raise SpoolError("a segment, but its name is not one's, so readers pass it over: give it back its name")
    if name.count != len(segment):
        raise SpoolError(f"holds {len(segment)} trajectories, and its name says {name.count}")
    return segment


def flaw(trajectory: Trajectory, *, is_scored: bool) -> str | None:
    """What in a trajectory cannot be, though its bytes are as they were written."""
    if trajectory.group != get_group(trajectory.id):
        return f"its group {trajectory.group!r} does not begin its id"
    place = 0
    for index, turn in enumerate(trajectory.turns):
        if not place <= turn.start <= turn.end <= len(trajectory):
            return f"turn {index + 1} is tokens {turn.start} to {turn.end} of {len(trajectory)}"
        if not trajectory.loss_mask[turn.start : turn.end].all() or trajectory.loss_mask[place : turn.start].any():
            return f"turn {index + 1} does not fit the loss mask"
        place = turn.end
    if not np.isfinite(trajectory.logprobs[trajectory.loss_mask]).all():
        return "log-probabilities that are no numbers"
    if is_scored and trajectory.status in TRAINABLE and trajectory.reward is None:
        return "has no reward, though it could be trained on"
    return None


def unlike(rollouts: Segment, scored: Segment) -> str | None:
    """How two twins differ in what scoring does not change."""
    if len(rollouts) != len(scored):
        return f"{len(rollouts)} trajectories and {len(scored)}"
    for one, other in zip(rollouts, scored, strict=True):
        if one.id != other.id:
            return f"{one.id!r} and {other.id!r} have one place"
        if not all(
            np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name == "logprobs")
            for name in ("token_ids", "logprobs", "versions", "loss_mask")
        ):
            return f"the tokens of {one.id!r}"
    return None


def stray(directory: Path) -> Iterator[tuple[Path, str]]:
    """Files that are no segments: what killed writers left, and what does not belong there."""
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            if path.name.endswith(".tmp") and _age_s(path) > LEFTOVER_AGE_S:
                yield path, "left by a writer that was killed; nothing acknowledged is in it, and it may be removed"
        elif not path.name.endswith(".h5") and path.name != listing.DIRECTORY:
            yield path, "no segment; nothing reads it"


def _age_s(path: Path) -> float:
    """How long ago it was changed; no time at all if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


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
            directory = self.run.spool(spool) / listing.DIRECTORY
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
            group = make_group_id(domain, example)
            reason = f"trained on, and in no spool: {num:,} of the groups of {domain}, such as {group!r}"
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


NUM_SHOWN = 100


def verify(run: RunDir, *, as_json: bool) -> int:
    """Look at everything and print the report; the exit code says whether there is damage."""
    report = Inspection(run).report_of_all()
    if as_json:
        print_json(report)
    else:
        _print(make_console(), report)
    return 0 if report.clean else EXIT_FAILED


def _print(console: Console, report: Report) -> None:
    console.print(_totals(report))
    if report.consumed:
        console.print(Text("consumed  ", style="dim") + Text(report.consumed))
    damages = [finding for finding in report.findings if finding.severity == "damage"]
    notes = [finding for finding in report.findings if finding.severity == "note"]
    for finding in [*damages, *notes[:NUM_SHOWN]]:
        style = "bold red" if finding.severity == "damage" else "yellow"
        console.print()
        whole_lines = not console.is_terminal
        console.print(Text.assemble((finding.severity, style), "  ", in_line(finding.path)), soft_wrap=whole_lines)
        console.print(Padding(Text(in_line(finding.reason)), (0, 0, 0, 2)), soft_wrap=whole_lines)
    if len(notes) > NUM_SHOWN:
        console.print(f"\nand {len(notes) - NUM_SHOWN:,} more notes: --json has them all", style="dim")
    console.print()
    if report.clean:
        console.print(
            Text.assemble(("clean", "bold green"), f"  {in_line(report.campaign)}: nothing is damaged or missing")
        )
    else:
        found = "1 finding" if len(damages) == 1 else f"{len(damages):,} findings"
        console.print(Text.assemble(("damage", "bold red"), f"  {in_line(report.campaign)}: {found}"))


def _totals(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("spool", no_wrap=True)
    for heading in ("segments", "trajectories", "size", "duplicates", "damaged"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, totals in report.spools.items():
        table.add_row(
            Text(name),
            f"{totals.num_segments:,}",
            f"{totals.num_trajectories:,}",
            size(totals.num_bytes),
            f"{totals.num_duplicates:,}",
            Text(f"{totals.num_damaged:,}", style="bold red" if totals.num_damaged else ""),
        )
    return table
