"""The experts that the model of an engine sends tokens to, recorded pass by pass.

    ExpertRecorder   what the routers of a model choose in its passes
    ExpertHistory    the experts of one row

Legend: B rows, Q new tokens of a row, N tokens, L layers with experts, K experts of a token
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpcrl.errors import EngineError
from hpcrl.models.expert_routers import find_routers
from hpcrl.spool.routed_experts import choose_expert_dtype


class ExpertRecorder:
    """The choices of a model's routers, in the passes that are watched."""

    def __init__(self, model: Any) -> None:
        routers: list[Any] = find_routers(model)
        if not routers:
            raise EngineError(
                "train.router_replay = true needs a model with experts, whose routers transformers calls `gate`, and "
                f"a {type(model).__name__} has none that are known: remove it"
            )
        self._dtype = choose_expert_dtype(routers[0].num_experts)
        self._is_watching = False
        self._chosen: list[torch.Tensor] = [torch.zeros(0)] * len(routers)
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._record, layer))

    @contextmanager
    def watch(self) -> Iterator[None]:
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False

    def read_pass(self, num_rows: int) -> NDArray[Any]:
        """Return the experts of the last pass that was watched, as [B, Q, L, K]."""
        chosen_MLK = torch.stack(self._chosen, dim=1).cpu().numpy().astype(self._dtype)
        return chosen_MLK.reshape(num_rows, -1, *chosen_MLK.shape[1:])

    def _record(self, layer: int, _router: Any, _inputs: Any, outputs: Any) -> None:
        if self._is_watching:
            _, _, self._chosen[layer] = outputs


class ExpertHistory:
    """The experts of the tokens of a row that passes have read, each as the first pass chose them."""

    def __init__(self) -> None:
        self._num = 0
        self._experts_NLK: NDArray[Any] | None = None

    def __len__(self) -> int:
        return self._num

    def add(self, start: int, experts_NLK: NDArray[Any]) -> None:
        """Add the tokens from `start` on that are new; those before have been read."""
        assert start <= self._num, "passes read tokens in order"
        new_NLK = experts_NLK[self._num - start :]
        if not len(new_NLK):
            return
        end = self._num + len(new_NLK)
        if self._experts_NLK is None or end > len(self._experts_NLK):
            room_NLK = np.empty((2 * end - self._num, *new_NLK.shape[1:]), new_NLK.dtype)
            known = [] if self._experts_NLK is None else [self._experts_NLK[: self._num]]
            self._experts_NLK = np.concatenate([*known, room_NLK])
        self._experts_NLK[self._num : end] = new_NLK
        self._num = end

    def read(self, start: int, end: int) -> NDArray[Any]:
        """Return a copy for some tokens, less those that no pass has read yet."""
        if self._experts_NLK is None:
            return np.zeros((0, 0, 0), np.uint8)
        return self._experts_NLK[start : min(end, self._num)].copy()

    def cut(self, num: int) -> None:
        """Forget all but the first tokens."""
        self._num = min(self._num, num)
