"""The bytes of all tensors that are alive, and the most there were: those of a rank's passes."""

import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
}
ATTENTION_GRADIENT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class LiveBytes(TorchDispatchMode):
    """A mode that counts the tensors which are made under it, each storage once.

    Products in bf16 and the gradient of attention are not computed, but zero: they would take nearly all of the time,
    most of all on a CPU without instructions for bf16, and no size depends on their values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()
        self._current = 0
        self.peak = 0

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave a tensor that exists already out of the count."""
        self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and all(each.dtype == torch.bfloat16 for each in args):
            result = _make_product(*args[-2:])
        elif func is ATTENTION_GRADIENT:
            result = [torch.zeros_like(each) for each in args[1:4]]
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._current += num_bytes
            self.peak = max(self.peak, self._current)
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._current -= num_bytes


def _make_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.new_zeros((*left.shape[:-1], right.shape[-1]))


def measure_megatron_passes(world: Any, cases: list[dict[str, Any]]) -> list[int]:
    """Return the most bytes that Megatron's passes hold beside weights and gradients, for each case."""
    from hpcrl.testing.fake_steps import make_micro_batch
    from hpcrl.trainers.megatron.layers import compute_token_logprobs
    from hpcrl.trainers.megatron.trainer import MegatronTrainer
    from tests.support.learners import settings

    found = []
    for case in cases:
        train = settings(trainer="megatron", precision="bf16", **case["train"])
        trainer = MegatronTrainer(Path(case["model"]), train, world=world)
        chunks = trainer._model_part.chunks

        def sum_logprobs(micro: Any, hidden: Any, trainer: Any = trainer, chunk: Any = chunks[-1]) -> Any:
            size = trainer.vocabulary_size
            positions = trainer._model_part.positions
            logprobs, _ = compute_token_logprobs(
                chunk, micro, hidden, positions=positions, vocabulary_size=size, temperature=1.0
            )
            return logprobs.sum(), None

        # Gradients exist from the first passes on, however few tokens these have.
        few, micro = (make_micro_batch(num, is_packed=False, has_mask=True) for num in (32, case["num_tokens"]))
        num = case.get("num_micro_batches", train.degrees.pipeline)
        trainer._run_schedule([few] * num, sum_logprobs, forward_only=False, chunks=chunks)
        batches = [micro] * num
        with LiveBytes() as live:
            for parameter in chunks.parameters():
                live.ignore(parameter)
                live.ignore(parameter.grad)
            trainer._run_schedule(batches, sum_logprobs, forward_only=False, chunks=chunks)
        found.append(live.peak)
    return found
