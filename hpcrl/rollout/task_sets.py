"""The rows of the domains with `tasks`: which one a task is.

TaskSets   the task sets of one env worker
"""

from collections.abc import Mapping
from pathlib import Path

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import Recipe
from hpcrl.envs.base import TaskFields
from hpcrl.envs.task_set import TaskRows
from hpcrl.errors import EnvFault
from hpcrl.rollout.tasks import AgentTask, RowOrder
from hpcrl.spool.ids import is_held_out, strip_held_out


class TaskSets:
    """The task sets of one env worker, in the campaign's `directory`."""

    def __init__(
        self, recipe: Recipe, worker: EnvWorkerId, *, directory: Path, num_drawn: Mapping[str, int] | None = None
    ) -> None:
        """Continue after `num_drawn` tasks of each domain; whoever draws one adds to it."""
        self._configs = {
            name: domain.task_set for name, domain in recipe.domains.items() if domain.task_set is not None
        }
        self._recipe_seed = recipe.seed
        self._worker = worker
        self._train = {name: TaskRows(directory, domain=name, split="train") for name in self._configs}
        self._held_out = {name: TaskRows(directory, domain=name, split="held-out") for name in self._configs}
        self._num_drawn = num_drawn if num_drawn is not None else {}

    def is_ended(self, domain: str) -> bool:
        """Return whether this worker has used all its rows of a domain as often as the recipe asks for."""
        config = self._configs.get(domain)
        if config is None or not config.epochs:
            return False
        try:
            num_places = config.epochs * len(self._train[domain])
        except EnvFault:  # each of its episodes ends with this fault
            return False
        return self._find_place(domain) >= num_places

    def next_place(self, domain: str) -> int | None:
        """Return the place of the next row; None for a domain whose tasks are seeds."""
        return self._find_place(domain) if domain in self._configs else None

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

    def _find_place(self, domain: str) -> int:
        return self._worker.index + self._num_drawn.get(domain, 0) * self._worker.count

    def _find_rows(self, task: AgentTask) -> TaskRows:
        rows = self._held_out if is_held_out(task.domain) else self._train
        return rows[strip_held_out(task.domain)]
