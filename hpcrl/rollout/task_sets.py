"""The rows of the domains with `tasks`: which one a task is, and how far an env worker has come.

    TaskSets         the task sets of one env worker
    SAVE_INTERVAL_S  the interval at which progress is written

Progress is written often, not with every row, and a row is used up when its group is durable: after a kill a few rows
may be used again in the same epoch, none is left out.
"""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import Recipe
from hpcrl.envs.base import TaskFields
from hpcrl.envs.task_set import TaskRows
from hpcrl.errors import EnvFault
from hpcrl.rollout.tasks import AgentTask, RowOrder, RowProgress
from hpcrl.spool.ids import get_group, is_held_out, strip_held_out
from hpcrl.system.files import publish_file

SAVE_INTERVAL_S = 1.0


class TaskSets:
    """The task sets of one env worker, in the campaign's `directory`; `progress` is the worker's own file."""

    def __init__(self, recipe: Recipe, worker: EnvWorkerId, *, directory: Path, progress: Path) -> None:
        self._configs = {
            name: domain.task_set for name, domain in recipe.domains.items() if domain.task_set is not None
        }
        self._recipe_seed = recipe.seed
        self._worker = worker
        self._train = {name: TaskRows(directory, domain=name, split="train") for name in self._configs}
        self._held_out = {name: TaskRows(directory, domain=name, split="held-out") for name in self._configs}
        self._path = progress
        self._progress = {name: RowProgress() for name in self._configs} | _load_progress(progress)
        self._unsealed: dict[str, tuple[AgentTask, set[str]]] = {}
        """The tasks of released groups, with their episodes that are not durable yet, by group."""
        self._saved: dict[str, Any] = {}
        self._saved_at = float("-inf")

    def is_ended(self, domain: str) -> bool:
        """Return whether this worker has used all its rows of a domain as often as the recipe asks for."""
        config = self._configs.get(domain)
        if config is None or not config.epochs:
            return False
        try:
            num_places = config.epochs * len(self._train[domain])
        except EnvFault:  # each of its episodes ends with this fault
            return False
        return self._progress[domain].peek_place(self._worker) >= num_places

    def take_place(self, domain: str) -> int | None:
        """Take the place of the next row; None for a domain whose tasks are seeds."""
        return self._progress[domain].take_place(self._worker) if domain in self._configs else None

    def release_task(self, task: AgentTask, episodes: Iterable[str]) -> None:
        """Use up the row of a task once these trajectories of its group are durable."""
        if task.place is not None:
            self._unsealed[task.group] = (task, set(episodes))

    def record_sealed(self, episodes: Iterable[str]) -> None:
        """Record that the trajectories of these episodes are durable."""
        for episode in episodes:
            group = get_group(episode)
            if group in self._unsealed:
                task, missing = self._unsealed[group]
                missing.discard(episode)
                if not missing:
                    del self._unsealed[group]
                    self.finish_task(task)

    def finish_task(self, task: AgentTask) -> None:
        """Record that the group of a task is durable, or lost for good."""
        if task.place is not None:
            self._progress[task.domain].finish_place(task.place)

    def return_task(self, task: AgentTask) -> None:
        """Use the row of a task again later, if its group was ended before it could finish; once for each group."""
        if task.place is not None and task.group not in self._unsealed:
            self._progress[task.domain].return_place(task.place)

    def locate_row(self, task: AgentTask) -> tuple[int, int] | None:
        """Return the epoch and the row of a task, counted in its split; None for a task that is a seed."""
        domain = strip_held_out(task.domain)
        config = self._configs.get(domain)
        if config is None or task.place is None:
            return None
        rows = self._find_rows(task)
        if not len(rows):
            raise EnvFault(f"domains.{domain}.tasks has no rows for {task.domain}")
        is_shuffled = config.shuffle and not is_held_out(task.domain)
        order = RowOrder(num_rows=len(rows), shuffle_key=f"{self._recipe_seed}/{domain}" if is_shuffled else None)
        return order.find_epoch(task.place), order.find_row(task.place)

    def read_fields(self, task: AgentTask) -> TaskFields | None:
        """Return the fields of the row of a task; None for a task that is a seed. Raises EnvFault."""
        place = self.locate_row(task)
        return None if place is None else self._find_rows(task).read_row(place[1])

    def save_due(self, *, now: float) -> None:
        """Write the progress if it has changed, not too often."""
        if now - self._saved_at >= SAVE_INTERVAL_S:
            self._saved_at = now
            self.save()

    def save(self) -> None:
        """Write the progress if it has changed."""
        current = {name: progress.to_json() for name, progress in self._progress.items()}
        if current != self._saved:
            with contextlib.suppress(OSError):  # a disk that is full for a while must not end the worker
                publish_file(self._path, json.dumps(current))
                self._saved = current

    def _find_rows(self, task: AgentTask) -> TaskRows:
        rows = self._held_out if is_held_out(task.domain) else self._train
        return rows[strip_held_out(task.domain)]


def _load_progress(path: Path) -> dict[str, RowProgress]:
    try:
        saved = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return {name: RowProgress.from_json(one) for name, one in saved.items()}
