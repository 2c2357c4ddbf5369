"""The running batch of a simulated engine: its rows, the cost of a step, and the KV that is kept. No clock, no I/O.

    SimRequest           a request that is being served
    draw_reply           the tokens it will generate
    SpentTime            seconds of the steps so far, by purpose
    TrajectoryPrefixes   KV kept between turns, evicted when rows need the room
    count_common_prefix  tokens that two lists share at the start
    SimBatch             join, start_step -> seconds, end_step -> rows that are done

A step decodes every row that has its KV and gives the rest of its token budget to rows that do not (chunked
prefill). Tokens are drawn when a row is made, so that the Python work of a step does not grow with the rows.
"""

import heapq
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcrl.engines.base import FinishReason
from hpcrl.errors import EngineError
from hpcrl.hardware.cost_model import WorkerSpeed


@dataclass(eq=False, kw_only=True)
class SimRequest:
    """A request that is being served."""

    prompt: list[int]
    reply: list[int]
    """The tokens it generates unless it is stopped; empty: only the KV is computed."""
    ends_with_stop: bool
    """True if `reply` ends with a stop token."""
    trajectory: str = ""
    keep_kv_s: float = 0.0
    wants_top: bool = False
    num_known: int = 0
    """Tokens whose KV is known: handed over, or kept since the last turn."""
    handed_over: bool = False
    num_to_prefill: int = 0
    num_generated: int = 0
    generated_since_step: int = 0
    """The step of the batch at which `num_generated` was counted and decoding resumed."""
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    """(tokens generated before, version of those that follow)."""
    finish_reason: FinishReason | None = None
    failure: EngineError | None = None

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    @property
    def num_reserved(self) -> int:
        """The most tokens of KV that it can hold."""
        return len(self.prompt) + len(self.reply)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.reply[: self.num_generated]

    def versions(self, *, num_generated: int) -> list[int]:
        """Return the version that generated each of the first `num_generated` tokens."""
        ends = [start for start, _ in self.version_starts[1:]] + [num_generated]
        spans = [(version, end - start) for (start, version), end in zip(self.version_starts, ends, strict=True)]
        return [version for version, num in spans for _ in range(num)]


def draw_reply(*, seed: int, num: int, vocabulary: int, stop_token_ids: Sequence[int]) -> tuple[list[int], bool]:
    """Draw `num` random tokens, or fewer, up to the first stop token; also returns whether it ends with one."""
    draw = random.Random(seed)
    reply = [int(draw.random() * vocabulary) for _ in range(num)]
    stops = [reply.index(token) for token in set(stop_token_ids).intersection(reply)]
    return (reply[: min(stops) + 1], True) if stops else (reply, False)


@dataclass
class SpentTime:
    """Simulated seconds of steps, by purpose."""

    base_s: float = 0.0
    """The fixed cost of steps."""
    prompts_s: float = 0.0
    replies_s: float = 0.0


@dataclass
class _KeptPrefix:
    token_ids: list[int]
    until: float


class TrajectoryPrefixes:
    """KV kept between the turns of trajectories, the least recently used first."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._kept: dict[str, _KeptPrefix] = {}

    def keep(self, trajectory: str, token_ids: list[int], *, until: float) -> None:
        self.take(trajectory)
        self._kept[trajectory] = _KeptPrefix(token_ids, until)
        self.num_tokens += len(token_ids)

    def take(self, trajectory: str) -> list[int]:
        """Remove and return the tokens kept for a trajectory."""
        kept = self._kept.pop(trajectory, None)
        if kept is None:
            return []
        self.num_tokens -= len(kept.token_ids)
        return kept.token_ids

    def evict(self, num_tokens: int, *, now: float) -> None:
        """Evict KV of `num_tokens` tokens: first KV whose time to be kept has passed, then other KV."""
        if num_tokens <= 0:
            return
        expired = [name for name, kept in self._kept.items() if kept.until <= now]
        for name in [*expired, *(name for name in self._kept if name not in set(expired))]:
            if num_tokens <= 0:
                return
            num_tokens -= len(self.take(name))

    def clear(self) -> None:
        self._kept.clear()
        self.num_tokens = 0


def count_common_prefix(old: list[int], new: list[int]) -> int:
    """Return how many tokens two lists share at the start."""
    shorter = min(len(old), len(new))
    if old[:shorter] == new[:shorter]:
        return shorter
    return bisect_left(range(shorter), True, key=lambda num: old[: num + 1] != new[: num + 1])


class SimBatch:
    """The rows that an engine serves together."""

    def __init__(self, worker_speed: WorkerSpeed, *, version: int, tokens_per_step: int) -> None:
        self.version = version
        self.num_generated = 0
        self.num_prefilled = 0
        """The number of tokens whose KV was computed here."""
        self.num_looked_up = 0
        """The number of prompt tokens whose KV may have been kept."""
        self.num_found = 0
        """The tokens of them whose KV was."""
        self.spent = SpentTime()
        self.prefixes = TrajectoryPrefixes()
        self._worker_speed = worker_speed
        self._tokens_per_step = tokens_per_step
        self._rows: dict[int, SimRequest] = {}
        self._num_reserved = 0
        self._prefilling: list[SimRequest] = []
        self._prefilled: list[SimRequest] = []
        """Rows that only needed their KV, and have it."""
        self._decoding: set[SimRequest] = set()
        self._num_decoded = 0
        """Tokens of KV held by the decoding rows."""
        self._ends: list[tuple[int, int, SimRequest]] = []
        self._step = 0
        self._num_joined = 0
        self._chunks: list[tuple[SimRequest, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of KV that the rows hold now or after their prefill."""
        return self._num_decoded + sum(len(row.prompt) for row in self._prefilling)

    @property
    def num_free(self) -> int:
        """Tokens of KV available to new rows."""
        return self._worker_speed.kv_tokens - self._num_reserved

    def join(self, row: SimRequest, *, now: float) -> None:
        """Admit a row that fits; KV kept for its trajectory is used."""
        kept = self.prefixes.take(row.trajectory)
        row.num_known = len(row.prompt) - 1 if row.handed_over else count_common_prefix(kept, row.prompt[:-1])
        row.num_to_prefill = len(row.prompt) - 1 - row.num_known
        if not row.handed_over:
            self.num_looked_up += len(row.prompt) - 1
            self.num_found += row.num_known
        row.version_starts = [(0, self.version)]
        self._rows[id(row)] = row
        self._num_reserved += row.num_reserved
        self.prefixes.evict(self.prefixes.num_tokens - self.num_free, now=now)
        self._decode_or_prefill(row)

    def start_step(self) -> float:
        """Choose the work of the next step; returns its seconds."""
        budget = max(1, self._tokens_per_step - len(self._decoding))
        self._chunks, num_new, prompts_s = [], 0, 0.0
        for row in self._prefilling:
            if num_new >= budget:
                break
            chunk = min(row.num_to_prefill, budget - num_new)
            known = len(row.prompt) + row.num_generated - 1 - row.num_to_prefill
            prompts_s += self._worker_speed.prefill_s(chunk, num_known=known)
            self._chunks.append((row, chunk))
            num_new += chunk
        batch = len(self._decoding)
        base_s = self._worker_speed.base_step_s(batch or num_new)
        replies_s = self._worker_speed.decode_s(batch, num_kv=self._num_decoded) - base_s if batch else 0.0
        self.spent.base_s += base_s
        self.spent.prompts_s += prompts_s
        self.spent.replies_s += replies_s
        return base_s + prompts_s + replies_s

    def end_step(self, *, now: float) -> list[SimRequest]:
        """Record the work of the step as done; returns the rows that are done."""
        self._step += 1
        self.num_generated += len(self._decoding)
        self._num_decoded += len(self._decoding)
        chunks, self._chunks = self._chunks, []
        for row, chunk in chunks:
            self.num_prefilled += chunk
            row.num_to_prefill -= chunk
            if row.num_to_prefill <= 0:
                self._prefilling.remove(row)
                self._decode_or_prefill(row)
        done, self._prefilled = self._prefilled, []
        while self._ends and self._ends[0][0] <= self._step:
            _, _, row = heapq.heappop(self._ends)
            if row in self._decoding and self.count_generated(row) == len(row.reply):
                done.append(row)
        for row in done:
            row.finish_reason = "stop" if row.ends_with_stop else "length"
            self._remove(row, now=now)
        return done

    def count_generated(self, row: SimRequest) -> int:
        """Return how many tokens of its reply a row has generated."""
        return row.num_generated + (self._step - row.generated_since_step if row in self._decoding else 0)

    def drop(self, row: SimRequest, *, now: float) -> None:
        """Remove a row before it is done."""
        row.finish_reason = "aborted"
        if id(row) in self._rows:
            self._remove(row, now=now)

    def load(self, version: int) -> None:
        """Switch to other weights; all KV must be recomputed."""
        self.version = version
        self.prefixes.clear()
        for row in list(self._decoding):
            self._stop_decoding(row)
        self._prefilling, self._prefilled, self._chunks = [], [], []
        for row in self._rows.values():
            row.num_to_prefill = len(row.prompt) + row.num_generated - 1
            row.version_starts.append((row.num_generated, version))
            self._decode_or_prefill(row)

    def _decode_or_prefill(self, row: SimRequest) -> None:
        """Decode a row if it has its KV, else compute the KV first."""
        if row.num_to_prefill > 0:
            self._prefilling.append(row)
        elif not row.reply:
            self._prefilled.append(row)
        else:
            row.generated_since_step = self._step
            self._decoding.add(row)
            self._num_decoded += len(row.prompt) + row.num_generated
            self._num_joined += 1
            heapq.heappush(self._ends, (self._step + len(row.reply) - row.num_generated, self._num_joined, row))

    def _stop_decoding(self, row: SimRequest) -> None:
        row.num_generated = self.count_generated(row)
        self._decoding.remove(row)
        self._num_decoded -= len(row.prompt) + row.num_generated

    def _remove(self, row: SimRequest, *, now: float) -> None:
        """Remove a row; its KV is kept for its trajectory as far as there is room."""
        if row in self._decoding:
            self._stop_decoding(row)
        elif row in self._prefilling:
            self._prefilling.remove(row)
            self._chunks = [(other, chunk) for other, chunk in self._chunks if other is not row]
        elif row in self._prefilled:
            self._prefilled.remove(row)
        del self._rows[id(row)]
        self._num_reserved -= row.num_reserved
        if row.trajectory and row.num_to_prefill <= 0:
            self.prefixes.keep(row.trajectory, row.token_ids, until=now + row.keep_kv_s)
            self.prefixes.evict(self.prefixes.num_tokens - self.num_free, now=now)
