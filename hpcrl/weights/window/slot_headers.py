"""The headers of a window's slots, and work on a slot that the processes of a node share.

    SlotState   the content of a slot
    SlotHeads   the headers and tables of both slots
    SharedWork  the kinds of work: compute checksums, or check them

A slot's generation is odd while it is written. Its seal covers generation, version and checksums, so that a header
that was read half old, half new counts as no version, whatever the order in which writes become visible.

Several processes of the node compute and check a slot's checksums together: a mark for each tensor records that a
process has started with it, or that it is done. Marks include the generation, so that old ones do not count.
"""

import functools
import mmap
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import xxhash

from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.window.file import SLOT_HEAD_OFFSETS, WindowOffsets

CLAIM_TIMEOUT_S = 1.0
"""The longest wait for work that another process has started; that process may have been killed."""
CLAIM_POLL_INTERVAL_S = 0.0002
_SLOT_HEAD = struct.Struct("=Qqqd16s")
"""Generation, version, step, time of creation, seal."""
SharedWork = Literal["sum", "check"]
_MARKS: dict[SharedWork, tuple[int, int]] = {"sum": (1, 2), "check": (3, 4)}
"""Started, done: the lowest bits of a mark; the other bits are the generation."""
_MARK_BITS = 3


@dataclass(frozen=True)
class SlotState:
    """The content of a slot."""

    slot: int
    generation: int
    version: int
    step: int
    created: float
    sums: bytes


@dataclass(frozen=True)
class SlotHeads:
    """The headers and tables of both slots, in mapped memory."""

    head: mmap.mmap
    layout: TensorLayout
    offsets: WindowOffsets

    def generation(self, slot: int) -> int:
        return int(memoryview(self.head).cast("Q")[SLOT_HEAD_OFFSETS[slot] // 8])

    def set_generation(self, slot: int, generation: int) -> None:
        memoryview(self.head).cast("Q")[SLOT_HEAD_OFFSETS[slot] // 8] = generation

    def read(self, slot: int) -> SlotState | None:
        """Return the content of a slot; None if it is empty or being written."""
        generation, version, step, created, seal = _SLOT_HEAD.unpack_from(self.head, SLOT_HEAD_OFFSETS[slot])
        if generation % 2 or generation == 0:
            return None
        sums = self.sums(slot)
        state = SlotState(slot=slot, generation=generation, version=version, step=step, created=created, sums=sums)
        return state if _compute_seal(state) == seal else None

    def write(self, state: SlotState) -> None:
        """Write the header of a slot; its generation is written last, and makes the slot visible."""
        self.head[self.offsets.checksums_slice(state.slot)] = state.sums
        head = (state.generation, state.version, state.step, state.created, _compute_seal(state))
        start = SLOT_HEAD_OFFSETS[state.slot]
        self.head[start + 8 : start + _SLOT_HEAD.size] = _SLOT_HEAD.pack(*head)[8:]
        self.set_generation(state.slot, state.generation)

    def newest(self) -> SlotState | None:
        """Return the newer of the two slots' states."""
        states = [state for slot in (0, 1) if (state := self.read(slot)) is not None]
        return max(states, key=lambda state: state.version, default=None)

    def sums(self, slot: int) -> bytes:
        return self.head[self.offsets.checksums_slice(slot)]

    def set_sum(self, slot: int, index: int, checksum: bytes) -> None:
        self.head[self.offsets.checksum_slice(slot, index)] = checksum

    def share_work(self, work: SharedWork, slot: int, generation: int, process: Callable[[int], None]) -> None:
        """Call `process` for the index of every tensor not done elsewhere; all is done when this returns.

        Work that another process has started and not finished within CLAIM_TIMEOUT_S is done here.
        """
        started, done = (generation << _MARK_BITS | mark for mark in _MARKS[work])
        mark_indices = [self.offsets.mark_index(slot, index) for index in range(len(self.layout.tensors))]
        with memoryview(self.head).cast("Q") as marks:
            remaining = [index for index in self._largest_first if marks[mark_indices[index]] != done]
            for index in remaining:
                if marks[mark_indices[index]] not in (started, done):
                    marks[mark_indices[index]] = started
                    process(index)
                    marks[mark_indices[index]] = done
            deadline = time.monotonic() + CLAIM_TIMEOUT_S
            for index in remaining:
                while marks[mark_indices[index]] == started and time.monotonic() < deadline:
                    time.sleep(CLAIM_POLL_INTERVAL_S)
                if marks[mark_indices[index]] != done:
                    process(index)
                    marks[mark_indices[index]] = done

    def mark_all(self, work: SharedWork, slot: int, generation: int) -> None:
        """Mark every tensor as done."""
        done = generation << _MARK_BITS | _MARKS[work][1]
        with memoryview(self.head).cast("Q") as marks:
            for index in range(len(self.layout.tensors)):
                marks[self.offsets.mark_index(slot, index)] = done

    @functools.cached_property
    def _largest_first(self) -> list[int]:
        tensors = self.layout.tensors
        return sorted(range(len(tensors)), key=lambda index: tensors[index].nbytes, reverse=True)


def _compute_seal(state: SlotState) -> bytes:
    head = struct.pack("=Qqqd", state.generation, state.version, state.step, state.created)
    return xxhash.xxh3_128_digest(head + state.sums)
