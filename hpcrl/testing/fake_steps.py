"""Passes of the torch trainer on tensors without data, to see what a rank holds: no GPU, and no memory, is needed.

    measure_passes   the peaks of the forward and of the backward pass of a micro-batch
    PeakBytes        the bytes of one of them
    make_settings, make_micro_batch, run_passes, measure_micro_batch    what it takes, for the same passes with data

The code is the trainer's. Collectives do nothing (torch's process group "fake"), and neither does arithmetic
(FakeTensorMode); torch's trackers count what is alive. Three things are not as in a real step:

- A mask selects a number of tokens that depends on data; the same selection by indices has a known size.
- Transformers makes a mask for attention where it cannot look into the positions; the function that looks is given the
  answer that rows have which are not packed.

- A context group divides a row by its mask; here all tokens are trained, so that a part of them is known without data.

Moments of the optimizer are made by a first step, which is not counted: DTensor makes each whole once, for its shape.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from hpcrl.config.recipe import TrainConfig
from hpcrl.hardware.train_memory import RankSetup
from hpcrl.learn.batch import MicroBatch
from hpcrl.models.weight_files import make_empty
from hpcrl.trainers.adapters import add_adapters
from hpcrl.trainers.context_group import ContextGroup, ContextPart, make_context_group
from hpcrl.trainers.model_files import ModelSource
from hpcrl.trainers.token_model import TokenModel, compute_token_logprobs
from hpcrl.trainers.torch_model import TrainedModel, choose_frozen_dtype
from hpcrl.trainers.world import World

PART_OF = {
    **{"Sharded Param": "weights", "Parameter": "weights", "Sharded Grad": "gradients", "Gradient": "gradients"},
    **{"OptState": "optimizer", "Optstate": "optimizer"},
}
"""The trackers' names of the parts that stay; all others come and go."""


class PeakBytes(NamedTuple):
    """The bytes that a rank holds at a peak."""

    weights: float
    gradients: float
    optimizer: float
    passing: float
    """All that comes and goes."""


def measure_passes(fields: dict[str, Any], setup: RankSetup, *, num_tokens: int) -> list[PeakBytes]:
    """Measure the peaks of forward and backward pass, of a micro-batch that is not the first one of the first step."""
    config = AutoConfig.for_model(**fields)
    train = make_settings(setup)
    with (
        _fake_ranks(setup.num_ranks),
        nullcontext() if setup.is_packed else _positions_in_order(),
        patch.object(ContextGroup, "divide", _divide_row),
    ):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        world = World(size=setup.num_ranks)
        dtype = torch.float32 if setup.trains_all else choose_frozen_dtype(train, world)
        module = make_empty(config, AutoModelForCausalLM, dtype=dtype)
        source = ModelSource(module, {})
        if not setup.trains_all:
            add_adapters(module, rank=setup.lora_rank, alpha=train.lora_alpha)
        context = make_context_group(world, size=setup.context_parallel, is_packed=setup.is_packed)
        called = TokenModel(module, context=context)

        def fill(target: torch.nn.Module, device: torch.device) -> None:
            with mode:
                source.fill(target, device)

        # The mesh of the ranks cannot be made of tensors without data.
        model = TrainedModel(module, train=train, world=world, learning_rate=1e-4, called=called, fill=fill)
        with mode:
            return measure_micro_batch(model, called, make_micro_batch(num_tokens, is_packed=setup.is_packed))


def make_settings(setup: RankSetup) -> TrainConfig:
    """Return the settings of the trainer that has this setup."""
    return TrainConfig(
        num_steps=1,
        rows="packed" if setup.is_packed else "padded",
        groups_per_step=1,
        learning_rate=1e-4,
        sharding="full" if setup.is_sharded else "none",
        precision="bf16" if setup.is_bf16 else "fp32",
        recompute=setup.has_recompute,
        context_parallel=setup.context_parallel,
        lora_rank=setup.lora_rank,
    )


@contextmanager
def _fake_ranks(num: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _positions_in_order() -> AbstractContextManager[Any]:
    """Answer for transformers that rows are not packed."""
    return patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)


def _divide_row(context: ContextGroup, inputs_BT: torch.Tensor, mask_BT: Any, *, positions_BT: Any) -> ContextPart:
    """Return the first part of a row, whose tokens are all trained, without a look at its mask."""
    num_tokens = inputs_BT.shape[1]
    if context.size == 1:
        return ContextPart(context, inputs_BT, mask_BT, positions_BT, row_starts=[0] if context.is_packed else None)
    part = slice(num_tokens // context.size)
    rows, positions = mask_BT
    return ContextPart(
        context,
        inputs_BT[:, part],
        cast(torch.Tensor, (rows[part], positions[part])),
        positions[part].unsqueeze(0),
        own_N=positions[part],
        num_tokens=num_tokens,
        row_starts=[0],
    )


def make_micro_batch(
    num_tokens: int, *, is_packed: bool, device: torch.device | str = "cpu", has_mask: bool = False
) -> MicroBatch:
    """Make one row of this many tokens, all of which are trained; steps with data take a mask."""
    zeros, ids = torch.zeros(num_tokens, device=device), torch.zeros(num_tokens, dtype=torch.long, device=device)
    positions = torch.arange(num_tokens, device=device)
    # A mask selects a number of tokens that depends on data; the same selection as indices has a known size.
    mask = cast(torch.Tensor, (ids, positions))
    if has_mask:
        mask = torch.ones(1, num_tokens, dtype=torch.bool, device=device)
    return MicroBatch(
        inputs_BT=ids.unsqueeze(0),
        mask_BT=mask,
        targets_N=ids,
        behaviour_N=zeros,
        advantages_N=zeros,
        rows_N=ids,
        positions_BT=positions.unsqueeze(0) if is_packed else None,
    )


def measure_micro_batch(model: TrainedModel, called: torch.nn.Module, micro: MicroBatch) -> list[PeakBytes]:
    """Measure the peaks of forward and backward pass."""
    for _ in range(2):  # the moments exist from the first step on, and other micro-batches have left their gradients
        for _ in run_passes(model, micro):
            pass
        if not model.optimizer.state:
            model.optimizer.step()
    if isinstance(called, FSDPModule):
        tracker: MemTracker = FSDPMemTracker(called, model.optimizer)
    else:
        tracker = MemTracker()
        tracker.track_external(called, model.optimizer)
    found = []
    with tracker:
        for _ in run_passes(model, micro):
            found.append(_read_peak(tracker))
            tracker._peak_mem, tracker._peak_mem_snap = {}, {}
    return found


def run_passes(model: TrainedModel, micro: MicroBatch) -> Iterator[None]:
    """Run both passes, with a stop after each."""
    logprobs_N, _ = compute_token_logprobs(model, micro, temperature=1.0)
    yield
    model.backward(logprobs_N.sum())
    yield


def _read_peak(tracker: MemTracker) -> PeakBytes:
    found = dict.fromkeys(PeakBytes._fields, 0.0)
    for snapshot in tracker.get_tracker_snapshot("peak").values():
        for kind, num_bytes in snapshot.items():
            name = str(getattr(kind, "value", kind))
            if name != "Total":
                found[PART_OF.get(name, "passing")] += num_bytes
    return PeakBytes(**found)
