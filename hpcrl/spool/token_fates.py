"""The fates of the tokens that episodes generated, by name: `trained`, or why they are not. Pure, without numpy.

TRAINED, FORCED, STALE, TOO_LONG  names; the others are statuses of episodes and the reasons for which turns are masked
measure_trained_share      the share that is trained
explain_untrained          the reasons why the rest is not, the largest first
MIN_TRAINED_SHARE          the share below which people are warned
"""

from collections.abc import Mapping

TRAINED, FORCED, STALE, TOO_LONG = "trained", "forced", "stale", "too-long"
MIN_TRAINED_SHARE = 0.95
NOT_COUNTED = frozenset({"aborted-redundant", FORCED})
"""Extra episodes of a group are not there to be trained on, and tokens without an alternative were not chosen."""
FATE_TEXTS = {
    "choice": "in a conversation that `trains` leaves out",
    "sampling": "sampled otherwise than training assumes",
    FORCED: "decided by the required form of an answer",
    "aborted-stale": "aborted as stale",
    STALE: "dropped as stale",
    TOO_LONG: "in a conversation longer than the trainer reads",
    "env-fault": "in episodes that the environment failed",
    "policy-fault": "in episodes that the engine failed",
}


def measure_trained_share(fates: Mapping[str, int]) -> float | None:
    """Return the share of the generated tokens that is trained; None without tokens."""
    total = sum(num for name, num in fates.items() if name not in NOT_COUNTED)
    return fates.get(TRAINED, 0) / total if total else None


def explain_untrained(fates: Mapping[str, int]) -> str:
    """Return the shares of the tokens that are not trained, each with its reason."""
    counted = {name: num for name, num in fates.items() if name not in NOT_COUNTED and num > 0}
    total = sum(counted.values())
    lost = sorted(((num, name) for name, num in counted.items() if name != TRAINED), reverse=True)
    return ", ".join(f"{num / total:.1%} {FATE_TEXTS.get(name, name)}" for num, name in lost)
