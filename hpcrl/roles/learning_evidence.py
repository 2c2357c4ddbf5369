"""The evidence that a campaign learned anything: its checkpoints have it, and its trainer judges by it at the end.

LearningEvidence   the results of the steps so far
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hpcrl.config.recipe import DomainConfig
from hpcrl.rollout.rewards import needs_score
from hpcrl.spool.outcome import OUTCOME_REWARD_ERROR
from hpcrl.spool.record import Trajectory


class LearningEvidence(msgspec.Struct, kw_only=True):
    """The results of a campaign's steps, those before the last checkpoint among them."""

    has_moved: bool = False
    """A step changed the weights."""
    has_reward: bool = False
    """A reward function gave a reward."""
    skip_reason: str = ""
    """The reason of the last step that changed nothing."""
    reward_error: str = ""
    """The reason of the last reward that could not be computed."""
    failing_domains: dict[str, str] = {}
    """Domains without a reward of their function so far, each with the reason of the last that failed."""
    rewarded_domains: set[str] = set()
    """Domains with a reward of their function."""

    @classmethod
    def from_checkpoint(cls, extra: Mapping[str, Any]) -> "LearningEvidence":
        """Read what `msgspec.to_builtins` made of it; a checkpoint without it is believed to have both."""
        saved = extra.get("evidence")
        return cls(has_moved=True, has_reward=True) if saved is None else msgspec.convert(saved, cls)

    def note_step(self, skipped: str | None, *, num_too_long: int) -> None:
        """Note a step, and why it changed nothing if so."""
        self.has_moved = self.has_moved or not skipped
        if skipped:
            limits = "the model's context or train.max_row_tokens"
            rows = f" ({num_too_long} rows are longer than {limits})" if num_too_long else ""
            self.skip_reason = skipped + rows

    def note_rewards(self, trajectories: Iterable[Trajectory], domains: Mapping[str, DomainConfig]) -> None:
        """Note which trajectories have a reward of their function, and which have none since it failed."""
        for one in trajectories:
            if one.outcome == OUTCOME_REWARD_ERROR:
                self.reward_error = str(one.extra.get("reason", "")) or "no reason was recorded"
                if one.domain not in self.rewarded_domains:
                    self.failing_domains[one.domain] = self.reward_error
            elif (
                one.domain not in self.rewarded_domains
                and one.domain in domains
                and needs_score(one, domains[one.domain])
            ):
                self.has_reward = True
                self.rewarded_domains.add(one.domain)
                self.failing_domains.pop(one.domain, None)

    def start_rewards(self) -> None:
        """Forget the steps of the warm-up: those that learn from rewards must change the weights too."""
        self.has_moved, self.skip_reason = False, ""

    def find_problem(self, *, of_warmup: bool = False) -> str | None:
        """Return why nothing was learned, with a fix; None if something was."""
        if not self.has_moved and self.skip_reason:
            what, fix = ("step of the warm-up", "the rows of warmup.path") if of_warmup else ("step", "the rewards")
            return f"no {what} changed the weights (the last: {self.skip_reason}): change {fix}, or the model"
        if not self.has_reward and self.reward_error:
            return (
                f"no reward was ever computed, as the reward function failed each time, the last with: "
                f"{self.reward_error}: correct the function, and start another campaign"
            )
        return None

    def list_failing_domains(self) -> list[str]:
        """Describe the domains of which no reward was ever computed."""
        return [
            f"domain {name}: no reward was ever computed, as its reward function failed each time, the last with: {why}"
            for name, why in sorted(self.failing_domains.items())
        ]
