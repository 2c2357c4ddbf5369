"""Where the bytes of a part go in the whole version, cut into messages.

    messages    of a part that is sent, in order; sender and receiver come to the same
    spread      put into its tensor what does not lie there in one run

Where a part is the whole, these are just its bytes, cut: tensors that lie behind one another in both travel as one run.
A box that is rows of its tensor is a run too. Only a box of columns has to be spread by who receives it.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hpcrl.weights.couriers.protocol import BUCKET_NBYTES
from hpcrl.weights.layout import ITEM_SIZES, Layout, Placed, aligned


class Message(NamedTuple):
    """Bytes of a part that travel together."""

    start: int
    stop: int
    """In the part."""
    at: int | None
    """Where they lie in the whole as they are; None: they have to be spread."""
    box: int
    """The part's box they begin with, and end with if they have to be spread."""


def messages(part: Layout, whole: Layout) -> list[Message]:
    """All bytes of a part, in order."""
    runs: list[Message] = []
    tensors = whole.by_name()
    for index, box in enumerate(part.tensors):
        at = _run_of(box, tensors[box.shard.name])
        if not box.nbytes:
            continue
        if at is None:
            runs += _rows(box, index)
            continue
        stop = box.offset + (aligned(box.nbytes) if box.cut is None else box.nbytes)
        if runs and _goes_on(runs[-1], box.offset, at):
            runs[-1] = runs[-1]._replace(stop=stop)
        else:
            runs.append(Message(box.offset, stop, at, index))
    return [message for run in runs for message in _cut(run)]


def spread(data: memoryview, message: Message, *, box: Placed, tensor: Placed, slot: memoryview) -> None:
    """Put rows of a box to where they belong in the slot of the whole."""
    axis = _row_axis(box.shape)
    first, num = (size // _row_nbytes(box) for size in (message.start - box.offset, len(data)))
    start, shape = list(box.shard.start), list(box.shape)
    start[axis], shape[axis] = start[axis] + first, num
    kind = f"<u{ITEM_SIZES[box.dtype]}"
    target = values_of(slot, tensor)
    index = tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))
    target[index] = np.frombuffer(data, kind).reshape(shape)


def values_of(slot: memoryview, tensor: Placed) -> Any:
    """A tensor in a slot as integers of its width, which no copy changes."""
    kind = np.dtype(f"<u{ITEM_SIZES[tensor.dtype]}")
    data = np.frombuffer(slot, np.uint8)[tensor.offset : tensor.offset + tensor.nbytes]
    return data.view(kind).reshape(tensor.shape)


def _goes_on(run: Message, start: int, at: int) -> bool:
    return run.at is not None and run.stop == start and run.at + run.stop - run.start == at


def _run_of(box: Placed, tensor: Placed) -> int | None:
    """Where a box begins in the whole, if its bytes lie there in one run."""
    axis = _row_axis(box.shape)
    if box.shape[axis + 1 :] != tensor.shape[axis + 1 :]:
        return None
    at = 0
    for start, size in zip(box.shard.start, tensor.shape, strict=True):
        at = at * size + start
    return tensor.offset + at * ITEM_SIZES[box.dtype]


def _rows(box: Placed, index: int) -> Iterator[Message]:
    """Whole rows, as many as a message takes."""
    row = _row_nbytes(box)
    step = max(BUCKET_NBYTES // row, 1) * row
    for start in range(0, box.nbytes, step):
        yield Message(box.offset + start, box.offset + min(start + step, box.nbytes), None, index)


def _cut(run: Message) -> Iterator[Message]:
    if run.at is None:
        yield run
        return
    for start in range(run.start, run.stop, BUCKET_NBYTES):
        yield Message(start, min(start + BUCKET_NBYTES, run.stop), run.at + start - run.start, run.box)


def _row_axis(shape: tuple[int, ...]) -> int:
    """The first axis that has more than one of something."""
    return next((axis for axis, size in enumerate(shape) if size != 1), max(len(shape) - 1, 0))


def _row_nbytes(box: Placed) -> int:
    return math.prod(box.shape[_row_axis(box.shape) + 1 :]) * ITEM_SIZES[box.dtype]
