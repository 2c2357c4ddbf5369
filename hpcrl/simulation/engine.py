"""An engine in simulated time, by the cost model: the same batching as `hpcrl.engines.sim`, in few events.

FluidEngine   a batch whose rows advance together, step after step; events only where the batch changes
EngineRow     a request in it

Between two changes of the batch every step takes the same time, but for KV that grows: these steps are one event. A
step decodes every row that has its KV, and the rest of its tokens go to rows that do not (chunked prefill). As on an
engine, the batch changes between two steps only: a request that arrives in one, or new weights, wait for its end.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

from hpcrl.engines.base import MAX_LOAD_AGE_S, LoadFigures
from hpcrl.engines.version_gate import MAX_VERSION_WAIT_S
from hpcrl.hardware.cost_model import WorkerSpeed
from hpcrl.simulation.clock import EventQueue

_ALMOST = 1e-4
"""The share of a step by which times may differ, as sums of floats do."""


class EngineRow:
    """A request that an engine serves."""

    __slots__ = (
        "generated",
        "min_version",
        "num_known",
        "num_new",
        "num_prompt",
        "num_to_prefill",
        "on_end",
        "priority",
        "state",
        "target",
        "trajectory",
        "version",
    )  # fmt: skip

    def __init__(
        self,
        trajectory: str,
        *,
        num_prompt: int,
        num_new: int,
        on_end: Callable[["EngineRow"], object],
        num_known: int = 0,
        priority: int = 0,
        min_version: int = 0,
    ) -> None:
        """Make the row of a turn; with `num_new` 0 it only needs its KV. `num_known` tokens were handed over.

        It waits for `min_version` of the weights.
        """
        self.trajectory = trajectory
        self.num_prompt = num_prompt
        self.num_new = num_new
        self.on_end = on_end
        self.num_known = num_known
        self.priority = priority
        self.min_version = min_version
        self.num_to_prefill = 0
        self.generated = 0
        """Tokens generated before it had its KV computed again."""
        self.target = 0
        """The step at which it has all its tokens."""
        self.version = -1
        """The version of the weights at its first token."""
        self.state = "waiting"

    @property
    def num_reserved(self) -> int:
        return self.num_prompt + self.num_new


class FluidEngine:
    """A simulated engine worker."""

    def __init__(
        self,
        queue: EventQueue,
        speed: WorkerSpeed,
        *,
        max_batch: int,
        tokens_per_step: int = 2048,
        version: int = 0,
        time_scale: float = 1.0,
    ) -> None:
        """Make an engine of a speed; all of its times are longer by `time_scale`."""
        self.version = version
        self.busy_s = 0.0
        """Time with a request."""
        self.row_s = 0.0
        """The sum over requests of the time in the batch."""
        self.num_generated = 0
        self.num_prefilled = 0
        self.is_up = True
        self._queue = queue
        self._speed = speed
        self._time_scale = time_scale
        self._max_batch = max_batch
        self._tokens_per_step = tokens_per_step
        self._waiting: list[tuple[int, int, EngineRow]] = []
        self._numbers = count()
        self._prefilling: deque[EngineRow] = deque()
        self._decoding: set[EngineRow] = set()
        self._ends: list[tuple[int, int, EngineRow]] = []
        self._held_back: list[EngineRow] = []
        """Requests that wait for a version of the weights."""
        self._num_reserved = 0
        self._num_kv = 0
        """Tokens of KV of the decoding rows."""
        self._kept: dict[str, int] = {}
        """Tokens of KV kept between the turns of trajectories, the least recently used first."""
        self._num_kept = 0
        self._num_steps = 0
        self._step_s = 0.0
        """The time of each step until the batch changes; 0 if none runs."""
        self._chunk = 0
        """Tokens prefilled in each step."""
        self._counted_until = 0.0
        """The end of the last step that was counted."""
        self._new_weights: tuple[int, float] | None = None
        """The version that is loaded once the step has ended, and the pause for it."""
        self._is_loading = False
        self._reported: tuple[float, LoadFigures | None] = (0.0, None)
        """The last figures that were reported, and when."""
        self._change_at = float("inf")
        """The end of the step after which the batch is looked at next."""
        self._num_planned = 0
        """The rows of the step that runs."""
        self._due = 0

    def __len__(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def figures(self) -> LoadFigures:
        """Return what the engine reports to routers: for a while the same, as its server does."""
        asked_at, known = self._reported
        if known is not None and self._queue.now - asked_at < MAX_LOAD_AGE_S:
            return known
        self._count_steps()
        figures = LoadFigures(
            version=self.version,
            num_running=len(self),
            num_waiting=len(self._waiting) + len(self._held_back),
            num_generated_tokens=self.num_generated,
            running_tokens=self._num_kv + sum(row.num_prompt for row in self._prefilling),
            free_kv_tokens=self._speed.kv_tokens - self._num_reserved,
            num_places=self._max_batch,
        )
        self._reported = self._queue.now, figures
        return figures

    def submit(self, row: EngineRow) -> None:
        """Add a request; it waits for its version, for the end of a step, for a place and for room for its KV."""
        if row.min_version > self.version:
            self._held_back.append(row)
            self._queue.call_later(MAX_VERSION_WAIT_S, lambda: self._let_pass(row))
            return
        heapq.heappush(self._waiting, (row.priority, next(self._numbers), row))
        self._look_soon()

    def _let_pass(self, row: EngineRow) -> None:
        """Queue a request that has waited for a version, unless it has gone."""
        if row in self._held_back:
            self._held_back.remove(row)
            heapq.heappush(self._waiting, (row.priority, next(self._numbers), row))
            self._look_soon()

    def abort(self, row: EngineRow) -> int:
        """Remove a request before it is done; return the tokens that it has generated."""
        self._count_steps()
        generated = self._count_generated(row)
        if row.state == "waiting":
            self._waiting = [one for one in self._waiting if one[2] is not row]
            heapq.heapify(self._waiting)
            self._held_back = [one for one in self._held_back if one is not row]
        else:
            self._remove(row, keeps_kv=True)
        row.state = "aborted"
        self._look_soon()
        return generated

    def load(self, version: int, *, stall_s: float) -> None:
        """Switch to other weights after the step that runs, and a pause; all KV is computed again."""
        self._new_weights = version, stall_s
        self._look_soon()

    def fail(self) -> list[EngineRow]:
        """Lose all requests and KV; return the requests."""
        self._count_steps()
        rows = [*(row for _, _, row in sorted(self._waiting, key=lambda one: one[:2])), *self._prefilling]
        rows += self._held_back
        rows += sorted(self._decoding, key=lambda row: (row.target, row.trajectory))
        for row in rows:
            row.state = "aborted"
        self._waiting, self._held_back, self._ends, self._kept = [], [], [], {}
        self._decoding.clear()
        self._prefilling.clear()
        self._num_kept = self._num_reserved = self._num_kv = 0
        self._step_s, self._new_weights, self._is_loading = 0.0, None, False
        self._reported = 0.0, None
        self.is_up = False
        self._due += 1
        self._change_at = float("inf")
        return rows

    def forget(self, trajectory: str) -> None:
        """Release the KV that is kept for a trajectory."""
        self._num_kept -= self._kept.pop(trajectory, 0)

    # ---- steps

    def _look_soon(self) -> None:
        """Look at the batch once the step that runs has ended; at once if none runs."""
        if self._is_loading or not self.is_up:
            return
        at = self._queue.now
        if self._step_s:
            if not self._new_weights and not self._has_changed():
                return
            num = max(1, math.ceil((at - self._counted_until) / self._step_s - _ALMOST))
            at = self._counted_until + num * self._step_s
        self._call_change(at)

    def _has_changed(self) -> bool:
        """Return whether the next step has another batch than this one."""
        return self._has_room() or len(self) != self._num_planned

    def _call_change(self, at: float) -> None:
        """Look at the batch at a time, unless that happens before."""
        if at < self._change_at - _ALMOST * self._step_s:
            self._due += 1
            self._change_at, due = at, self._due
            self._queue.call_at(at, lambda: self._change(due))

    def _count_steps(self) -> None:
        """Account for the steps that have ended since the last change."""
        if not self._step_s:
            return
        steps = int((self._queue.now - self._counted_until) / self._step_s + _ALMOST)
        if steps <= 0:
            return
        elapsed = steps * self._step_s
        self._counted_until += elapsed
        self._num_steps += steps
        self.busy_s += elapsed
        self.row_s += elapsed * len(self)
        decoded = steps * len(self._decoding)
        self.num_generated += decoded
        self._num_kv += decoded
        left = steps * self._chunk
        self.num_prefilled += left
        for row in self._prefilling:
            if left <= 0:
                break
            done = min(row.num_to_prefill, left)
            row.num_to_prefill -= done
            left -= done

    def _change(self, due: int) -> None:
        """Between two steps, move on the rows that have reached the end of a phase, and start the next step."""
        if due != self._due:
            return
        self._count_steps()
        self._change_at = float("inf")
        ended = self._end_rows()
        if self._new_weights is not None:
            self._step_s, self._is_loading = 0.0, True
            _, stall_s = self._new_weights
            self._queue.call_later(stall_s, partial(self._end_load, self._due))
        else:
            self._start_steps()
        for row in ended:
            row.on_end(row)

    def _end_load(self, due: int) -> None:
        """Compute all KV again, with the new weights."""
        if due != self._due or self._new_weights is None:
            return
        self.version, _ = self._new_weights
        self._new_weights, self._is_loading = None, False
        for row in [row for row in self._held_back if row.min_version <= self.version]:
            self._let_pass(row)
        self._kept, self._num_kept = {}, 0
        rows = [*self._prefilling, *sorted(self._decoding, key=lambda row: (row.target, row.trajectory))]
        for row in rows:
            row.generated = self._count_generated(row)
            row.version = row.version if row.generated else self.version
            row.num_to_prefill = max(0 if row.num_new else 1, row.num_prompt + row.generated - 1)
            row.state = "prefilling"
        self._decoding, self._ends, self._num_kv = set(), [], 0
        self._prefilling = deque(row for row in rows if row.num_to_prefill)
        for row in rows:
            if not row.num_to_prefill:
                self._start_decoding(row)
        self._start_steps()

    def _start_steps(self) -> None:
        """Admit requests, and find the time of a step from now on, and when the batch changes next."""
        self._admit()
        self._counted_until, self._num_planned = self._queue.now, len(self)
        batch = len(self._decoding)
        if not self._num_planned:
            self._step_s = 0.0
            return
        while self._ends and self._ends[0][2].state != "decoding":
            heapq.heappop(self._ends)
        budget = max(1, self._tokens_per_step - batch)
        counts = [self._ends[0][0] - self._num_steps] if self._ends else []
        if self._prefilling:
            counts.append(max(1, self._prefilling[0].num_to_prefill // budget))
        steps = min(counts)
        self._chunk, prompts_s = 0, 0.0
        for row in self._prefilling:
            part = min(row.num_to_prefill, budget - self._chunk)
            known = row.num_prompt + row.generated - 1 - row.num_to_prefill + (steps - 1) * part / 2
            prompts_s += self._speed.prefill_s(part, num_known=known)
            self._chunk += part
            if self._chunk >= budget:
                break
        mean_kv = self._num_kv + (steps - 1) * batch / 2
        step_s = self._speed.decode_s(batch, num_kv=mean_kv) if batch else self._speed.base_step_s(self._chunk)
        self._step_s = (step_s + prompts_s) * self._time_scale
        self._call_change(self._queue.now + steps * self._step_s)

    def _end_rows(self) -> list[EngineRow]:
        """Remove and return the rows that are done; others that have their KV now start to decode."""
        ended: list[EngineRow] = []
        while self._prefilling and not self._prefilling[0].num_to_prefill:
            row = self._prefilling.popleft()
            self._start_decoding(row)
            ended += [row] * (not row.num_new)
        while self._ends and self._ends[0][0] <= self._num_steps:
            _, _, row = heapq.heappop(self._ends)
            if row.state == "decoding":
                ended.append(row)
        for row in ended:
            self._remove(row, keeps_kv=True)
            row.state = "done"
        return ended

    # ---- rows

    def _has_room(self) -> bool:
        """Return whether the first request that waits can be admitted."""
        if not self._waiting or len(self) >= self._max_batch:
            return False
        return not len(self) or self._waiting[0][2].num_reserved <= self._speed.kv_tokens - self._num_reserved

    def _admit(self) -> None:
        while self._has_room():
            _, _, row = heapq.heappop(self._waiting)
            self._num_reserved += row.num_reserved
            kept = self._kept.pop(row.trajectory, 0)
            self._num_kept -= kept
            known = max(row.num_known, min(kept, row.num_prompt - 1))
            row.version = self.version
            row.num_to_prefill = max(0 if row.num_new else 1, row.num_prompt - 1 - known)
            row.state = "prefilling"
            if row.num_to_prefill > 0:
                self._prefilling.append(row)
            else:
                self._start_decoding(row)
            self._evict()

    def _start_decoding(self, row: EngineRow) -> None:
        row.state = "decoding"
        row.target = self._num_steps + row.num_new - row.generated
        self._decoding.add(row)
        self._num_kv += row.num_prompt + row.generated
        if row.num_new:
            heapq.heappush(self._ends, (row.target, next(self._numbers), row))

    def _count_generated(self, row: EngineRow) -> int:
        return row.num_new - (row.target - self._num_steps) if row.state == "decoding" else row.generated

    def _remove(self, row: EngineRow, *, keeps_kv: bool) -> None:
        if row.state == "decoding":
            self._decoding.remove(row)
            self._num_kv -= row.num_prompt + self._count_generated(row)
        else:
            self._prefilling.remove(row)
        self._num_reserved -= row.num_reserved
        if keeps_kv and row.state == "decoding":
            num = row.num_prompt + self._count_generated(row)
            self._kept[row.trajectory] = num
            self._num_kept += num
            self._evict()

    def _evict(self) -> None:
        """Evict kept KV, the oldest first, where rows need the room."""
        room = self._speed.kv_tokens - self._num_reserved
        while self._num_kept > room and self._kept:
            name = next(iter(self._kept))
            self._num_kept -= self._kept.pop(name)
