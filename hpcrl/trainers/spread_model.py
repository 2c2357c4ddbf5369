"""The buffer of a node whose data-parallel degree is not the trainer's: batches go to its ranks, log-probs come back.

    SpreadModel          a model that does not train, whole on `data_parallel` of the ranks
    load_spread_models   those of a recipe's nodes
    pack_inputs          micro-batches as one tensor
    unpack_inputs        the same micro-batches, with what a model reads

Nodes with the trainer's own degree have no buffer: each rank runs them on its own batches, and nothing is sent. With
another degree, every `world.size / data_parallel`-th rank has the model. The ranks of a Megatron replica, which all
have the same batches, divide them first; then tokens are sent all-to-all to the nearest rank below with the model, and
log-probs all-to-all to every rank that has the batch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hpcrl.config.pipeline import make_pipeline
from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.batch import MicroBatch
from hpcrl.trainers.context_group import ContextGroup
from hpcrl.trainers.memory_error import watch_memory
from hpcrl.trainers.token_model import compute_token_logprobs
from hpcrl.trainers.torch_model import load_fixed
from hpcrl.trainers.world import World


class SpreadModel:
    """A model of a node, on some of the ranks of a world or on all."""

    def __init__(
        self,
        model_dir: Path,
        train: TrainConfig,
        *,
        data_parallel: int,
        share: int,
        world: World,
        temperature: float,
    ) -> None:
        """Load the model on the ranks that have it; `share` is the share of a step that this rank has."""
        self._world = world
        self._temperature = temperature
        stride = world.size // data_parallel
        self._owners = [rank - rank % stride for rank in range(world.size)]
        """The rank that computes for each rank."""
        owns = self._owners[world.rank] == world.rank
        alone, context = World(device=world.device), ContextGroup(is_packed=train.rows == "packed")
        self._model = load_fixed(model_dir, train=train, world=alone, context=context) if owns else None
        shares = torch.zeros(world.size, dtype=torch.long, device=world.device)
        shares[world.rank] = share
        self._shares: list[int] = world.sum(shares).tolist()

    def move(self, device: torch.device) -> None:
        """Move the weights of this rank, if it has any."""
        if self._model is not None:
            self._model.to(device)

    def compute_logprobs(self, minibatches: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor | None]]:
        """Compute the log-probs of all tokens; all ranks must call this together."""
        mine = [micro for minibatch in minibatches for micro in minibatch]
        found = iter(self._fetch_columns(mine))
        return [[next(found) for _ in minibatch] for minibatch in minibatches]

    def _fetch_columns(self, mine: list[MicroBatch]) -> list[Tensor]:
        world, ranks = self._world, range(self._world.size)
        to_send = pack_inputs([mine[number] for number in self._list_numbers(len(mine), world.rank)])
        nothing = to_send.new_empty(0)
        asked = world.exchange([to_send if rank == self._owners[world.rank] else nothing for rank in ranks])
        computed = [self._compute_column(part) for part in asked]
        answers = world.exchange(
            [
                torch.cat([computed[asker] for asker in ranks if self._shares[asker] == self._shares[rank]])
                for rank in ranks
            ]
        )
        columns: dict[int, Tensor] = {}
        for owner in sorted(set(self._owners)):
            numbers = [
                number
                for asker in self._list_copies(world.rank)
                if self._owners[asker] == owner
                for number in self._list_numbers(len(mine), asker)
            ]
            sizes = [mine[number].num_tokens for number in numbers]
            columns.update(zip(numbers, torch.split(answers[owner], sizes), strict=True))
        return [columns[number] for number in range(len(mine))]

    def _list_copies(self, rank: int) -> list[int]:
        """Return the ranks that have the same batches as this one."""
        return [other for other, share in enumerate(self._shares) if share == self._shares[rank]]

    def _list_numbers(self, num: int, rank: int) -> list[int]:
        """Return which of its `num` micro-batches a rank sends: those of a replica are divided among its ranks."""
        copies = self._list_copies(rank)
        return list(range(copies.index(rank), num, len(copies)))

    def _compute_column(self, packed: Tensor) -> Tensor:
        """Compute the log-probs of the tokens that a rank sent, one micro-batch after the other."""
        found = [torch.zeros(0, device=self._world.device)]
        with torch.no_grad():
            for micro in unpack_inputs(packed):
                assert self._model is not None, "only ranks with the model are asked"
                with watch_memory(micro):
                    found.append(compute_token_logprobs(self._model, micro, temperature=self._temperature)[0])
        return torch.cat(found)


def load_spread_models(
    train: TrainConfig,
    paths: Mapping[str, Path],
    *,
    num_shares: int,
    share: int,
    world: World,
    temperature: float,
) -> dict[str, SpreadModel]:
    """Load the models of the nodes whose degree is not `num_shares`; `paths` are the model directories by node."""
    nodes = make_pipeline(train)
    degrees = {name: nodes[name].data_parallel or num_shares for name in paths}
    return {
        name: SpreadModel(paths[name], train, data_parallel=degree, share=share, world=world, temperature=temperature)
        for name, degree in degrees.items()
        if degree != num_shares
    }


def pack_inputs(micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Pack what a model reads of micro-batches into one tensor; an empty one if there are none."""
    parts = [torch.zeros(0, dtype=torch.long)]
    for micro in micro_batches:
        rows, length = micro.inputs_BT.shape
        is_packed = micro.positions_BT is not None
        parts.append(torch.tensor([rows, length, micro.num_tokens, int(is_packed)]))
        columns = [micro.inputs_BT, micro.mask_BT, micro.targets_N]
        parts += [column.reshape(-1).long() for column in columns]
        if micro.positions_BT is not None:
            parts.append(micro.positions_BT.reshape(-1))
    device = micro_batches[0].inputs_BT.device if micro_batches else "cpu"
    return torch.cat([part.to(device) for part in parts])


def unpack_inputs(packed: Tensor) -> list[MicroBatch]:
    """Unpack micro-batches; their log-probs and advantages are zero, since no model reads them."""
    found, position = [], 0
    while position < len(packed):
        rows, length, num_tokens, is_packed = packed[position : position + 4].tolist()
        sizes = [rows * length, rows * length, num_tokens, rows * length * is_packed]
        content = packed[position + 4 : position + 4 + sum(sizes)]
        inputs, mask, targets_N, positions = torch.split(content, sizes)
        zeros_N = torch.zeros(num_tokens, device=packed.device)
        found.append(
            MicroBatch(
                inputs_BT=inputs.view(rows, length),
                mask_BT=mask.view(rows, length).bool(),
                targets_N=targets_N,
                behaviour_N=zeros_N,
                advantages_N=zeros_N,
                rows_N=zeros_N.long(),
                positions_BT=positions.view(rows, length) if is_packed else None,
            )
        )
        position += 4 + sum(sizes)
    return found
