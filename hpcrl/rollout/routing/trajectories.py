"""State that the router keeps of each trajectory between its turns, and of each domain between trajectories. Pure.

    TrajectoryTable  all running trajectories, with the statistics of their domains: reply lengths, pauses, credit
    TrajectoryState  one trajectory so far: where its KV is, its service so far, when its last turn ended
    with_ids         a request with its trajectory and domain
    kv_keep_s        how long KV is worth keeping while an environment works, given how long such pauses were
    PauseQuantiles   the pauses of one kind of tool (a domain), as a grid of quantiles
    queue_level      a trajectory's priority level by the service it has received: the less, the earlier
    DomainCredits    deficit counters: domains that had more than their share go behind those that had less
    HELD_OUT_LEVEL   the priority level of evaluations

The work per turn does not depend on how many trajectories run: a turn touches only its own state and its domain.
Engines order their queues by the level that a request carries (least attained service first).
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.spool.ids import is_held_out, parse_request_id

MIN_SAMPLES = 100
"""The number of pauses below which the next one is not predicted."""
NUM_SAMPLES = 512
NUM_QUANTILES = 32


def kv_keep_s(quantiles: Sequence[float], *, saving_s: float) -> float:
    """Return the time t that maximises P(pause <= t) * saving_s - t, or 0 if keeping KV is not worth it.

    `quantiles` are those of the pauses, ascending. Keeping KV for a second counts the same as a second of computing it.
    """
    num = len(quantiles)
    gains = ((saving_s * (index + 1) / num - seconds, seconds) for index, seconds in enumerate(quantiles))
    gain, seconds = max(gains, default=(0.0, 0.0))
    return seconds if gain > 0 else 0.0


@dataclass
class PauseQuantiles:
    """The recent pauses between the turns of a domain's trajectories."""

    quantiles: list[float] = field(default_factory=list)
    """The quantiles; empty until there are enough pauses."""
    _num_added: int = 0
    _recent: deque[float] = field(default_factory=deque)
    _sorted: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        if len(self._recent) == NUM_SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(seconds)
        insort(self._sorted, seconds)
        self._num_added += 1
        num = len(self._sorted)
        if num >= MIN_SAMPLES and self._num_added % NUM_QUANTILES == 0:
            self.quantiles = [self._sorted[(index + 1) * num // NUM_QUANTILES - 1] for index in range(NUM_QUANTILES)]


NUM_LEVELS = 16
HELD_OUT_LEVEL = 2 * NUM_LEVELS
"""The level of evaluations: behind all others, including domains without credit."""
FIRST_LEVEL_TOKENS = 512
"""The service that is level 0; every level above is twice as wide."""
STARVATION_FACTOR = 2.0
"""The ratio of waiting to service above which a trajectory goes first again."""
QUANTUM_TOKENS = 8192.0
"""The tokens that a domain of weight 1 may use before it has to let others go first."""


def queue_level(*, served_tokens: float, served_s: float, waited_s: float) -> int:
    """Return the level; 0 goes first. Long trajectories yield to short ones until they have waited too long."""
    if waited_s > STARVATION_FACTOR * served_s:
        return 0
    return min(NUM_LEVELS - 1, (int(served_tokens) // FIRST_LEVEL_TOKENS).bit_length())


@dataclass
class DomainCredits:
    """The tokens that each domain may still use before it goes behind the others."""

    weights: Mapping[str, float]
    remaining: dict[str, float] = field(default_factory=dict)

    def spend(self, domain: str, tokens: float) -> None:
        self.remaining[domain] = self.remaining.get(domain, self._quantum(domain)) - tokens

    def has_credit(self, domain: str) -> bool:
        return self.remaining.get(domain, 1.0) > 0

    def replenish(self, active: Iterable[str]) -> None:
        """Give new credit to all once no domain in `active` has any left; debts remain."""
        domains = list(active)
        if not domains or any(self.has_credit(domain) for domain in domains):
            return
        short = min(-self.remaining[domain] / self._quantum(domain) for domain in domains)
        rounds = int(short) + 1
        for domain in self.remaining:
            quantum = self._quantum(domain)
            self.remaining[domain] = min(quantum, self.remaining[domain] + rounds * quantum)

    def _quantum(self, domain: str) -> float:
        return QUANTUM_TOKENS * self.weights.get(domain, 1.0)


RECENT_WEIGHT = 0.05
"""The weight of the newest turn in running means."""


@dataclass(slots=True)
class TrajectoryState:
    """The place of the KV of one trajectory, how much engines have served it, and how long it waited."""

    domain: str = ""
    home: str | None = None
    """The decode worker that has its KV."""
    prefill_home: str | None = None
    num_cached: int = 0
    """The number of tokens whose KV is there."""
    held_at: str | None = None
    """The worker at which it takes up room for KV, from the moment that its first turn is sent there ..."""
    held_tokens: int = 0
    """... and the number of tokens that this counts as."""
    version: int = -1
    """The version of the weights that computed the KV."""
    served_tokens: float = 0.0
    served_s: float = 0.0
    waited_s: float = 0.0
    ended_at: float | None = None
    """The time when its last turn ended; None during a turn."""


def with_ids(request: GenerateRequest) -> GenerateRequest:
    """Return the request with the trajectory and the domain from its id: `domain/number/index/...`."""
    if request.trajectory or (parsed := parse_request_id(request.request_id)) is None:
        return request
    domain, episode = parsed
    return msgspec.structs.replace(request, trajectory=episode, domain=domain)


@dataclass
class _DomainStats:
    reply_tokens: float | None = None
    prompt_tokens: float = 0.0
    """The mean number of prompt tokens of a turn whose KV had to be computed."""
    kept_tokens: float = 0.0
    """The mean number of tokens that a trajectory keeps between two turns."""
    pauses: PauseQuantiles = field(default_factory=PauseQuantiles)


class TrajectoryTable:
    """The trajectories of this env worker; `forget` them when they end."""

    def __init__(self, *, weights: dict[str, float]) -> None:
        self.credits = DomainCredits(weights)
        self._states: dict[str, TrajectoryState] = {}
        self._domains: dict[str, _DomainStats] = {}
        self._num_active: Counter[str] = Counter()
        self._token_s: float | None = None
        """The time per token, as a running mean over all turns."""

    def __len__(self) -> int:
        return len(self._states)

    def start_turn(self, request: GenerateRequest, *, now: float) -> TrajectoryState:
        """Return the state of the request's trajectory, whose environment has just answered."""
        state = TrajectoryState(request.domain)
        if request.trajectory:
            state = self._states.setdefault(request.trajectory, state)
        self._num_active[request.domain] += 1
        if state.ended_at is not None:
            self._domain(request.domain).pauses.add(now - state.ended_at)
            state.ended_at = None
        return state

    def end_turn(
        self, state: TrajectoryState, request: GenerateRequest, completion: Completion | None, *, seconds: float
    ) -> None:
        """Account for a turn that took `seconds`; without a completion it failed."""
        self._num_active[request.domain] -= 1
        if completion is None:
            return
        num_generated = len(completion.token_ids)
        domain, num_new = self._domain(request.domain), max(0, len(request.token_ids) - state.num_cached)
        domain.reply_tokens = _update_mean(domain.reply_tokens, num_generated)
        domain.prompt_tokens = _update_mean(domain.prompt_tokens or None, num_new)
        domain.kept_tokens = _update_mean(domain.kept_tokens or None, len(request.token_ids) + num_generated)
        num_served = num_new + num_generated
        self._token_s = _update_mean(self._token_s, seconds / max(1, num_served))
        fair_s = num_served * self._token_s
        state.served_tokens += num_served
        state.served_s += fair_s
        state.waited_s += max(0.0, seconds - fair_s)
        self.credits.spend(request.domain, num_served)

    def forget(self, trajectory: str) -> TrajectoryState | None:
        return self._states.pop(trajectory, None)

    def reply_tokens(self, request: GenerateRequest) -> float:
        """Return the expected length of the reply: the domain's mean, at most the request's limit."""
        usual = self._domain(request.domain).reply_tokens
        return request.max_new_tokens if usual is None else min(usual, request.max_new_tokens)

    def expected_kv_tokens(self, state: TrajectoryState, *, num_tokens: int) -> int:
        """Return the expected KV tokens of a trajectory: `num_tokens`, but at least the mean of its domain."""
        return max(num_tokens, round(self._domain(state.domain).kept_tokens))

    def mean_turn(self) -> tuple[float, float]:
        """Return the mean tokens to prefill and to decode in a turn, over all domains."""
        seen = [domain for domain in self._domains.values() if domain.reply_tokens is not None]
        if not seen:
            return 0.0, 0.0
        prompt = sum(domain.prompt_tokens for domain in seen) / len(seen)
        return prompt, sum(domain.reply_tokens or 0.0 for domain in seen) / len(seen)

    def queue_level(self, state: TrajectoryState) -> int:
        return queue_level(served_tokens=state.served_tokens, served_s=state.served_s, waited_s=state.waited_s)

    def credit_penalty(self, domain: str) -> int:
        """Return what to add to the level of a domain's turns: more than any level if its credit is used up."""
        self.credits.replenish([name for name, num in self._num_active.items() if num > 0 and not is_held_out(name)])
        return 0 if self.credits.has_credit(domain) else NUM_LEVELS

    def kv_keep_s(self, domain: str, *, saving_s: float) -> float:
        return kv_keep_s(self._domain(domain).pauses.quantiles, saving_s=saving_s)

    def _domain(self, name: str) -> _DomainStats:
        if (known := self._domains.get(name)) is None:
            known = self._domains[name] = _DomainStats()
        return known


def _update_mean(before: float | None, value: float) -> float:
    return value if before is None else before + RECENT_WEIGHT * (value - before)
