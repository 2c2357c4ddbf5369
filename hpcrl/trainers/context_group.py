"""Attention to whole rows: those that ranks divide (context parallelism), and packed ones.

    ContextGroup            this rank among those that have the same rows
    ContextPart             the positions of a micro-batch that this rank has
    WHOLE_CONTEXT           the group of a rank that has whole rows
    make_context_group      divide the ranks of a world into groups
    attend_whole_rows       let the ranks of a group attend to all positions of their rows
    use_context_attention   let a model of transformers see whole rows in its attention, and nothing else

Attention needs all positions of a row, and nothing else in a layer does. Around it the ranks of a group swap parts
all-to-all: each gives its positions of some heads, and has all positions of the others (Ulysses, arXiv 2309.14509). All
ranks of a group make the same passes. The loss is computed from the log-probs of all tokens on each of them, and the
gradient of a rank is the part that comes from its own positions, so gradients are summed over the group.

Of packed rows each attends to itself alone, one after the other: transformers' own way is a mask of all pairs.

Legend: B rows, T positions, S those of this rank, H heads of queries, K heads of keys and values, D their size, N model
tokens, P ranks of the group
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hpcrl.errors import TrainError
from hpcrl.hardware.architecture import count_kv_repeats, find_context_conflict, read_architecture
from hpcrl.trainers.attention import attend_causally
from hpcrl.trainers.world import World

CONTEXT_ATTENTION = "hpcrl_context"
"""The name of this attention in transformers."""


@dataclass(frozen=True)
class ContextGroup:
    """A rank among the `size` ones that divide the positions of their rows."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The torch group of these ranks."""
    is_packed: bool = False
    """True if micro-batches are packed rows, with their own attention."""

    def divide(self, inputs_BT: Tensor, mask_BT: Tensor, *, positions_BT: Tensor | None) -> "ContextPart":
        """Return this rank's part of a micro-batch; rows are padded to a length that can be divided."""
        if self.size == 1 and not self.is_packed:
            return ContextPart(self, inputs_BT, mask_BT, positions_BT)
        starts = [0] if positions_BT is None else (positions_BT[0] == 0).nonzero().flatten().tolist()
        if self.size == 1:
            return ContextPart(self, inputs_BT, mask_BT, positions_BT, row_starts=starts)
        if positions_BT is None:
            positions_BT = torch.arange(inputs_BT.shape[1], device=inputs_BT.device).expand_as(inputs_BT)
        own_BT = torch.zeros_like(mask_BT)
        own_BT[:, self._find_span(inputs_BT.shape[1])] = True
        return ContextPart(
            self,
            self.take(inputs_BT),
            self.take(mask_BT),
            self.take(positions_BT),
            own_N=own_BT[mask_BT].nonzero().flatten(),
            num_tokens=int(mask_BT.sum()),
            row_starts=starts,
        )

    def take(self, values_BT: Tensor) -> Tensor:
        """Return this rank's positions of a tensor, with zeros as padding."""
        length = values_BT.shape[1]
        padding = (*(0, 0) * (values_BT.ndim - 2), 0, -length % self.size)
        return pad(values_BT, padding)[:, self._find_span(length)]

    def _find_span(self, length: int) -> slice:
        size = -(-length // self.size)
        return slice(self.rank * size, (self.rank + 1) * size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks of the group, on each."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def swap_heads(self, heads_BHSD: Tensor) -> Tensor:
        """Give other ranks this one's positions of their heads; return all positions of a part of the heads."""
        if self.size == 1:
            return heads_BHSD
        rows, num_heads, length, size = heads_BHSD.shape
        parts = heads_BHSD.view(rows, self.size, num_heads // self.size, length, size).transpose(0, 1)
        swapped = _swap_parts(parts, self.group)
        return swapped.permute(1, 2, 0, 3, 4).reshape(rows, num_heads // self.size, self.size * length, size)

    def swap_positions(self, heads_BHTD: Tensor) -> Tensor:
        """Give other ranks their positions of this one's heads; return all heads of this rank's positions, as BSHD."""
        if self.size == 1:
            return heads_BHTD.transpose(1, 2)
        rows, num_heads, length, size = heads_BHTD.shape
        parts = heads_BHTD.view(rows, num_heads, self.size, length // self.size, size).permute(2, 0, 3, 1, 4)
        swapped = _swap_parts(parts, self.group)
        return swapped.permute(1, 2, 0, 3, 4).reshape(rows, length // self.size, self.size * num_heads, size)


WHOLE_CONTEXT = ContextGroup()
"""The group of a rank that has whole rows."""


@dataclass(frozen=True, eq=False)
class ContextPart:
    """This rank's positions of a micro-batch."""

    context: ContextGroup
    inputs_BS: Tensor
    mask_BS: Tensor
    positions_BS: Tensor | None
    own_N: Tensor | None = None
    """The numbers of the model tokens at these positions among those of the whole micro-batch; None if all are."""
    num_tokens: int = 0
    """The model tokens of the whole micro-batch, where others have some of them."""
    row_starts: list[int] | None = None
    """The first position of each packed row, in the whole micro-batch; None where transformers' attention is used."""

    @property
    def options(self) -> dict[str, Any]:
        """The further options of a model's forward pass."""
        return {} if self.row_starts is None else {"context_part": self}

    def select(self, column_N: Tensor) -> Tensor:
        """Return this rank's part of a column."""
        return column_N if self.own_N is None else column_N[self.own_N]

    def join(self, *columns: Tensor) -> list[Tensor]:
        """Join columns of this rank's tokens with those of the other ranks, in the order of the whole micro-batch."""
        if self.own_N is None:
            return list(columns)
        joined: Tensor = _JoinColumns.apply(torch.stack(columns), self)  # type: ignore[no-untyped-call]
        return [column.clone() for column in joined.unbind()]  # FSDP wants no views as outputs


def make_context_group(world: World, *, size: int, is_packed: bool = False) -> ContextGroup:
    """Make groups of this many ranks that follow one another, and return this rank's; all ranks must call this."""
    if world.size % size:
        raise TrainError(
            f"train.context_parallel = {size} does not divide the {world.size} ranks of the trainer: choose a "
            "resources.train.num_workers that is a multiple of it"
        )
    if size == 1:
        return ContextGroup(is_packed=is_packed)
    mesh = init_device_mesh(world.device.type, (world.size // size, size), mesh_dim_names=("data", "context"))
    return ContextGroup(rank=world.rank % size, size=size, group=mesh.get_group("context"), is_packed=is_packed)


def use_context_attention(module: Any, context: ContextGroup) -> ContextGroup:
    """Let the attention of a model see all positions of the group; return the group by which its rows are divided.

    Packed rows of a model for which this is not known to be right keep transformers' attention, with its mask. Whole
    padded rows do too, unless attention is compressed. Raise TrainError if ranks cannot divide the positions.
    """
    config = module.config.to_dict()
    if (conflict := find_context_conflict(config, size=context.size)) is not None:
        if context.size == 1:
            return replace(context, is_packed=False)
        raise TrainError(conflict)
    if context.size == 1 and not context.is_packed and not read_architecture(config).kv_rank:
        return context
    ALL_ATTENTION_FUNCTIONS.register(CONTEXT_ATTENTION, torch.compiler.disable(_attend))  # type: ignore[no-untyped-call]
    module.set_attn_implementation(CONTEXT_ATTENTION)
    return context


def _attend(
    _module: Any,
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    _mask: None,
    *,
    context_part: ContextPart | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend to whole rows for a part of the heads, as transformers calls it; packed rows see only themselves."""
    context, starts = WHOLE_CONTEXT, [0]
    if context_part is not None:
        context, starts = context_part.context, context_part.row_starts or starts
    found_BSHD = attend_whole_rows(
        *(query_BHSD, key_BKSD, value_BKSD),
        context=context,
        starts=starts,
        scaling=scaling,
        sliding_window=sliding_window,
    )
    return found_BSHD, None


def attend_whole_rows(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    context: ContextGroup,
    starts: Sequence[int] = (0,),
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Attend to all positions of the rows that the ranks of `context` divide; return this rank's, as BSHD."""
    repeats = count_kv_repeats(query_BHSD.shape[1], key_BKSD.shape[1], size=context.size)
    if repeats > 1:
        key_BKSD, value_BKSD = (each.repeat_interleave(repeats, dim=1) for each in (key_BKSD, value_BKSD))
    query, key, value = (context.swap_heads(each) for each in (query_BHSD, key_BKSD, value_BKSD))
    ends = [*starts[1:], query.shape[2]]
    rows = [
        _attend_row(
            *(each[:, :, start:end] for each in (query, key, value)), scaling=scaling, sliding_window=sliding_window
        )
        for start, end in zip(starts, ends, strict=True)
    ]
    return context.swap_positions(rows[0] if len(rows) == 1 else torch.cat(rows, dim=2))


def _attend_row(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, sliding_window: int | None
) -> Tensor:
    mask_TT, length = None, query.shape[2]
    if sliding_window is not None and sliding_window < length:
        mask_TT = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        mask_TT = mask_TT.triu(1 - sliding_window)
    return attend_causally(query, key, value, scale=scaling, mask_TT=mask_TT)


class _SwapParts(torch.autograd.Function):
    """A function that sends the n-th part to the n-th rank of a group; so does its gradient."""

    @staticmethod
    def forward(ctx: Any, parts_P: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts_P = parts_P.contiguous()
        received_P = torch.empty_like(parts_P)
        dist.all_to_all_single(received_P, parts_P, group=group)
        return received_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _swap_parts(grads[0], ctx.group), None


def _swap_parts(parts_P: Tensor, group: Any) -> Tensor:
    return cast(Tensor, _SwapParts.apply(parts_P, group))  # type: ignore[no-untyped-call]


class _JoinColumns(torch.autograd.Function):
    """A function that joins columns; their gradient is that of this rank's tokens, whose loss every rank computes."""

    @staticmethod
    def forward(ctx: Any, columns_N: Tensor, part: ContextPart) -> Tensor:
        ctx.own_N = part.own_N
        whole_N = columns_N.new_zeros(len(columns_N), part.num_tokens)
        whole_N[:, part.own_N] = columns_N
        return part.context.sum(whole_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][:, ctx.own_N], None
