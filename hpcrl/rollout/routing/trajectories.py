"""What the router remembers of each trajectory between its turns, and of each domain between trajectories.

    TrajectoryState  one trajectory so far: where its KV lies, what it has had, when it was last heard of
    with_ids         a request with its trajectory and domain
    TrajectoryTable  all that run, with what their domains have in common: reply lengths, pauses, credit

Nothing here depends on how many trajectories run: a turn touches its own course and its domain.

For how long the KV of a trajectory is worth keeping while its environment is at work. Pure.

keep_s    the best time to live, given how long such pauses were
Pauses    the pauses of one kind of tool (a domain), as a grid of quantiles

Which turn goes first where turns wait: what rides on a request for the engines to order their queues by. Pure.

level      a trajectory's place, by the service it has had: the less, the sooner (least attained service)
Credits    deficit counters: domains that had more than their share go behind those that had less
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.spool.ids import is_held_out, parse_request_id

MIN_SAMPLES = 100
"""With fewer pauses seen, nothing is said of the next."""
NUM_SAMPLES = 512
NUM_QUANTILES = 32


def kv_keep_s(quantiles: Sequence[float], *, saving_s: float) -> float:
    """The time to live t that maximises P(pause <= t) * saving_s - t; `quantiles` are of the pauses, ascending.

    A second of kept KV is counted as dear as a second of computing it anew. 0: it is not worth it.
    """
    num = len(quantiles)
    gains = ((saving_s * (index + 1) / num - seconds, seconds) for index, seconds in enumerate(quantiles))
    gain, seconds = max(gains, default=(0.0, 0.0))
    return seconds if gain > 0 else 0.0


@dataclass
class PauseQuantiles:
    """The last pauses between the turns of a domain's trajectories."""

    quantiles: list[float] = field(default_factory=list)
    """Empty until there are enough."""
    _recent: deque[float] = field(default_factory=deque)
    _sorted: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        if len(self._recent) == NUM_SAMPLES:
            self._sorted.remove(self._recent.popleft())
        self._recent.append(seconds)
        insort(self._sorted, seconds)
        num = len(self._sorted)
        if num >= MIN_SAMPLES and num % NUM_QUANTILES == 0:
            self.quantiles = [self._sorted[(index + 1) * num // NUM_QUANTILES - 1] for index in range(NUM_QUANTILES)]


NUM_LEVELS = 16
HELD_OUT_LEVEL = 2 * NUM_LEVELS
"""Turns of evaluations go behind all others, also those of domains without credit."""
FIRST_LEVEL_TOKENS = 512
"""Service up to this is level 0; every level above is twice as wide."""
STARVATION_FACTOR = 2.0
"""A trajectory that has waited so many times as long as it was served goes first again."""
QUANTUM_TOKENS = 8192.0
"""What a domain of weight 1 may use before it has to let others go first."""


def queue_level(*, served_tokens: float, served_s: float, waited_s: float) -> int:
    """0 goes first. Long trajectories yield to short ones, but only until they have waited too long for it."""
    if waited_s > STARVATION_FACTOR * served_s:
        return 0
    return min(NUM_LEVELS - 1, (int(served_tokens) // FIRST_LEVEL_TOKENS).bit_length())


@dataclass
class DomainCredits:
    """What each domain may still use before it goes behind the others."""

    weights: Mapping[str, float]
    remaining: dict[str, float] = field(default_factory=dict)

    def spend(self, domain: str, tokens: float) -> None:
        self.remaining[domain] = self.remaining.get(domain, self._quantum(domain)) - tokens

    def has_credit(self, domain: str) -> bool:
        return self.remaining.get(domain, 1.0) > 0

    def replenish(self, active: Iterable[str]) -> None:
        """New credit for all once none of those that want something has any left; debts stay."""
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
"""Weight of the newest turn in running means."""


@dataclass(slots=True)
class TrajectoryState:
    """One trajectory so far."""

    domain: str = ""
    home: str | None = None
    """The decode worker that has its KV."""
    prefill_home: str | None = None
    num_cached: int = 0
    """Tokens whose KV is there."""
    held_at: str | None = None
    """The worker whose KV it takes room of, from the moment that its first turn is sent there ..."""
    held_tokens: int = 0
    """... and how many tokens that is counted as."""
    version: int = -1
    """Of the weights that the KV is of."""
    served_tokens: float = 0.0
    served_s: float = 0.0
    waited_s: float = 0.0
    ended_at: float | None = None
    """When its last turn was over."""


def with_ids(request: GenerateRequest) -> GenerateRequest:
    """The request with the trajectory and the domain that its id begins with: `domain/number/index/...`."""
    if request.trajectory or (parsed := parse_request_id(request.request_id)) is None:
        return request
    domain, episode = parsed
    return msgspec.structs.replace(request, trajectory=episode, domain=domain)


@dataclass
class _DomainStats:
    reply_tokens: float | None = None
    prompt_tokens: float = 0.0
    """Of a turn, those whose KV had to be computed."""
    kept_tokens: float = 0.0
    """What a trajectory keeps between two turns."""
    pauses: PauseQuantiles = field(default_factory=PauseQuantiles)


class TrajectoryTable:
    """The trajectories that run on this host; `forget` them when they end."""

    def __init__(self, *, weights: dict[str, float]) -> None:
        self.credits = DomainCredits(weights)
        self._states: dict[str, TrajectoryState] = {}
        self._domains: dict[str, _DomainStats] = {}
        self._num_active: Counter[str] = Counter()
        self._token_s: float | None = None
        """What a token takes, as a running mean over all turns."""

    def __len__(self) -> int:
        return len(self._states)

    def start_turn(self, request: GenerateRequest, *, now: float) -> TrajectoryState:
        """The course of the request's trajectory, whose environment has just answered."""
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
        """How long the reply will likely be: as long as the domain's replies are."""
        usual = self._domain(request.domain).reply_tokens
        return request.max_new_tokens if usual is None else min(usual, request.max_new_tokens)

    def expected_kv_tokens(self, state: TrajectoryState, *, num_tokens: int) -> int:
        """What a trajectory of now `num_tokens` should be counted as: young ones grow to what is usual."""
        return max(num_tokens, round(self._domain(state.domain).kept_tokens))

    def mean_turn(self) -> tuple[float, float]:
        """Tokens to prefill and to decode of a turn, over all domains."""
        seen = [domain for domain in self._domains.values() if domain.reply_tokens is not None]
        if not seen:
            return 0.0, 0.0
        prompt = sum(domain.prompt_tokens for domain in seen) / len(seen)
        return prompt, sum(domain.reply_tokens or 0.0 for domain in seen) / len(seen)

    def queue_level(self, state: TrajectoryState) -> int:
        return queue_level(served_tokens=state.served_tokens, served_s=state.served_s, waited_s=state.waited_s)

    def credit_penalty(self, domain: str) -> int:
        """What is added to the level of a domain's turns: more than any level if it used up its credit."""
        self.credits.replenish([name for name, num in self._num_active.items() if num > 0 and not is_held_out(name)])
        return 0 if self.credits.has_credit(domain) else NUM_LEVELS

    def kv_keep_s(self, domain: str, *, saving_s: float) -> float:
        return kv_keep_s(self._domain(domain).pauses.quantiles, saving_s=saving_s)

    def _domain(self, name: str) -> _DomainStats:
        return self._domains.setdefault(name, _DomainStats())


def _update_mean(before: float | None, value: float) -> float:
    return value if before is None else before + RECENT_WEIGHT * (value - before)
