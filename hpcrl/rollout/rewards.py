"""Reward functions of domains, ready to be called with a trajectory.

load_reward      loads a domain's function, with its options and, if it has a parameter for it, the decoded text
to_reward_parts  converts what it returned to named numbers
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path

from hpcrl.config.recipe import DomainConfig
from hpcrl.config.user_code import load_code
from hpcrl.envs.base import RewardFunction
from hpcrl.models.chat_layout import load_text_decoder
from hpcrl.spool.record import Trajectory
from hpcrl.spool.rows import list_spans


def load_reward(name: str, domain: DomainConfig, *, model: Path) -> RewardFunction:
    """Load a domain's reward function with its options; one with a parameter `text` receives the decoded tokens."""
    reward: Callable[..., float | dict[str, float]] = load_code(domain.reward, what=f"domains.{name}.reward")
    reward = functools.partial(reward, **domain.reward_options)
    if "text" not in inspect.signature(reward).parameters:
        return reward
    decode = _load_decoder(model)
    return lambda trajectory: reward(trajectory, text=_decode_trajectory(trajectory, decode))


def to_reward_parts(value: float | dict[str, float]) -> dict[str, float]:
    """Return what a reward function returned as numbers by name; raise ValueError if it is neither number nor dict."""
    try:
        return {key: float(part) for key, part in (value if isinstance(value, dict) else {"reward": value}).items()}
    except (TypeError, ValueError):
        raise ValueError(f"it returned {value!r}: a reward is a number, or a dict of numbers by name") from None


def _decode_trajectory(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> str:
    """Return the text of an episode; what several conversations share comes once."""
    spans = list_spans(trajectory)
    return "\n\n".join(decode(trajectory.token_ids[span.start : span.end].tolist()) for span in spans)


@functools.cache
def _load_decoder(model: Path) -> Callable[[list[int]], str]:
    return load_text_decoder(model)
