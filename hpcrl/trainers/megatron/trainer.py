"""The Megatron trainer: tensor, pipeline and data parallelism of megatron-core, the same numbers as `torch`.

The nodes of a training step are in nodes.py; the methods that they call are here.

Legend: B rows of a micro-batch, T positions, S those of this rank, N model tokens, H hidden size

All ranks of one model replica get the same rows, padded to a length that tensor and context parallelism divide. Only
the last stage sees log-probs, so only it computes the loss; its sums are shared with all ranks. The loss is a sum over
the tokens of all data-parallel ranks, so gradients are summed, not averaged. The optimizer is plain AdamW on float32,
of which each data-parallel copy has a share of the tensors (model.py): Megatron's own keeps flat ranges of its buffers,
which another parallelism could not read.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from hpcrl.config.recipe import TrainConfig
from hpcrl.errors import TrainError
from hpcrl.learn.batch import MicroBatch, empty_micro_batch, pad_to_length
from hpcrl.learn.loss import LossSums, PolicyLoss
from hpcrl.learn.pipeline import load_update
from hpcrl.plan.trainer_checks import find_megatron_conflict
from hpcrl.spool.record import Trajectory
from hpcrl.system.processes import return_false
from hpcrl.trainers.base import (
    Minibatch,
    RankSnapshot,
    StepMetrics,
    TokenColumns,
    load_fixed_models,
    nothing_to_check,
)
from hpcrl.trainers.megatron.layers import compute_token_logprobs
from hpcrl.trainers.megatron.model import build_model_part, pair_shapes, patch_for_cpu
from hpcrl.trainers.megatron.weight_names import EMBEDDING, name_head
from hpcrl.trainers.memory_error import watch_memory
from hpcrl.trainers.micro_batch_loss import (
    MinibatchTotals,
    PriorLogprobs,
    choose_temperature,
    compute_micro_batch_loss,
)
from hpcrl.trainers.optimizer import MOMENT_PARTS, make_optimizer
from hpcrl.trainers.state import WEIGHT_PART, StateShard, check_same_shapes, fill_shards, read_whole_shapes
from hpcrl.trainers.step import train_step
from hpcrl.trainers.world import World, computes_in_bf16
from hpcrl.weights.layout import TensorShard
from hpcrl.weights.stores.sharded_store import LocalShards

STEP_PART = "step"
NORM_VALUES = 2**22
"""The most values of a gradient that are in double precision at once."""
_LossFunction = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]
"""A function of the last stage: from a micro-batch's hidden states to a loss and a value to keep."""


class MegatronTrainer:
    """The trainer of the model in a directory; every rank of `world` has one, and all make every call together."""

    def __init__(
        self,
        model_dir: Path,
        train: TrainConfig,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        world: World,
        reference_dir: Path | None = None,
        has_scored_reference: bool = False,
    ) -> None:
        """Load the model; `temperature` is the rollout's: the stored log-probs were computed under it.

        The reference of the KL is the model in `reference_dir` if there is one, else the initial model, unless a
        teacher's engine has scored the tokens of the trajectories.
        """
        if (problem := find_megatron_conflict(train)) is not None:
            raise TrainError(problem)
        self._recipe_train = self._train = train
        self._seed = seed
        self._temperature = temperature
        self.has_scored_reference = has_scored_reference
        self.world = world
        self.fitting_tokens = 0
        self.critic = None  # `find_megatron_conflict` refuses recipes that need one
        # Without a gradient there is nothing to balance, and what did not act has nothing to replay.
        fixed = msgspec.structs.replace(train, moe_aux_coef=0.0, router_replay=False)
        with patch_for_cpu():
            self._model_part = build_model_part(model_dir, train=train, world=world, seed=seed)
            self.spread_models, self._fixed_models = load_fixed_models(
                self,
                train,
                model_dir,
                teacher=reference_dir,
                temperature=temperature,
                load=lambda path: build_model_part(path, train=fixed, world=world, seed=seed),
            )
        self._parameters: dict[str, Tensor] = dict(self._model_part.chunks.named_parameters())
        own = [each for name, each in self._parameters.items() if self._model_part.copies.is_own(name)]
        self._optimizer = make_optimizer(
            own or [torch.zeros(0)], train=train, learning_rate=train.learning_rate, update=load_update(train)
        )

    @property
    def num_shares(self) -> int:
        """The number of shares that a step is divided into."""
        return self._model_part.copies.num // self._model_part.rank.num_cp

    @property
    def share(self) -> int:
        """The index of this rank's share."""
        return self._model_part.rank.copy // self._model_part.rank.num_cp

    @property
    def has_logprobs(self) -> bool:
        """True if this rank is given the log-probs of its tokens: the last stage is."""
        return self._model_part.rank.is_last

    @property
    def vocabulary_size(self) -> int:
        return self._model_part.dims.shape.vocabulary_size

    @property
    def max_length(self) -> int:
        """The positions that the model can read."""
        return self._model_part.max_length

    def train_step(
        self,
        trajectories: Sequence[Trajectory],
        *,
        step: int,
        version: int,
        train: TrainConfig | None = None,
        must_abandon: Callable[[], bool] = return_false,
    ) -> StepMetrics:
        return train_step(
            self,
            trajectories,
            train=train or self._recipe_train,
            seed=self._seed,
            step=step,
            version=version,
            must_abandon=must_abandon,
        )

    def use_settings(self, train: TrainConfig) -> None:
        """Use the settings of the step that starts."""
        self._train = train

    def restart_optimizer(self) -> None:
        """Forget the moments."""
        self._optimizer.state.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole weights on every rank; all ranks must call this together."""
        found: dict[str, Tensor] = {}
        for name, shape in self.shapes().items():
            found[name] = torch.zeros(shape, device=self.world.device)
        for shard, values in self.shards():
            found[shard.name][shard.index] = values.detach()
        return {name: self.world.sum(tensor) for name, tensor in found.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every canonical tensor of the model, whichever rank holds it."""
        return self._model_part.list_shapes()

    @property
    def num_params(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes().values())

    def precise_names(self) -> Collection[str]:
        """Return the tensors that the model's files, or transformers, keep in float32 in a model of fewer bits."""
        return self._model_part.precise_names

    def shards(self) -> LocalShards:
        """Return this rank's shards of the weights; over all ranks, each value comes once."""
        return [(each.shard, each.tensor) for each in self._state_shards() if each.part == WEIGHT_PART]

    def snapshot(self) -> RankSnapshot:
        """Copy this rank's part of the state, so that the next step does not change it."""
        dtype = getattr(torch, self._recipe_train.moments_dtype)
        return RankSnapshot(
            rank=self.world.rank, state_shards=[each.copy_to_cpu(dtype) for each in self._state_shards()]
        )

    def load(self, directory: Path) -> None:
        saved = read_whole_shapes(directory)
        check_same_shapes(saved, self.shapes(), directory)
        with_moments = any(part == MOMENT_PARTS[0] for part, _ in saved)
        with torch.no_grad():
            fill_shards(list(self._required_shards(with_moments=with_moments)), directory)

    def sleep(self) -> None:
        raise TrainError('trainer "megatron" keeps its GPUs: the plan gives it none that engines have too')

    def wake(self) -> None:
        """Do nothing: it never slept."""

    def _state_shards(self) -> Iterator[StateShard]:
        list_shards = self._model_part.list_shards
        for mapping, tensor in self._model_part.owned_tensors():
            state = self._optimizer.state.get(tensor, {})
            for held in list_shards(mapping, tensor, part=WEIGHT_PART):
                yield held
                if state and not any(held.shard.start):
                    yield _make_step_shard(held, state["step"])
            for part in MOMENT_PARTS if state else ():
                yield from list_shards(mapping, state[part], part=part)

    def _required_shards(self, *, with_moments: bool) -> Iterator[StateShard]:
        """Yield every shard that this rank needs to resume."""
        self._optimizer.state.clear()
        list_shards = self._model_part.list_shards
        for mapping, tensor in self._model_part.mapped_tensors():
            yield from list_shards(mapping, tensor, part=WEIGHT_PART)
            is_updated = tensor.requires_grad and self._model_part.copies.is_own(mapping.megatron_name)
            if not with_moments or not is_updated:
                continue
            state = self._optimizer.state[tensor]
            if not state:
                state["step"] = torch.zeros((), device=tensor.device)
                state.update({part: torch.zeros_like(tensor.detach()) for part in MOMENT_PARTS})
            for part in MOMENT_PARTS:
                for held in list_shards(mapping, state[part], part=part):
                    yield held
                    yield _make_step_shard(held, state["step"])

    def place_batches(self, minibatches: list[Minibatch]) -> list[Minibatch]:
        """Give every rank the same number of micro-batches, on its device."""
        return [self._fill(part) for part in minibatches]

    def compute_logprobs(self, minibatches: list[Minibatch], *, model: str | None) -> list[TokenColumns]:
        """Compute the log-probs of all tokens; they stay on the last stage, where they are needed."""
        chunks = self._model_part.chunks if model is None else self._fixed_models[model].chunks

        def keep_logprobs(micro: MicroBatch, hidden_BSH: Tensor) -> tuple[Tensor, Tensor]:
            logprobs_N, _ = compute_token_logprobs(
                chunks[-1],
                micro,
                hidden_BSH,
                positions=self._model_part.positions,
                vocabulary_size=self.vocabulary_size,
                temperature=self._temperature,
            )
            return logprobs_N.sum(), logprobs_N

        watch = self._model_part.replay.use if model is None else nullcontext
        found: list[TokenColumns] = []
        with torch.no_grad():
            for part in minibatches:
                kept = self._run_schedule(part, keep_logprobs, forward_only=True, chunks=chunks, watch=watch)
                found.append(kept or [None] * len(part))
        return found

    def accumulate_gradient(
        self,
        minibatch: Minibatch,
        priors: list[PriorLogprobs],
        *,
        totals: MinibatchTotals,
        policy_loss: PolicyLoss,
        check: Callable[[], None] = nothing_to_check,
    ) -> LossSums:
        """Add the gradient of a minibatch on all ranks: run Megatron's schedule, then sum over the ranks."""
        check()  # between the micro-batches of a schedule, stages are at different ones
        remaining, rank, chunks = iter(priors), self._model_part.rank, self._model_part.chunks

        def judge(micro: MicroBatch, hidden_BSH: Tensor) -> tuple[Tensor, LossSums]:
            logprobs_N, entropy_N = compute_token_logprobs(
                chunks[-1],
                micro,
                hidden_BSH,
                positions=self._model_part.positions,
                vocabulary_size=self.vocabulary_size,
                temperature=choose_temperature(self._train, rollout=self._temperature),
                has_entropy_bonus=bool(self._train.entropy_coef),
            )
            with self._autocast(False):
                loss, sums = compute_micro_batch_loss(
                    micro,
                    logprobs_N,
                    entropy_N=entropy_N,
                    prior=next(remaining),
                    totals=totals,
                    train=self._train,
                    max_length=self.max_length,
                    policy_loss=policy_loss,
                )
            # The schedule divides by the number of micro-batches, and multiplies by that of ranks of a context.
            return loss * len(minibatch) / rank.num_cp, sums

        total = LossSums.zero(self.world.device)
        balance, replay = self._model_part.balance, self._model_part.replay

        @contextmanager
        def watch(micro: MicroBatch) -> Iterator[None]:
            with balance.watch(micro, num_tokens=totals.num_tokens), replay.use(micro):
                yield

        for sums in self._run_schedule(minibatch, judge, forward_only=False, chunks=chunks, watch=watch):
            total = total.add(sums)
        if rank.tp or rank.cp or not rank.is_last:
            total = LossSums.zero(self.world.device)  # counted once, by the first rank of the last stage
        self._exchange_gradients()
        return LossSums.unflatten(self.world.sum(total.flatten()))

    def clip_gradient(self) -> float:
        """Clip the gradient and return the whole model's norm before clipping, in which every value counts once."""
        total = torch.zeros((), dtype=torch.double, device=self.world.device)
        for mapping, tensor in self._model_part.owned_tensors():
            if tensor.grad is not None:
                for part in torch.split(tensor.grad[mapping.rows].flatten(), NORM_VALUES):
                    total += part.double().square_().sum()
        norm = float(self.world.sum(total).sqrt())
        scale = self._train.max_grad_norm / (norm + 1e-6)
        if scale < 1:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        return norm

    def apply_gradient(self, *, rate: float) -> None:
        """Make an optimizer step, then clear the gradient."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.discard_gradient()
        self._model_part.copies.send_weights(self._parameters)

    def discard_gradient(self) -> None:
        """Clear the gradient and leave the weights as they are."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def _fill(self, part: Minibatch) -> Minibatch:
        """Fill a minibatch so that all ranks have the same number of micro-batches, with positions for each of them.

        Where ranks have several parts of the model, they take turns with a micro-batch for each stage.
        """
        num, rank = self.world.max(len(part)), self._model_part.rank
        num += -num % rank.num_pp * (rank.num_chunks > 1)
        filled = part + [empty_micro_batch() for _ in range(num - len(part))]
        size = self._model_part.positions.size
        lengths = (-(-micro.inputs_BT.shape[1] // size) * size for micro in filled)
        return [
            pad_to_length(micro, length=length).to(self.world.device)
            for micro, length in zip(filled, lengths, strict=True)
        ]

    def _run_schedule(
        self,
        minibatch: Minibatch,
        compute_loss: _LossFunction,
        *,
        forward_only: bool,
        chunks: torch.nn.ModuleList,
        watch: Callable[[MicroBatch], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Any]:
        """Run Megatron's schedule over the stages; return, on the last stage, the values kept by `compute_loss`.

        The forward pass of each micro-batch is made within `watch`.
        """

        def forward(batches: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Any]:
            micro = next(batches)
            inputs_BS = self._model_part.context.take(micro.inputs_BT)
            with watch(micro):  # positions are those of the part; attention is causal, the padding on the right
                output = chunk(inputs_BS, None, None)
            return output, partial(compute_loss, micro)

        largest = max(minibatch, key=lambda micro: micro.inputs_BT.numel())
        rows, length = largest.inputs_BT.shape  # stages send the shape of each
        batches = [iter(minibatch) for _ in chunks]
        # Autocast covers the backward pass too: there Megatron's layers multiply in the current precision.
        precision = self._autocast(self._train.has_bf16(on_bf16_gpus=computes_in_bf16(self.world.device)))
        with watch_memory(largest), patch_for_cpu(), pair_shapes(), precision:
            found = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=batches if len(chunks) > 1 else batches[0],
                model=list(chunks) if len(chunks) > 1 else chunks[0],
                num_microbatches=len(minibatch),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=forward_only,
            )
        return list(found)

    def _autocast(self, enabled: bool) -> torch.autocast:
        """Return the precision of a pass. No copy of a weight is kept: of all layers they would be 2 bytes a weight."""
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)

    def _exchange_gradients(self) -> None:
        """Sum the gradient of every parameter over the ranks that hold it, in the one that updates it."""
        rank = self._model_part.rank
        undivided = {
            mapping.megatron_name
            for mapping, _ in self._model_part.mapped_tensors()
            if mapping.shape == mapping.whole_shape
        }
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if rank.num_tp > 1 and name in undivided:
                # Each rank has seen its own positions, or its own heads, only.
                dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
        if self._model_part.dims.shape.is_tied and rank.num_pp > 1 and (rank.is_first or rank.is_last):
            name = EMBEDDING if rank.is_first else name_head(rank)
            dist.all_reduce(self._parameters[name].grad, group=parallel_state.get_embedding_group())
        self._model_part.copies.collect_gradients(self._parameters)


def _make_step_shard(held: StateShard, count: Tensor) -> StateShard:
    """Make the shard that counts the optimizer's steps of a tensor."""
    return StateShard(STEP_PART, TensorShard(name=held.shard.name, start=(), shape=()), (), count)
