"""What megatron-core needs to run without CUDA, all of it: for tests and small machines, over gloo.

Only inside `adapted()`, and only where there is no CUDA: tensor factories asked for a GPU answer on the CPU, the
current device is the CPU, and there is nothing to synchronise. The generators that Megatron keeps for dropout do
nothing: a trainer has no dropout.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

SETTINGS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "batch_p2p_comm": False,
    "batch_p2p_sync": False,
}
"""Of TransformerConfig, where there is no CUDA."""


@contextlib.contextmanager
def adapted() -> Iterator[None]:
    """Around everything that Megatron does; with CUDA it changes nothing."""
    if torch.cuda.is_available():
        yield
        return
    with (
        patch("torch.cuda.current_device", lambda: CPU),
        patch("torch.cuda.synchronize", lambda *_: None),
        _OnCpu(),
    ):
        yield


class _OnCpu(TorchFunctionMode):
    """Calls of torch, with the CPU for any GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in named and named["device"] is not None and torch.device(named["device"]).type == "cuda":
            named["device"] = CPU
        return func(*args, **named)
