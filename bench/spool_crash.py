"""What crashes cost: killed processes, lost power, broken disks: `python -m bench.spool_crash`.

Every bar is zero: acknowledged trajectories lost, trained on twice (judged by the ids in committed checkpoints),
files that a reader could not read. Everything is seeded; only the moment of a kill is the machine's.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from bench.crash import faults, kills, power
from bench.crash.campaign import Losses
from bench.figures import Figure, main

_KILLS_PER_CAMPAIGN = 51
_LOSSES_PER_RUN = 20
_SEED = 20260101


def measure(full: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-", ignore_cleanup_errors=True) as scratch:
        root = Path(scratch)
        return [
            *_kill_figures(root / "kills", num_campaigns=22 if full else 2),
            *_power_figures(root / "power", num_runs=60 if full else 10),
            *_fault_figures(root / "faults"),
        ]


def _kill_figures(root: Path, *, num_campaigns: int) -> list[Figure]:
    losses, acknowledged = Losses(), 0
    for number in range(num_campaigns):
        directory = root / str(number)
        directory.mkdir(parents=True)
        lost, num = kills.campaign(directory, num_kills=_KILLS_PER_CAMPAIGN, seed=_SEED + 1000 * number)
        losses.add(lost)
        acknowledged += num
        shutil.rmtree(directory)
    num_kills = num_campaigns * _KILLS_PER_CAMPAIGN
    return [_count("trajectories acknowledged between kills", acknowledged), *_zeros(f"{num_kills:,} SIGKILLs", losses)]


def _power_figures(root: Path, *, num_runs: int) -> list[Figure]:
    losses = Losses()
    for number in range(num_runs):
        losses.add(power.run_power_losses(root / str(number), num_losses=_LOSSES_PER_RUN, seed=_SEED + number))
        shutil.rmtree(root / str(number))
    return _zeros(f"{num_runs * _LOSSES_PER_RUN:,} power losses", losses)


def _fault_figures(root: Path) -> list[Figure]:
    figures = []
    for kind, scenes in faults.scenes().items():
        wrong = []
        for name, scene in scenes.items():
            directory = root / kind / name / "spool"
            directory.parent.mkdir(parents=True)
            wrong += [f"{kind}, {name}: {what}" for what in scene(directory)]
        print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
        figures.append(_zero(f"{kind} ({len(scenes)} ways): lost, doubled, unreadable or unclear", len(wrong)))
    return figures


def _zeros(what: str, losses: Losses) -> list[Figure]:
    for line in [*losses.lost, *losses.twice, *losses.unreadable][:20]:
        print(f"{what}: {line}", file=sys.stderr)
    return [
        _zero(f"{what}: acknowledged and lost", len(losses.lost)),
        _zero(f"{what}: trained on twice", len(losses.twice)),
        _zero(f"{what}: files that a reader could not read", len(losses.unreadable)),
    ]


def _zero(name: str, value: int) -> Figure:
    return Figure(name=name, value=value, unit="", bar=0, better="lower")


def _count(name: str, value: int) -> Figure:
    return Figure(name=name, value=value, unit="")


if __name__ == "__main__":
    sys.exit(main("spool_crash", measure))
