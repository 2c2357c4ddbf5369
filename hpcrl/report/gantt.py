"""Make the rows of the Gantt chart of workers: all of them, in a bounded number of bytes. Pure.

build_gantt    the rows
MAX_ROWS, MAX_BAR_PARTS, NUM_PLACES    the bounds, and how finely time is drawn

A worker has one row for all jobs. Where there are too many, the workers of a role on a node share one, or all those of
its role do.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from hpcrl.campaign_dir.paths import drop_job
from hpcrl.monitor.workers import split_numbers
from hpcrl.report.figures import WorkerFigures
from hpcrl.report.history import WorkerSpan

MAX_ROWS = 1500
MAX_BAR_PARTS = 12_000
"""The parts of all bars of a page: gaps are closed, the shortest first, until there are fewer."""
NUM_PLACES = 1000
"""The places of a bar that can be distinguished."""
_MIN_PLACES = 4


def build_gantt(spans: Sequence[WorkerSpan], *, share: float = 1.0) -> list[WorkerFigures]:
    """Return the rows by role and number, for a page of which this chart may use a share of what it may at most."""
    if not spans:
        return []
    low, high = min(span.start for span in spans), max(span.end for span in spans)
    rows = _group_spans(spans, most=max(int(MAX_ROWS * share), 1))
    num_places = NUM_PLACES
    while True:
        width_s = max(high - low, 1e-9) / num_places
        figures = [_make_row(name, row, width_s=width_s) for name, row in rows]
        num_parts = sum(len(one.times) + len(one.failures) for one in figures)
        if num_parts <= MAX_BAR_PARTS * share or num_places <= _MIN_PLACES:
            return figures
        num_places //= 2


def _group_spans(spans: Sequence[WorkerSpan], *, most: int) -> list[tuple[str, list[WorkerSpan]]]:
    """Return the spans of each row, with the worker's name if it is one: the role with most rows is joined first."""
    by_role: dict[str, list[WorkerSpan]] = {}
    for span in spans:
        by_role.setdefault(span.role, []).append(span)
    rows = {role: _divide_spans(own, _name_worker) for role, own in by_role.items()}
    ways = {role: [_name_node, _name_role] for role in by_role}
    while sum(map(len, rows.values())) > most and (open_roles := [role for role in rows if ways[role]]):
        role = max(open_roles, key=lambda role: len(rows[role]))
        rows[role] = _divide_spans(by_role[role], ways[role].pop(0))
    is_single = {role: len(ways[role]) == 2 for role in rows}
    return [
        (name if is_single[role] else "", rows[role][name])
        for role in sorted(rows)
        for name in sorted(rows[role], key=split_numbers)
    ]


def _divide_spans(spans: Sequence[WorkerSpan], name_row: Callable[[WorkerSpan], str]) -> dict[str, list[WorkerSpan]]:
    rows: dict[str, list[WorkerSpan]] = {}
    for span in spans:
        rows.setdefault(name_row(span), []).append(span)
    return rows


def _make_row(name: str, spans: Sequence[WorkerSpan], *, width_s: float) -> WorkerFigures:
    nodes = sorted({span.node for span in spans if span.node}, key=split_numbers)
    num = len({_name_worker(span) for span in spans})
    failed_at = sorted(span.end for span in spans if span.ending == "failed")
    return WorkerFigures(
        worker=name or f"{num:,} workers",
        role=spans[0].role,
        node=nodes[0] if len(nodes) == 1 else f"{len(nodes):,} nodes" if nodes else "",
        num=num,
        times=list(_join_times(sorted((span.start, span.end) for span in spans), width_s)),
        failures=list(_thin_times(failed_at, width_s)),
        num_failures=len(failed_at),
        up_s=sum(span.end - span.start for span in spans),
    )


def _join_times(times: Sequence[tuple[float, float]], gap_s: float) -> Iterator[tuple[float, float]]:
    """Yield times in which one at least was up; a gap that is not longer than `gap_s` is none."""
    start, end = times[0]
    for later_start, later_end in itertools.islice(times, 1, None):
        if later_start - end > gap_s:
            yield start, end
            start, end = later_start, later_end
        end = max(end, later_end)
    yield start, end


def _thin_times(times: Sequence[float], gap_s: float) -> Iterator[float]:
    last = float("-inf")
    for time in times:
        if time - last > gap_s:
            yield time
            last = time


def _name_worker(span: WorkerSpan) -> str:
    return drop_job(span.worker)


def _name_node(span: WorkerSpan) -> str:
    return span.node


def _name_role(span: WorkerSpan) -> str:
    return span.role
