"""A rank that runs out of memory during a step, on its GPU or on its node.

StepMemoryError    the error, with the micro-batch that was being computed
watch_memory       raise it in place of what torch, numpy or Python raise
is_out_of_memory   whether an error is a lack of memory

The other ranks wait for this one, so no rank can repeat the step by itself: the train role records what ran out, and
all ranks are started again with lower limits (`hpcrl.campaign_dir.train_limits`).
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpcrl.errors import TrainError, show_error
from hpcrl.learn.batch import MicroBatch
from hpcrl.system.pulse import note_work

_MESSAGES = (
    "CUDA error: out of memory",
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
)
"""The texts in a RuntimeError of libraries if memory is short."""
MAX_CAUSES = 20


class StepMemoryError(TrainError):
    """A rank ran out of memory during a step."""

    def __init__(self, detail: str, *, num_rows: int = 0, num_tokens: int = 0) -> None:
        super().__init__(detail)
        self.detail = detail
        self.num_rows = num_rows
        """The rows of the micro-batch that was being computed; 0 if there was none."""
        self.num_tokens = num_tokens
        """Its tokens, padding included."""
        self.step = 0
        self.fitting_tokens = 0
        """The tokens of the largest micro-batch that there was room for."""


@contextmanager
def watch_memory(micro: MicroBatch | None = None) -> Iterator[None]:
    """Raise StepMemoryError if memory runs out inside, with the size of the micro-batch that is computed there."""
    note_work()
    try:
        yield
    except StepMemoryError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        num_rows, num_tokens = (0, 0) if micro is None else (_count_rows(micro), micro.num_padded_tokens)
        raise StepMemoryError(show_error(error), num_rows=num_rows, num_tokens=num_tokens) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that caused it, is a lack of memory."""
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is None:
            return False
        if isinstance(cause, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            return True
        if isinstance(cause, RuntimeError) and any(message in str(cause) for message in _MESSAGES):
            return True
        cause = cause.__cause__
    return False


def _count_rows(micro: MicroBatch) -> int:
    """Count the rows; packed ones are in one sequence."""
    return len(micro.inputs_BT) if micro.positions_BT is None else micro.num_sequences
