"""Weights of domains that follow how well they go: a function of the user is asked for them now and then.

The function gets the recent rewards of every domain, oldest first, and gives weights: of some or all domains, none
negative, one above 0. A domain of weight 0 is not asked; one that it does not name keeps its weight of the recipe.
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
"""Rewards of a domain that are remembered, newest first to stay."""

CurriculumHook = Callable[[dict[str, list[float]]], Mapping[str, float]]


class Curriculum:
    """The curriculum of one env host, fed by what the reward workers say in their events."""

    def __init__(self, hook: CurriculumHook, *, name: str, weights: Mapping[str, float], events: EventReader) -> None:
        self._hook = hook
        self._name = name
        self._weights = dict(weights)
        self._events = events
        self._rewards: dict[str, deque[float]] = {domain: deque(maxlen=MAX_KEPT) for domain in weights}
        self._updated_at = -math.inf

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, events: Path) -> "Curriculum | None":
        """The curriculum of a recipe, if it names one."""
        name = recipe.rollout.curriculum
        if name is None:
            return None
        return cls(
            load_code(name, what="rollout.curriculum"),
            name=name,
            weights={domain: table.weight for domain, table in recipe.domains.items() if not table.held_out},
            events=EventReader(events, pattern="*-reward-*.jsonl"),
        )

    def poll_weights(self, *, now: float) -> dict[str, float] | None:
        """New weights; None when it is not time to ask, or nothing has changed."""
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
    """The weights that a function gave, completed; ConfigError for what are none."""
    try:
        weights = {**known, **{str(domain): float(weight) for domain, weight in dict(answer).items()}}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rollout.curriculum {name} gave {answer!r}: it gives a number for each domain") from error
    if weights.keys() != known.keys():
        unknown = ", ".join(sorted(weights.keys() - known.keys()))
        raise ConfigError(f"rollout.curriculum {name} gave weights for {unknown}: there are {', '.join(known)}")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()) or not any(weights.values()):
        raise ConfigError(f"rollout.curriculum {name} gave {answer!r}: weights are at least 0, and one is above")
    return weights
