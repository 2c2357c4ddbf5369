"""Rewards that env workers give themselves, where an episode ends: those of functions that are marked as quick.

QuickScorer     scores trajectories of such domains; those of others stay as they are
find_quick_caller   the function of a domain, if it is quick

A function is quick if it is marked so (`hpcrl.envs.base.quick_reward`) and takes one trajectory and nothing else. It is
looked for in modules that an env worker imports anyway: those of hpcrl, and that of the environment. A call that fails
is left to the reward workers, which report it. So is all that a teacher scores too, and all of a recipe with a
curriculum, which reads the events of the reward workers.
"""

from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.recipe import DomainConfig, Recipe
from hpcrl.errors import ConfigError
from hpcrl.rollout.rewards import RewardCaller, apply_score, load_reward, needs_score
from hpcrl.spool.record import TRAINABLE, Trajectory

OWN_PREFIX = "hpcrl."


class QuickScorer:
    """The quick reward functions of a recipe."""

    def __init__(self, recipe: Recipe, *, model: Path) -> None:
        self._domains = recipe.domains
        self._callers: dict[str, RewardCaller] = {}
        if not recipe.teacher_name and recipe.rollout.curriculum is None:
            for name, domain in recipe.domains.items():
                if (caller := find_quick_caller(name, domain, model=model)) is not None:
                    self._callers[name] = caller

    def score(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Return the trajectories, with rewards where a quick function gives one."""
        return [self._score_one(trajectory) for trajectory in trajectories]

    def _score_one(self, trajectory: Trajectory) -> Trajectory:
        caller, domain = self._callers.get(trajectory.domain), self._domains.get(trajectory.domain)
        if caller is None or domain is None or trajectory.status not in TRAINABLE:
            return trajectory
        if not needs_score(trajectory, domain):
            return apply_score(trajectory, domain, None)
        try:
            (score,) = caller.read_scores(caller.call([trajectory]), [trajectory])
        except Exception:  # noqa: BLE001 - whatever the user's code raises, a reward worker meets it again
            return trajectory
        return trajectory if score.error else apply_score(trajectory, domain, score)


def find_quick_caller(name: str, domain: DomainConfig, *, model: Path) -> RewardCaller | None:
    """Return the reward function of a domain if it is quick."""
    module = domain.reward.partition(":")[0]
    is_imported = domain.isolation == "none" and module == domain.env.partition(":")[0]
    if not (module.startswith(OWN_PREFIX) or is_imported):
        return None
    try:
        caller = load_reward(name, domain, model=model)
    except ConfigError:  # the reward workers report it
        return None
    is_plain = not (caller.takes_list or caller.is_async or caller.decode or caller.takes_judges)
    return caller if is_plain and caller.is_quick else None
