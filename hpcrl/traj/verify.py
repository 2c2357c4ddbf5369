"""Verify every segment of every spool, every checksum, and that all consumed groups still exist: `hpcrl traj verify`.

    verify_campaign         verifies a campaign, which may be running, and prints the report
    SpoolVerifier           collects the report
    VerifyReport, VerifyFinding, SpoolTotals    the report and its parts
    read_verified_segment, record_error, twin_difference, stray_files    the single checks

The severities of findings:

    "damage"  bytes, names or contents are not as they were written, or something is missing: exit code 1
    "note"    worth knowing, but fine: duplicates that readers drop, files that are not segments
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from hpcrl.campaign_dir.checkpoints import find_missing_file, list_committed
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import StepFinished
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir, SpoolName
from hpcrl.errors import SpoolError
from hpcrl.learn.consumed import ConsumedGroups, read_consumed_groups, sort_group_numbers
from hpcrl.monitor.job_state import describe_lost_steps, read_heartbeats, read_jobs
from hpcrl.monitor.screen_parts import FittedTable
from hpcrl.slurm.next_job import find_last_step
from hpcrl.spool import listing
from hpcrl.spool.ids import get_group, make_group_id
from hpcrl.spool.listing import list_segments, parse_segment_name
from hpcrl.spool.record import TRAINABLE, Trajectory
from hpcrl.spool.rows import list_row_turns, list_spans
from hpcrl.spool.segment import Segment, read_segment
from hpcrl.system.exit_codes import EXIT_FAILED
from hpcrl.system.files import is_directory, read_json
from hpcrl.system.terminal import escape_to_one_line, format_bytes, make_console, print_json, track_progress
from hpcrl.traj.history import SeenIds

LIVE_SPOOLS: tuple[SpoolName, ...] = ("rollouts", "scored")
MIN_LEFTOVER_AGE_S = 3600.0


def read_verified_segment(path: Path) -> Segment:
    """Read a segment, verify all its checksums, and compare it with its name."""
    segment = read_segment(path, verify=True)
    name = parse_segment_name(path.name)
    if name is None:
        raise SpoolError("a segment, but not by its name, so readers skip it: restore its name")
    if name.count != len(segment):
        raise SpoolError(f"has {len(segment)} trajectories, but {name.count} by its name")
    return segment


def record_error(trajectory: Trajectory, *, is_scored: bool) -> str | None:
    """Return what is impossible in a trajectory, though its bytes are as they were written; None if nothing is."""
    if trajectory.group != get_group(trajectory.id):
        return f"its id does not start with its group {trajectory.group!r}"
    if error := _row_error(trajectory) or _turn_error(trajectory):
        return error
    if not np.isfinite(trajectory.logprobs[trajectory.loss_mask]).all():
        return "has log-probabilities that are not finite numbers"
    taught = trajectory.teacher_logprobs
    if taught is not None and trajectory.status in TRAINABLE and not np.isfinite(taught[trajectory.loss_mask]).all():
        return "has trained tokens without a log-probability of the teacher"
    if is_scored and trajectory.status in TRAINABLE and trajectory.reward is None:
        return "has no reward, though it can be trained on"
    return None


def _row_error(trajectory: Trajectory) -> str | None:
    lengths: list[int] = []
    for number, span in enumerate(list_spans(trajectory)):
        available = lengths[span.parent] if 0 <= span.parent < number else 0
        if span.end < span.start or not 0 <= span.shares <= available or span.parent >= number:
            return f"conversation {number + 1} is tokens {span.start} to {span.end}, {span.shares} of {span.parent + 1}"
        lengths.append(span.num_tokens)
    end = trajectory.rows[-1].end if trajectory.rows else len(trajectory)
    return f"its conversations end at token {end} of {len(trajectory)}" if end != len(trajectory) else None


def _turn_error(trajectory: Trajectory) -> str | None:
    for number, turn in enumerate(trajectory.turns):
        if not 0 <= turn.row < max(1, len(trajectory.rows)):
            return f"turn {number + 1} is in conversation {turn.row + 1} of {max(1, len(trajectory.rows))}"
        if not 0 <= turn.start <= turn.end <= len(trajectory):
            return f"turn {number + 1} is tokens {turn.start} to {turn.end} of {len(trajectory)}"
    for span, numbers in zip(list_spans(trajectory), list_row_turns(trajectory), strict=True):
        position = span.start
        for number in numbers:
            turn = trajectory.turns[number]
            if not position <= turn.start <= turn.end <= span.end:
                return f"turn {number + 1} is tokens {turn.start} to {turn.end}, which are not its alone"
            num_trained = 0 if turn.masked else turn.end - turn.start - turn.num_forced
            if np.count_nonzero(trajectory.loss_mask[turn.start : turn.end]) != num_trained:
                return f"turn {number + 1} does not fit the loss mask"
            if trajectory.loss_mask[position : turn.start].any():
                return f"turn {number + 1} does not fit the loss mask"
            position = turn.end
    return None


def twin_difference(rollouts: Segment, scored: Segment) -> str | None:
    """Return how two twins differ in what scoring does not change; None if they do not."""
    if len(rollouts) != len(scored):
        return f"{len(rollouts)} trajectories and {len(scored)}"
    for one, other in zip(rollouts, scored, strict=True):
        if one.id != other.id:
            return f"{one.id!r} and {other.id!r} have the same position"
        if not all(
            np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name == "logprobs")
            for name in ("token_ids", "logprobs", "versions", "loss_mask")
        ):
            return f"the tokens of {one.id!r}"
    return None


def stray_files(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield files that are not segments: those that killed writers left, and foreign ones."""
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            if path.name.endswith(".tmp") and _file_age_s(path) > MIN_LEFTOVER_AGE_S:
                yield path, "left by a writer that was killed; nothing acknowledged is in it: it can be removed"
        elif not path.name.endswith(".h5") and path.name != listing.QUARANTINE_DIRECTORY:
            yield path, "not a segment; no process reads it"


def _file_age_s(path: Path) -> float:
    """Return the seconds since a file was changed; 0 if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


FindingSeverity = Literal["damage", "note"]


class VerifyFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of the verification."""

    severity: FindingSeverity
    path: str
    """The path below the campaign's directory."""
    reason: str


class SpoolTotals(msgspec.Struct, kw_only=True):
    """The findings in one spool, in `traj verify`: its size, and how much of it is damaged."""

    num_segments: int = 0
    num_trajectories: int = 0
    num_bytes: int = 0
    num_damaged: int = 0
    num_duplicates: int = 0
    """The number of further records of an episode; readers drop them."""


class VerifyReport(msgspec.Struct, kw_only=True):
    """The report of `verify_campaign`."""

    campaign: str
    clean: bool = True
    spools: dict[str, SpoolTotals] = {}
    consumed: str = ""
    """A sentence about the groups that were trained on."""
    findings: list[VerifyFinding] = []


class SpoolVerifier:
    """The verification of a campaign; it fills a report."""

    def __init__(self, campaign: CampaignDir) -> None:
        self.campaign = campaign
        self.report = VerifyReport(campaign=campaign.name)
        self._seen: dict[tuple[str, bool], SeenIds] = {}
        self._duplicate_examples: dict[str, str] = {}
        self._some_vanished = False

    def verify_all(self) -> VerifyReport:
        """Verify everything and return the report."""
        consumed = read_consumed_groups(self.campaign.checkpoints)  # first: its groups are in a spool by now
        self._check_description()
        self._check_events()
        self._check_directories()
        self._verify_live_spools()
        self._verify_archive()
        self._report_quarantined()
        self._report_stray_files()
        self._report_duplicates()
        self._check_consumed(consumed)
        self._check_checkpoints()
        self.report.clean = all(finding.severity == "note" for finding in self.report.findings)
        return self.report

    def _check_description(self) -> None:
        """Report records of the campaign that cannot be read."""
        for path in (self.campaign.manifest, self.campaign.recipe, self.campaign.site, self.campaign.plan):
            try:
                read_json(path)
            except (OSError, ValueError) as error:
                self._add_finding("damage", path, f"cannot be read: {error}")

    def _check_events(self) -> None:
        """Report events and records of jobs that are damaged, or missing where a job has left something else."""
        saved_step = find_last_step(self.campaign) if self._has_ended() else 0  # first: its steps are in events by now
        reader = EventReader(self.campaign.events)
        last_step = max((event.step for event in reader.poll() if isinstance(event, StepFinished)), default=0)
        unreadable = [f"{name} cannot be read: {why}" for name, why in reader.unreadable.items()]
        for reason in [*unreadable, *reader.describe_damage()]:
            self._add_finding("damage", self.campaign.events, reason)
        lost_steps = describe_lost_steps(saved_step=saved_step, last_step=last_step)
        if lost_steps and reader.offsets and not unreadable:
            self._add_finding("damage", self.campaign.events, lost_steps)
        for path in (self.campaign.events, self.campaign.jobs) if self.campaign.has_results() else ():
            if not (is_directory(path) and any(path.iterdir())):
                self._add_finding("damage", path, "is missing or empty, though a job has left results")

    def _has_ended(self) -> bool:
        """Return whether nothing writes events any more: each job has an outcome, or no process has a heartbeat."""
        jobs = read_jobs(self.campaign)
        if jobs and all(job.outcome is not None for job in jobs):
            return True
        beats = read_heartbeats(self.campaign.events)
        return max(beats.values(), default=0.0) < time.time() - MIN_LEFTOVER_AGE_S

    def _check_directories(self) -> None:
        """Report a spool that is missing while the other is there: they are made together."""
        if lost := listing.describe_lost_spools(self.campaign):
            self._add_finding("damage", self.campaign.spools, lost)
        present = [self.campaign.spool(name).is_dir() for name in LIVE_SPOOLS]
        for name, is_present in zip(LIVE_SPOOLS, present, strict=True):
            if any(present) and not is_present:
                self._add_finding("note", self.campaign.spool(name), "is missing")

    def _verify_live_spools(self) -> None:
        """Verify both live spools, twin by twin."""
        names = {spool: set(self._list_spool(spool)) for spool in LIVE_SPOOLS}
        for name in track_progress(sorted(names["rollouts"] | names["scored"]), "live segments"):
            rollouts = self._verify_segment("rollouts", name) if name in names["rollouts"] else None
            scored = self._verify_segment("scored", name, twin=rollouts) if name in names["scored"] else None
            difference = twin_difference(rollouts, scored) if rollouts is not None and scored is not None else None
            if difference:
                self._add_finding(
                    "damage", self.campaign.spool("scored") / name, f"differs from its twin in rollouts: {difference}"
                )

    def _verify_archive(self) -> None:
        """Verify the archive; list it again while segments vanish, as their contents are in others then."""
        done: set[str] = set()
        self._some_vanished = True
        while self._some_vanished:
            self._some_vanished = False
            names = [name for name in self._list_spool("archive") if name not in done]
            done.update(names)
            for name in track_progress(names, "archive"):
                self._verify_segment("archive", name)

    def _report_quarantined(self) -> None:
        """Report quarantined segments: damage until the segment exists again, made from its twin."""
        for spool in SPOOLS:
            directory = self.campaign.spool(spool) / listing.QUARANTINE_DIRECTORY
            for name in self._list_directory(directory):
                if (self.campaign.spool(spool) / name).exists():
                    self._add_finding("note", directory / name, "was quarantined as damaged, and was made again since")
                else:
                    self._add_finding(
                        "damage", directory / name, f"was quarantined: {_quarantine_reason(directory / name)}"
                    )

    def _report_stray_files(self) -> None:
        for spool in SPOOLS:
            try:
                for path, reason in stray_files(self.campaign.spool(spool)):
                    self._add_finding("note", path, reason)
            except OSError:  # no such spool yet, or reported when it was listed
                continue

    def _report_duplicates(self) -> None:
        for spool, totals in self.report.spools.items():
            if totals.num_duplicates:
                example = (
                    f"{totals.num_duplicates:,} episodes are stored twice, such as {self._duplicate_examples[spool]!r}"
                )
                self._add_finding("note", self.campaign.spool(spool), f"{example}; readers deliver each once")

    def _check_consumed(self, consumed: ConsumedGroups) -> None:
        """Check that every group that was trained on still exists, if the recipe keeps everything."""
        for path, reason in consumed.problems:
            self._add_finding("damage", path, reason)
        if not consumed.checkpoint:
            self.report.consumed = "no checkpoint"
            return
        keep_setting = _read_keep_setting(self.campaign)
        summary = f"{consumed.num_groups:,} groups, by checkpoint {consumed.checkpoint}"
        if keep_setting != "all":
            self.report.consumed = f"{summary}; the recipe keeps {keep_setting!r} of them, so none has to exist"
            return
        present = sort_group_numbers(group for seen in self._seen.values() for group in seen.groups())
        num_missing = 0
        for domain, num, example in consumed.missing_groups(present):
            num_missing += num
            group = make_group_id(domain, example)
            reason = f"trained on, but in no spool: {num:,} of the groups of {domain}, such as {group!r}"
            self._add_finding("damage", self.campaign.checkpoints / consumed.checkpoint, reason)
        self.report.consumed = f"{summary}; {f'{num_missing:,} missing' if num_missing else 'all present'}"

    def _check_checkpoints(self) -> None:
        """Check that the files of checkpoints have their sizes; training checks every byte, which takes long."""
        for path in list_committed(self.campaign.checkpoints):
            reason = find_missing_file(path)
            if reason is not None and path.exists():  # it was not removed meanwhile
                self._add_finding("damage", path, reason)

    def _verify_segment(self, spool: str, name: str, *, twin: Segment | None = None) -> Segment | None:
        """Read one segment and count it; return None if it is damaged or gone."""
        path = self.campaign.spool(spool) / name
        totals = self.report.spools[spool]
        try:
            segment = read_verified_segment(path)
            num_bytes = path.stat().st_size
            trajectories = list(segment)
        except (OSError, SpoolError) as error:
            if isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError):
                self._some_vanished = True
                return None
            totals.num_segments += 1
            totals.num_damaged += 1
            hint = "; its twin in rollouts is intact: remove this one and it is scored again" if twin else ""
            self._add_finding("damage", path, f"{error}{hint}")
            return None
        totals.num_segments += 1
        totals.num_bytes += num_bytes
        for trajectory in trajectories:
            self._verify_trajectory(spool, path, trajectory)
        return segment

    def _verify_trajectory(self, spool: str, path: Path, trajectory: Trajectory) -> None:
        self.report.spools[spool].num_trajectories += 1
        seen = self._seen.setdefault((spool, trajectory.status in TRAINABLE), SeenIds())
        if not seen.add(trajectory.id):
            self.report.spools[spool].num_duplicates += 1
            self._duplicate_examples.setdefault(spool, trajectory.id)
        error = record_error(trajectory, is_scored=spool != "rollouts")
        if error:
            self._add_finding("damage", path, f"trajectory {trajectory.id!r}: {error}")

    def _list_spool(self, spool: str) -> list[str]:
        directory = self.campaign.spool(spool)
        if spool in SPOOLS and directory.is_dir():
            self.report.spools.setdefault(spool, SpoolTotals())
        return self._list_directory(directory)

    def _list_directory(self, directory: Path) -> list[str]:
        try:
            return list_segments(directory)
        except OSError as error:
            self._add_finding("damage", directory, f"cannot be listed: {error.strerror}")
            return []

    def _add_finding(self, severity: FindingSeverity, path: Path, reason: str) -> None:
        shown = str(path.relative_to(self.campaign.root))
        reason = reason.replace(f"cannot read segment {str(path)!r}: ", "")  # the finding has the path
        self.report.findings.append(VerifyFinding(severity=severity, path=shown, reason=reason))


def _quarantine_reason(path: Path) -> str:
    """Return what is wrong with a quarantined segment now, or was then."""
    try:
        read_verified_segment(path)
    except SpoolError as error:
        return str(error)
    try:
        reason = path.with_name(f"{path.name}.reason").read_text(errors="replace").strip()
    except OSError:
        reason = "the reason was not stored"
    return f"{reason}; it can be read now: move it back to its spool"


def _read_keep_setting(campaign: CampaignDir) -> str:
    """Return the `spool.keep` setting of the recipe."""
    try:
        return str(read_json(campaign.recipe)["spool"]["keep"])
    except (OSError, ValueError, KeyError, TypeError):
        return "all"


MAX_SHOWN_NOTES = 100


def verify_campaign(campaign: CampaignDir, *, as_json: bool) -> int:
    """Verify a campaign and print the report; the exit code is 0 without damage."""
    report = SpoolVerifier(campaign).verify_all()
    if as_json:
        print_json(report)
    else:
        _print_report(make_console(), report)
    return 0 if report.clean else EXIT_FAILED


def _print_report(console: Console, report: VerifyReport) -> None:
    console.print(_build_totals_table(report))
    if report.consumed:
        console.print(Text("consumed  ", style="dim") + Text(report.consumed))
    damages = [finding for finding in report.findings if finding.severity == "damage"]
    notes = [finding for finding in report.findings if finding.severity == "note"]
    for finding in [*damages, *notes[:MAX_SHOWN_NOTES]]:
        style = "bold red" if finding.severity == "damage" else "yellow"
        console.print()
        whole_lines = not console.is_terminal
        console.print(
            Text.assemble((finding.severity, style), "  ", escape_to_one_line(finding.path)), soft_wrap=whole_lines
        )
        console.print(Padding(Text(escape_to_one_line(finding.reason)), (0, 0, 0, 2)), soft_wrap=whole_lines)
    if len(notes) > MAX_SHOWN_NOTES:
        console.print(f"\nand {len(notes) - MAX_SHOWN_NOTES:,} more notes: --json has them all", style="dim")
    console.print()
    if report.clean:
        console.print(
            Text.assemble(
                ("clean", "bold green"),
                f"  {escape_to_one_line(report.campaign)}: nothing is damaged{'' if notes else ' or missing'}",
            )
        )
    else:
        found = "1 finding" if len(damages) == 1 else f"{len(damages):,} findings"
        console.print(Text.assemble(("damage", "bold red"), f"  {escape_to_one_line(report.campaign)}: {found}"))


def _build_totals_table(report: VerifyReport) -> FittedTable:
    rows = [
        {
            "spool": name,
            "segments": f"{totals.num_segments:,}",
            "trajectories": f"{totals.num_trajectories:,}",
            "size": format_bytes(totals.num_bytes),
            "duplicates": f"{totals.num_duplicates:,}",
            "damaged": f"{totals.num_damaged:,}",
        }
        for name, totals in report.spools.items()
    ]
    numbers = ("segments", "trajectories", "size", "duplicates", "damaged")
    styles = [{"damaged": "bold red" if totals.num_damaged else ""} for totals in report.spools.values()]
    return FittedTable(rows, texts=("spool",), numbers=numbers, styles=styles)
