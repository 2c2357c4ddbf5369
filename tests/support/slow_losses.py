"""A loss of a recipe whose micro-batches take long once a file is there."""

import os
import time
from pathlib import Path

from torch import Tensor

SLOW_VARIABLE = "HPCRL_TEST_SLOW"
"""The variable with the path of the file, which has the seconds."""


def is_waiting(request: Path) -> bool:
    """Return whether a micro-batch has read the file."""
    return _answer(request).exists()


def wait_before(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return a loss, after a while."""
    request = Path(os.environ[SLOW_VARIABLE])
    if request.exists():
        _answer(request).touch()
        time.sleep(float(request.read_text()))
    return -(logprobs - behaviour).exp() * advantages


def _answer(request: Path) -> Path:
    return request.with_suffix(".waiting")
