"""A campaign as it is seen from outside: its steps, its versions, its checkpoints, its acknowledged trajectories.

CampaignWatch   what was seen so far, and what is wrong
MAX_LISTED      how many trajectories a violation names
"""

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

from hpcrl.campaign_dir.checkpoints import list_committed
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import StepFinished, VersionPublished
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir, SpoolName
from hpcrl.errors import SpoolError
from hpcrl.spool.listing import list_segments
from hpcrl.spool.segment import read_segment
from hpcrl.trainers.checkpoint import find_damage

MAX_LISTED = 3


class CampaignWatch:
    """What was seen of a campaign whose steps consume `groups_per_step` whole groups each."""

    def __init__(self, campaign: CampaignDir, *, groups_per_step: int) -> None:
        self.campaign = campaign
        self.acknowledged: set[str] = set()
        self.num_steps = self.last_step = 0
        self.last_job = 0
        """The last job that has made a step."""
        self.published: list[tuple[float, int]] = []
        self._groups_per_step = groups_per_step
        self._events = EventReader(campaign.events)
        self._ids: dict[Path, frozenset[str]] = {}
        self._checked: set[str] = set()
        self._damage: list[str] = []

    def look(self) -> int:
        """Read new events and acknowledged segments; return the number of steps made so far."""
        for event in self._events.poll():
            match event:
                case StepFinished():
                    self.num_steps += 1
                    self.last_step, self.last_job = max(self.last_step, event.step), max(self.last_job, event.job)
                case VersionPublished():
                    self.published.append((event.time, event.version))
        self.acknowledged |= self._list_ids("rollouts")
        return self.num_steps

    def find_violations(self) -> list[str]:
        """Return which of the invariants do not hold."""
        self.look()
        return [*self._check_versions(), *self._check_checkpoints(), *self._check_spools()]

    def count_quarantined(self) -> int:
        return len(list(self.campaign.root.glob("spools/*/quarantine/*.h5")))

    def _check_versions(self) -> list[str]:
        versions = [version for _, version in sorted(self.published)]
        return [f"version {b} was published after {a}" for a, b in itertools.pairwise(versions) if b <= a]

    def _check_checkpoints(self) -> list[str]:
        committed = list_committed(self.campaign.checkpoints)
        for path in committed:
            if path.name not in self._checked:
                with contextlib.suppress(FileNotFoundError):  # a newer one has replaced it just now
                    self._damage += self._check_checkpoint(path)
                    self._checked.add(path.name)
        return self._damage

    def _check_checkpoint(self, path: Path) -> list[str]:
        reason = find_damage(path)
        if reason is not None:
            return [f"{path.name} is damaged: {reason}"] if path.exists() else []
        runs: dict[str, Any] = json.loads((path / "consumed.json").read_bytes())["runs"]
        num, step = sum(end - start for pairs in runs.values() for start, end in pairs), int(path.name.split("-")[-1])
        if num != step * self._groups_per_step:
            return [f"{path.name} has consumed {num} groups: some were lost, or trained on twice"]
        return []

    def _check_spools(self) -> list[str]:
        """A segment on its way to the archive may be in none of the listings: what is missing is looked for again."""
        for _ in range(2):
            kept = [self._list_ids(name) for name in SPOOLS]
            lost = self.acknowledged.difference(*kept)
        found = [f"lost: {', '.join(sorted(lost)[:MAX_LISTED])} and others ({len(lost)})"] if lost else []
        num = self.count_quarantined()
        return [*found, *([f"{num} files are in quarantine"] if num else [])]

    def _list_ids(self, spool: SpoolName) -> frozenset[str]:
        """Return the ids of the trajectories in a spool."""
        directory = self.campaign.spool(spool)
        if not directory.is_dir():
            return frozenset()
        for name in list_segments(directory):
            path = directory / name
            if path not in self._ids:
                with contextlib.suppress(SpoolError):  # archived since it was listed: its trajectories are read there
                    self._ids[path] = frozenset(one.id for one in read_segment(path))
        present = [self._ids[path] for name in list_segments(directory) if (path := directory / name) in self._ids]
        return frozenset().union(*present)
