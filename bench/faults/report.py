"""The faults of many runs in one file, and their figures.

ChaosRun        the faults of one campaign
add_run         append a run to a report
read_runs       read a report
make_figures    the figures of runs
"""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.strikes import ChaosFault
from bench.figures import Figure
from hpcrl.system.files import publish_json

_FREED_MEDIAN_S, _FREED_WORST_S = 30.0, 120.0


@dataclass
class ChaosRun:
    """The faults of one campaign, and what it has cost."""

    place: str
    seed: int
    commit: str = ""
    faults: list[ChaosFault] = field(default_factory=list)
    num_acknowledged: int = 0
    num_steps: int = 0
    violations: list[str] = field(default_factory=list)
    """Those that were seen at the end."""


def add_run(path: Path, run: ChaosRun) -> list[ChaosRun]:
    """Append a run to a report; return all of it."""
    runs = [*read_runs(path), run]
    publish_json(path, [asdict(one) for one in runs])
    return runs


def read_runs(path: Path) -> list[ChaosRun]:
    """Return the runs of a report, none before the first."""
    tables: list[dict[str, Any]] = json.loads(path.read_bytes()) if path.exists() else []
    return [ChaosRun(**table | {"faults": [ChaosFault(**one) for one in table["faults"]]}) for table in tables]


def make_figures(runs: Sequence[ChaosRun]) -> list[Figure]:
    """Return the figures; a crash is a fault that ended its job, whatever the job still did."""
    faults = [fault for run in runs for fault in run.faults]
    recovered = [fault.recovered_s for fault in faults if fault.recovered_s is not None]
    freed = [fault.freed_s for fault in faults if fault.freed_s is not None] or [0.0]
    broken = sum(len(fault.violations) for fault in faults) + sum(len(run.violations) for run in runs)
    places = Counter(run.place for run in runs for _ in run.faults)
    return [
        *(Figure(name=f"faults made on {place}", value=num, unit="") for place, num in sorted(places.items())),
        Figure(name="jobs that they ended", value=sum(fault.ended_job for fault in faults), unit=""),
        Figure(name="faults after which steps continued", value=len(recovered), unit="", bar=len(faults)),
        Figure(name="steps made", value=sum(run.num_steps for run in runs), unit=""),
        Figure(name="acknowledged trajectories", value=sum(run.num_acknowledged for run in runs), unit=""),
        Figure(name="invariants that did not hold", value=broken, unit="", bar=0, better="lower"),
        Figure(name="time to the next step, median", value=statistics.median(recovered or [0.0]), unit="s"),
        Figure(
            name="nodes freed after a crash, median s / 30 s",
            value=statistics.median(freed) / _FREED_MEDIAN_S,
            bar=1.0,
            better="lower",
        ),
        Figure(
            name="nodes freed after a crash, worst s / 120 s",
            value=max(freed) / _FREED_WORST_S,
            bar=1.0,
            better="lower",
        ),
    ]
