"""Curriculum: a user's function that adapts the weights of domains to their recent rewards.

    Curriculum      calls the function every UPDATE_INTERVAL_S, with the rewards that reward workers report
    CurriculumHook  the type of the function
    check_weights   completes and checks the weights that it returned

The function receives the recent rewards of every domain, oldest first, and returns weights for some or all domains:
none negative, at least one above 0. No task is drawn from a domain of weight 0; a domain that is not in the result
keeps the weight that it had.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CampaignEvent, SegmentScored
from hpcrl.config.recipe import Recipe
from hpcrl.config.user_code import load_code
from hpcrl.errors import ConfigError

UPDATE_INTERVAL_S = 10.0
MAX_KEPT = 256
"""The number of rewards kept for a domain; the oldest are dropped first."""

CurriculumHook = Callable[[dict[str, list[float]]], Mapping[str, float]]


class Curriculum:
    """The curriculum of one env worker, fed by the events of the reward workers."""

    def __init__(self, hook: CurriculumHook, *, name: str, weights: Mapping[str, float], events: EventReader) -> None:
        self._hook = hook
        self._name = name
        self._weights = dict(weights)
        self._events = events
        self._rewards: dict[str, deque[float]] = {domain: deque(maxlen=MAX_KEPT) for domain in weights}
        self._updated_at = -math.inf

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, events: Path) -> "Curriculum | None":
        """Return the curriculum of a recipe, or None if it names none."""
        name = recipe.rollout.curriculum
        if name is None:
            return None
        return cls(
            load_code(name, what="rollout.curriculum"),
            name=name,
            weights={domain: table.weight for domain, table in recipe.domains.items() if not table.held_out},
            events=EventReader.for_role(events, "reward"),
        )

    def poll_weights(self, *, now: float) -> dict[str, float] | None:
        """Return new weights; None when an update is not due yet, or nothing has changed."""
        if now - self._updated_at < UPDATE_INTERVAL_S:
            return None
        self._updated_at = now
        self._read_rewards(self._events.poll())
        recent = {domain: list(rewards) for domain, rewards in self._rewards.items()}
        answer = check_weights(self._hook(recent), known=self._weights, name=self._name)
        if answer == self._weights:
            return None
        self._weights = answer
        return answer

    def _read_rewards(self, events: Iterable[CampaignEvent]) -> None:
        for event in events:
            if isinstance(event, SegmentScored):
                for domain, rewards in event.rewards.items():
                    self._rewards[domain].extend(rewards)


def check_weights(answer: Any, *, known: Mapping[str, float], name: str) -> dict[str, float]:
    """Return the weights that a function gave, completed; raise ConfigError if they are not valid."""
    try:
        weights = {**known, **{str(domain): float(weight) for domain, weight in dict(answer).items()}}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rollout.curriculum {name} returned {answer!r}: return a number for each domain") from error
    if weights.keys() != known.keys():
        unknown = ", ".join(sorted(weights.keys() - known.keys()))
        raise ConfigError(
            f"rollout.curriculum {name} returned weights for {unknown}: the recipe's domains are {', '.join(known)}"
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()) or not any(weights.values()):
        raise ConfigError(
            f"rollout.curriculum {name} returned {answer!r}: weights must be finite, none below 0 and one above 0"
        )
    return weights
