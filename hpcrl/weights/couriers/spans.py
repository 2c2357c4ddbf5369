"""The spans of a part: its bytes as messages, with their place in the whole version.

    ByteSpan          bytes of a part that are sent together
    split_into_spans  split a part that is sent, in order; sender and receiver compute the same spans
    scatter           put bytes into a tensor where they are not contiguous

If a part is the whole, the spans are just its bytes, split: tensors that are adjacent in both are sent as one run.
A shard of rows of its tensor is a run too. Only a shard of columns must be scattered by its receiver.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hpcrl.weights.couriers.protocol import BUCKET_NBYTES
from hpcrl.weights.layout import ITEM_SIZES, TensorLayout, TensorSlot, align_nbytes, view_values


class ByteSpan(NamedTuple):
    """The bytes of a part that are sent together."""

    start: int
    stop: int
    """End in the part, as `start`."""
    target_start: int | None
    """Offset in the whole where they are contiguous; None: they must be scattered."""
    shard_index: int
    """The part's shard that they start with, and end with if they must be scattered."""


def split_into_spans(part: TensorLayout, whole: TensorLayout) -> list[ByteSpan]:
    """Split all bytes of a part into spans, in order."""
    runs: list[ByteSpan] = []
    tensors = whole.tensors_by_name()
    for index, shard_slot in enumerate(part.tensors):
        target_start = _find_run_start(shard_slot, tensors[shard_slot.shard.name])
        if not shard_slot.nbytes:
            continue
        if target_start is None:
            runs += _split_rows(shard_slot, index)
            continue
        stop = shard_slot.offset + (align_nbytes(shard_slot.nbytes) if shard_slot.cut is None else shard_slot.nbytes)
        if runs and _is_contiguous(runs[-1], shard_slot.offset, target_start):
            runs[-1] = runs[-1]._replace(stop=stop)
        else:
            runs.append(ByteSpan(shard_slot.offset, stop, target_start, index))
    return [span for run in runs for span in _split_run(run)]


def scatter(data: memoryview, span: ByteSpan, *, shard_slot: TensorSlot, tensor: TensorSlot, slot: memoryview) -> None:
    """Copy rows of a shard to their place in the slot of the whole."""
    axis = _find_row_axis(shard_slot.shape)
    first, num = (size // _compute_row_nbytes(shard_slot) for size in (span.start - shard_slot.offset, len(data)))
    start, shape = list(shard_slot.shard.start), list(shard_slot.shape)
    start[axis], shape[axis] = start[axis] + first, num
    int_dtype = f"<u{ITEM_SIZES[shard_slot.dtype]}"
    target = view_values(slot, tensor)
    index = tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))
    target[index] = np.frombuffer(data, int_dtype).reshape(shape)


def _is_contiguous(run: ByteSpan, start: int, target_start: int) -> bool:
    return (
        run.target_start is not None and run.stop == start and run.target_start + run.stop - run.start == target_start
    )


def _find_run_start(shard_slot: TensorSlot, tensor: TensorSlot) -> int | None:
    """Return the offset of a shard in the whole; None if its bytes are not contiguous there."""
    axis = _find_row_axis(shard_slot.shape)
    if shard_slot.shape[axis + 1 :] != tensor.shape[axis + 1 :]:
        return None
    first_value = 0
    for start, size in zip(shard_slot.shard.start, tensor.shape, strict=True):
        first_value = first_value * size + start
    return tensor.offset + first_value * ITEM_SIZES[shard_slot.dtype]


def _split_rows(shard_slot: TensorSlot, index: int) -> Iterator[ByteSpan]:
    """Split a shard into messages of whole rows."""
    row = _compute_row_nbytes(shard_slot)
    step = max(BUCKET_NBYTES // row, 1) * row
    for start in range(0, shard_slot.nbytes, step):
        yield ByteSpan(shard_slot.offset + start, shard_slot.offset + min(start + step, shard_slot.nbytes), None, index)


def _split_run(run: ByteSpan) -> Iterator[ByteSpan]:
    if run.target_start is None:
        yield run
        return
    for start in range(run.start, run.stop, BUCKET_NBYTES):
        yield ByteSpan(
            start, min(start + BUCKET_NBYTES, run.stop), run.target_start + start - run.start, run.shard_index
        )


def _find_row_axis(shape: tuple[int, ...]) -> int:
    """Return the first axis with more than one entry."""
    return next((axis for axis, size in enumerate(shape) if size != 1), max(len(shape) - 1, 0))


def _compute_row_nbytes(shard_slot: TensorSlot) -> int:
    return math.prod(shard_slot.shape[_find_row_axis(shard_slot.shape) + 1 :]) * ITEM_SIZES[shard_slot.dtype]
