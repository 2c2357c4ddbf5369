"""What the router remembers of each trajectory between its turns, and of each domain between trajectories.

    Course      one trajectory so far: where its KV lies, what it has had, when it was last heard of
    whose       a request with its trajectory and domain
    Courses     all that run, with what their domains have in common: reply lengths, pauses, credit

Nothing here depends on how many trajectories run: a turn touches its own course and its domain.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.rollout.keeping import Pauses, keep_s
from hpcrl.rollout.priority import NUM_LEVELS, Credits, level
from hpcrl.rollout.tasks import is_held_out

RECENT = 0.05
"""Weight of the newest turn in running means."""


@dataclass(slots=True)
class Course:
    """One trajectory so far."""

    domain: str = ""
    home: str | None = None
    """The decode worker that has its KV."""
    prefill_home: str | None = None
    num_kept: int = 0
    """Tokens whose KV is there."""
    held_at: str | None = None
    """The worker whose KV it takes room of, from the moment that its first turn is sent there ..."""
    held: int = 0
    """... and how many tokens that is counted as."""
    version: int = -1
    """Of the weights that the KV is of."""
    attained_tokens: float = 0.0
    attained_s: float = 0.0
    waited_s: float = 0.0
    ended_at: float | None = None
    """When its last turn was over."""


def whose(request: GenerateRequest) -> GenerateRequest:
    """The request with the trajectory and the domain that its id begins with: `domain/number/index/...`."""
    parts = request.request_id.split("/")
    if request.trajectory or len(parts) < 3:
        return request
    return msgspec.structs.replace(request, trajectory="/".join(parts[:3]), domain=parts[0])


@dataclass
class _DomainSeen:
    reply_tokens: float | None = None
    prompt_tokens: float = 0.0
    """Of a turn, those whose KV had to be computed."""
    kept_tokens: float = 0.0
    """What a trajectory keeps between two turns."""
    pauses: Pauses = field(default_factory=Pauses)


class Courses:
    """The trajectories that run on this host; `forget` them when they end."""

    def __init__(self, *, weights: dict[str, float]) -> None:
        self.credits = Credits(weights)
        self._courses: dict[str, Course] = {}
        self._domains: dict[str, _DomainSeen] = {}
        self._demanding: Counter[str] = Counter()
        self._token_s: float | None = None
        """What a token takes, as a running mean over all turns."""

    def __len__(self) -> int:
        return len(self._courses)

    def begin_turn(self, request: GenerateRequest, *, now: float) -> Course:
        """The course of the request's trajectory, whose environment has just answered."""
        course = Course(request.domain)
        if request.trajectory:
            course = self._courses.setdefault(request.trajectory, course)
        self._demanding[request.domain] += 1
        if course.ended_at is not None:
            self._domain(request.domain).pauses.add(now - course.ended_at)
            course.ended_at = None
        return course

    def end_turn(
        self, course: Course, request: GenerateRequest, completion: Completion | None, *, seconds: float
    ) -> None:
        """Account for a turn that took `seconds`; without a completion it failed."""
        self._demanding[request.domain] -= 1
        if completion is None:
            return
        num_said = len(completion.token_ids)
        domain, num_new = self._domain(request.domain), max(0, len(request.token_ids) - course.num_kept)
        domain.reply_tokens = _mean(domain.reply_tokens, num_said)
        domain.prompt_tokens = _mean(domain.prompt_tokens or None, num_new)
        domain.kept_tokens = _mean(domain.kept_tokens or None, len(request.token_ids) + num_said)
        served = num_new + num_said
        self._token_s = _mean(self._token_s, seconds / max(1, served))
        fair_s = served * self._token_s
        course.attained_tokens += served
        course.attained_s += fair_s
        course.waited_s += max(0.0, seconds - fair_s)
        self.credits.spend(request.domain, served)

    def forget(self, trajectory: str) -> Course | None:
        return self._courses.pop(trajectory, None)

    def reply_tokens(self, request: GenerateRequest) -> float:
        """How long the reply will likely be: as long as the domain's replies are."""
        usual = self._domain(request.domain).reply_tokens
        return request.max_new_tokens if usual is None else min(usual, request.max_new_tokens)

    def room_for(self, course: Course, *, num_tokens: int) -> int:
        """What a trajectory of now `num_tokens` should be counted as: young ones grow to what is usual."""
        return max(num_tokens, round(self._domain(course.domain).kept_tokens))

    def usual_turn(self) -> tuple[float, float]:
        """Tokens to prefill and to decode of a turn, over all domains."""
        seen = [domain for domain in self._domains.values() if domain.reply_tokens is not None]
        if not seen:
            return 0.0, 0.0
        prompt = sum(domain.prompt_tokens for domain in seen) / len(seen)
        return prompt, sum(domain.reply_tokens or 0.0 for domain in seen) / len(seen)

    def level(self, course: Course) -> int:
        return level(attained_tokens=course.attained_tokens, attained_s=course.attained_s, waited_s=course.waited_s)

    def behind(self, domain: str) -> int:
        """What is added to the level of a domain's turns: more than any level if it used up its credit."""
        self.credits.replenish([name for name, num in self._demanding.items() if num > 0 and not is_held_out(name)])
        return 0 if self.credits.has_credit(domain) else NUM_LEVELS

    def keep_s(self, domain: str, *, saving_s: float) -> float:
        return keep_s(self._domain(domain).pauses.quantiles, saving_s=saving_s)

    def _domain(self, name: str) -> _DomainSeen:
        return self._domains.setdefault(name, _DomainSeen())


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + RECENT * (value - before)
