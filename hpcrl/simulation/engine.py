"""An engine in simulated time, by the cost model: the same batching as `hpcrl.engines.sim`, in few events.

FluidEngine   a batch whose rows advance together, step after step; events only where the batch changes
EngineRow     a request in it

Between two changes of the batch every step takes the same time, but for KV that grows: these steps are one event. A
step decodes every row that has its KV, and the rest of its tokens go to rows that do not (chunked prefill).
"""

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

from hpcrl.engines.base import LoadFigures
from hpcrl.hardware.cost_model import WorkerSpeed
from hpcrl.simulation.clock import EventQueue

_ALMOST = 1e-6


class EngineRow:
    """A request that an engine serves."""

    __slots__ = (
        "generated",
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
    ) -> None:
        """Make the row of a turn; with `num_new` 0 it only needs its KV. `num_known` tokens were handed over."""
        self.trajectory = trajectory
        self.num_prompt = num_prompt
        self.num_new = num_new
        self.on_end = on_end
        self.num_known = num_known
        self.priority = priority
        self.num_to_prefill = 0.0
        self.generated = 0.0
        """Tokens generated before it had its KV computed again."""
        self.target = 0.0
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
        self.num_generated = 0.0
        self.num_prefilled = 0.0
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
        self._ends: list[tuple[float, int, EngineRow]] = []
        self._num_reserved = 0
        self._num_kv = 0.0
        """Tokens of KV of the decoding rows."""
        self._kept: dict[str, int] = {}
        """Tokens of KV kept between the turns of trajectories, the least recently used first."""
        self._num_kept = 0
        self._steps = 0.0
        self._step_s = 0.0
        self._chunk = 0.0
        """Tokens prefilled in each step."""
        self._updated_at = 0.0
        self._paused_until = 0.0
        self._due = 0

    def __len__(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def figures(self) -> LoadFigures:
        """Return what the engine reports to routers."""
        return LoadFigures(
            version=self.version,
            num_running=len(self),
            num_waiting=len(self._waiting),
            num_generated_tokens=int(self.num_generated),
            running_tokens=int(self._num_kv) + sum(row.num_prompt for row in self._prefilling),
            free_kv_tokens=self._speed.kv_tokens - self._num_reserved,
            num_places=self._max_batch,
        )

    def submit(self, row: EngineRow) -> None:
        """Add a request; it waits until there is a place and room for its KV."""
        self._advance()
        heapq.heappush(self._waiting, (row.priority, next(self._numbers), row))
        self._admit()
        self._schedule()

    def abort(self, row: EngineRow) -> float:
        """Remove a request before it is done; return the tokens that it has generated."""
        self._advance()
        if row.state == "waiting":
            self._waiting = [one for one in self._waiting if one[2] is not row]
            heapq.heapify(self._waiting)
            generated = 0.0
        else:
            generated = self._count_generated(row)
            self._remove(row, keeps_kv=True)
        row.state = "aborted"
        self._admit()
        self._schedule()
        return generated

    def load(self, version: int, *, stall_s: float) -> None:
        """Switch to other weights after a pause; all KV is computed again."""
        self._advance()
        self.version = version
        self._paused_until = max(self._paused_until, self._queue.now + stall_s)
        self._updated_at = self._paused_until
        self._kept, self._num_kept = {}, 0
        rows = [*self._prefilling, *sorted(self._decoding, key=lambda row: (row.target, row.trajectory))]
        for row in rows:
            row.generated = self._count_generated(row)
            row.num_to_prefill = row.num_prompt + row.generated - 1
            row.state = "prefilling"
        self._decoding, self._ends, self._num_kv = set(), [], 0.0
        self._prefilling = deque(rows)
        self._schedule()

    def fail(self) -> list[EngineRow]:
        """Lose all requests and KV; return the requests."""
        self._advance()
        rows = [*(row for _, _, row in sorted(self._waiting, key=lambda one: one[:2])), *self._prefilling]
        rows += sorted(self._decoding, key=lambda row: (row.target, row.trajectory))
        for row in rows:
            row.state = "aborted"
        self._waiting, self._ends, self._kept = [], [], {}
        self._decoding.clear()
        self._prefilling.clear()
        self._num_kept = self._num_reserved = 0
        self._num_kv = 0.0
        self.is_up = False
        self._due += 1
        return rows

    def forget(self, trajectory: str) -> None:
        """Release the KV that is kept for a trajectory."""
        self._num_kept -= self._kept.pop(trajectory, 0)

    # ---- time

    def _advance(self) -> None:
        """Account for the steps since the last change."""
        now = self._queue.now
        elapsed = now - self._updated_at
        if elapsed <= 0 or not self._step_s:
            self._updated_at = max(now, self._updated_at)
            return
        self._updated_at = now
        num = len(self)
        if not num:
            return
        steps = elapsed / self._step_s
        self._steps += steps
        self.busy_s += elapsed
        self.row_s += elapsed * num
        decoded = steps * len(self._decoding)
        self.num_generated += decoded
        self._num_kv += decoded
        left = steps * self._chunk
        self.num_prefilled += left
        for row in self._prefilling:
            done = min(row.num_to_prefill, left)
            row.num_to_prefill -= done
            left -= done
            if left <= 0:
                break

    def _schedule(self) -> None:
        """Find the time of a step from now on, and when the batch changes next."""
        self._due += 1
        batch = len(self._decoding)
        budget = max(1.0, self._tokens_per_step - batch)
        chunk, prompts_s, to_first = 0.0, 0.0, float("inf")
        for row in self._prefilling:
            part = min(row.num_to_prefill, budget - chunk)
            known = row.num_prompt + row.generated - 1 - row.num_to_prefill
            prompts_s += self._speed.prefill_s(part, num_known=known)
            chunk += part
            if to_first == float("inf"):
                to_first = max(1.0, row.num_to_prefill / max(part, _ALMOST))
            if chunk >= budget - _ALMOST:
                break
        self._chunk = chunk
        if not batch and not self._prefilling:
            self._step_s = 0.0
            return
        while self._ends and self._ends[0][2].state != "decoding":
            heapq.heappop(self._ends)
        to_end = max(self._ends[0][0] - self._steps, 0.0) if self._ends else float("inf")
        steps = min(to_end, to_first)
        mean_kv = self._num_kv + steps * batch / 2
        steps_s = self._speed.decode_s(batch, num_kv=mean_kv) if batch else self._speed.base_step_s(chunk)
        self._step_s = (steps_s + prompts_s) * self._time_scale
        due, start = self._due, max(self._queue.now, self._paused_until)
        self._queue.call_at(start + steps * self._step_s, lambda: self._change(due))

    def _change(self, due: int) -> None:
        """Move on the rows that have reached the end of a phase."""
        if due != self._due:
            return
        self._advance()
        prefilled: list[EngineRow] = []
        while (
            self._prefilling and self._prefilling[0].num_to_prefill <= _ALMOST * self._prefilling[0].num_prompt + 1e-3
        ):
            row = self._prefilling.popleft()
            self._start_decoding(row)
            prefilled += [row] * (not row.num_new)
        ended = []
        while self._ends and self._ends[0][0] <= self._steps + 1e-3:
            _, _, row = heapq.heappop(self._ends)
            if row.state == "decoding":
                ended.append(row)
        ended += prefilled
        for row in ended:
            self._remove(row, keeps_kv=True)
            row.state = "done"
        self._admit()
        self._schedule()
        for row in ended:
            row.on_end(row)

    # ---- rows

    def _admit(self) -> None:
        while self._waiting and len(self) < self._max_batch and self.is_up:
            row = self._waiting[0][2]
            room = self._speed.kv_tokens - self._num_reserved
            if row.num_reserved > room and len(self):
                return
            heapq.heappop(self._waiting)
            self._num_reserved += row.num_reserved
            kept = self._kept.pop(row.trajectory, 0)
            self._num_kept -= kept
            known = max(row.num_known, min(kept, row.num_prompt - 1))
            row.version = self.version
            row.num_to_prefill = float(max(0 if row.num_new else 1, row.num_prompt - 1 - known))
            row.state = "prefilling"
            if row.num_to_prefill > 0:
                self._prefilling.append(row)
            else:
                self._start_decoding(row)
            self._evict()

    def _start_decoding(self, row: EngineRow) -> None:
        row.state = "decoding"
        row.target = self._steps + row.num_new - row.generated
        self._decoding.add(row)
        self._num_kv += row.num_prompt + row.generated
        if row.num_new:
            heapq.heappush(self._ends, (row.target, next(self._numbers), row))

    def _count_generated(self, row: EngineRow) -> float:
        if row.state != "decoding":
            return row.generated
        return min(float(row.num_new), max(0.0, row.num_new - (row.target - self._steps)))

    def _remove(self, row: EngineRow, *, keeps_kv: bool) -> None:
        if row.state == "decoding":
            self._decoding.remove(row)
            self._num_kv = max(0.0, self._num_kv - row.num_prompt - self._count_generated(row))
        else:
            self._prefilling.remove(row)
        self._num_reserved -= row.num_reserved
        if keeps_kv and row.state == "decoding":
            num = row.num_prompt + int(self._count_generated(row))
            self._kept[row.trajectory] = num
            self._num_kept += num
            self._evict()

    def _evict(self) -> None:
        """Evict kept KV, the oldest first, where rows need the room."""
        room = self._speed.kv_tokens - self._num_reserved
        while self._num_kept > room and self._kept:
            name = next(iter(self._kept))
            self._num_kept -= self._kept.pop(name)
