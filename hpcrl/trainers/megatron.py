"""The Megatron trainer: tensor, pipeline and data parallelism of megatron-core, the same numbers as `torch`.

    train_step = deal over the data-parallel ranks -> this rank's rows -> learn
    learn      = micro-batches of one shape -> Megatron's schedule -> gradients over the ranks -> clip, step

Legend  B rows of a micro-batch - T positions - N model tokens - V vocabulary, this rank's part until it is gathered

Ranks that share layers or hold other layers get the same rows. Only the last stage sees log-probs, so only it computes
the loss; what it saw is summed over all ranks. The loss is a sum over all data-parallel ranks' tokens, so gradients
are added up and not averaged. Plain AdamW on float32: Megatron's own optimizer and DDP need CUDA streams.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from hpcrl.errors import TrainError
from hpcrl.learn.batch import MicroBatch, Row, micro_batches, nothing, of_one_shape
from hpcrl.learn.deal import deal, rows_of
from hpcrl.learn.loss import LossSums, Said, chosen_logprobs, judged, log_distribution, policy_loss, token_shares
from hpcrl.recipe import Train
from hpcrl.spool.record import Trajectory
from hpcrl.trainers.base import Snapshot, StepMetrics, check_trainable
from hpcrl.trainers.figures import Laps, Learned, step_metrics
from hpcrl.trainers.megatron_cpu import adapted
from hpcrl.trainers.megatron_model import build
from hpcrl.trainers.megatron_names import Rank, links
from hpcrl.trainers.net import MOMENTS
from hpcrl.trainers.schedule import learning_rate
from hpcrl.trainers.state import WEIGHT, Piece, check_same, fill, wholes
from hpcrl.trainers.torch import counts_of, reason_to_skip
from hpcrl.trainers.world import World
from hpcrl.weights.layout import Shard

STEP = "step"


class MegatronTrainer:
    """Trains the model in a directory; every rank of `world` has one of these and they do everything together."""

    def __init__(self, model_dir: Path, train: Train, *, seed: int = 0, temperature: float = 1.0, world: World) -> None:
        """`temperature` is the rollout's: the stored log-probs were taken under it."""
        _check_known(train)
        self._train = train
        self._seed = seed
        self._temperature = temperature
        self.world = world
        with adapted():
            self._part = build(model_dir, train=train, world=world, seed=seed)
        self._parameters: dict[str, Tensor] = dict(self._part.module.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=train.learning_rate, weight_decay=train.weight_decay
        )

    @property
    def num_shares(self) -> int:
        """Into how many shares a step is dealt."""
        return self._part.num_data

    @property
    def share(self) -> int:
        """Which of them is this rank's."""
        return self._part.data_rank

    @property
    def vocabulary_size(self) -> int:
        return self._part.dims.vocab

    @property
    def max_length(self) -> int:
        """Positions that the model can read."""
        return int(self._part.config.max_position_embeddings)

    def train_step(self, trajectories: Sequence[Trajectory], *, step: int, version: int) -> StepMetrics:
        laps = Laps()
        check_trainable(trajectories, vocabulary_size=self.vocabulary_size)
        dealt = deal(
            trajectories,
            train=self._train,
            num_ranks=self.num_shares,
            seed=self._seed,
            step=step,
            max_length=self.max_length,
        )
        laps.end("deal")
        by_id = {trajectory.id: trajectory for trajectory in trajectories}
        parts = rows_of(
            dealt.shares[self.share],
            fetch=lambda items: [by_id[item.id] for item in items],
            train=self._train,
            max_length=self.max_length,
        )
        laps.end("rows")
        learned = self.learn(parts, step=step, skipped=dealt.skipped)
        laps.end("learn")
        return step_metrics(trajectories, dealt=dealt, learned=learned, step=step, version=version, laps=laps)

    def learn(self, parts: list[list[Row]], *, step: int, skipped: str | None = None) -> Learned:
        """One optimizer step per minibatch; the first that is not finite is not taken and ends the training step."""
        rate = learning_rate(step, train=self._train, peak=self._train.learning_rate)
        learned = Learned(LossSums.zero(self.world.device), skipped=skipped, learning_rate=rate)
        if skipped is not None:
            return learned
        minibatches, counts = self._together(parts)
        learned.num_tokens, learned.num_padded_tokens = int(counts[:, 0].sum()), int(counts[:, 3].sum())
        learned.skipped = reason_to_skip(counts)
        if learned.skipped is not None:
            return learned
        moves = len(minibatches) > 1
        before = [self._proximal(part) if moves else _unmoved(part) for part in minibatches]
        for part, proximal, (num_tokens, num_sequences, *_) in zip(minibatches, before, counts.tolist(), strict=True):
            sums = self._accumulate(part, proximal, num_tokens=num_tokens, num_sequences=num_sequences)
            learned.add(sums, norm=self._clip())
            if learned.skipped is None:
                for group in self._optimizer.param_groups:
                    group["lr"] = rate
                self._optimizer.step()
            self._optimizer.zero_grad()
            if learned.skipped is not None:
                break
        return learned

    def tensors(self) -> dict[str, Tensor]:
        """The whole weights on every rank: all ranks must call this together."""
        found: dict[str, Tensor] = {}
        for name, shape in self.shapes().items():
            found[name] = torch.zeros(shape, device=self.world.device)
        for piece in self.shards():
            found[piece.shard.name][_box(piece.shard)] = piece.tensor
        return {name: self.world.sum(tensor) for name, tensor in found.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every canonical tensor of the model, whoever holds it."""
        return {link.name: link.whole for link in links(self._part.dims, Rank())}

    def shards(self) -> Iterator[Piece]:
        """The boxes of the weights that this rank gives, each value once over all ranks."""
        return (piece for piece in self._pieces() if piece.part == WEIGHT)

    def snapshot(self) -> Snapshot:
        """This rank's part of the state, apart from what the next step changes."""
        return Snapshot(rank=self.world.rank, pieces=[piece.copied() for piece in self._pieces()])

    def load(self, directory: Path) -> None:
        saved = wholes(directory)
        check_same(saved, self.shapes(), directory)
        with_moments = any(part == MOMENTS[0] for part, _ in saved)
        with torch.no_grad():
            fill(list(self._wanted(with_moments=with_moments)), directory)

    def _pieces(self) -> Iterator[Piece]:
        if self._part.data_rank:
            return
        for link, parameter in self._part.links():
            if not link.given:
                continue
            shard = Shard(name=link.name, start=link.start, shape=link.shape)
            yield Piece(WEIGHT, shard, link.whole, parameter.detach()[link.rows])
            state = self._optimizer.state.get(parameter, {})
            for part in MOMENTS if state else ():
                yield Piece(part, shard, link.whole, state[part][link.rows])
            if state and not any(link.start):
                yield Piece(STEP, Shard(name=link.name, start=(), shape=()), (), state["step"])

    def _wanted(self, *, with_moments: bool) -> Iterator[Piece]:
        """Every box that this rank needs to go on."""
        self._optimizer.state.clear()
        for link, parameter in self._part.links():
            shard = Shard(name=link.name, start=link.start, shape=link.shape)
            yield Piece(WEIGHT, shard, link.whole, parameter.detach()[link.rows])
            if not with_moments:
                continue
            state = self._optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state.update({part: torch.zeros_like(parameter.detach()) for part in MOMENTS})
            for part in MOMENTS:
                yield Piece(part, shard, link.whole, state[part][link.rows])
            yield Piece(STEP, Shard(name=link.name, start=(), shape=()), (), state["step"])

    def _together(self, parts: list[list[Row]]) -> tuple[list[list[MicroBatch]], Tensor]:
        """Micro-batches of one shape, as many on every rank, and what all of them have of each minibatch."""
        bound = self._train.tokens_per_micro_batch
        minibatches = [micro_batches(rows, tokens_per_micro_batch=bound) for rows in parts]
        counts = torch.tensor([counts_of(part) for part in minibatches], dtype=torch.double).reshape(-1, 4)
        counts = self.world.sum(counts.to(self.world.device)).cpu() / (self.world.size / self._part.num_data)
        same = []
        for part in minibatches:
            num = self.world.max(len(part))
            filled = part + [nothing() for _ in range(num - len(part))]
            rows = self.world.max(max(len(micro.inputs_BT) for micro in filled))
            length = self.world.max(max(micro.inputs_BT.shape[1] for micro in filled))
            same.append([of_one_shape(micro, rows=rows, length=length).to(self.world.device) for micro in filled])
        return same, counts

    def _proximal(self, part: list[MicroBatch]) -> list[Tensor | None]:
        """Log-probs before the first optimizer step; they stay on the last stage, where they are needed."""

        def kept(micro: MicroBatch, logits_BTV: Tensor) -> tuple[Tensor, Tensor]:
            logprobs_NV = log_distribution(self._at_tokens(micro, logits_BTV), temperature=self._temperature)
            logprobs_N = chosen_logprobs(logprobs_NV, micro.targets_N)
            return logprobs_N.sum(), logprobs_N

        with torch.no_grad():
            found: list[Tensor | None] = list(self._scheduled(part, kept, forward_only=True))
        return found or _unmoved(part)

    def _accumulate(
        self, part: list[MicroBatch], proximal: list[Tensor | None], *, num_tokens: float, num_sequences: float
    ) -> LossSums:
        """Add the gradient of one optimizer step, on all ranks."""
        before = iter(proximal)

        def scored(micro: MicroBatch, logits_BTV: Tensor) -> tuple[Tensor, LossSums]:
            logits_NV = self._at_tokens(micro, logits_BTV)
            logprobs_N, entropy_N = judged(logits_NV, micro.targets_N, temperature=self._temperature, train=self._train)
            proximal_N = next(before)
            if self._train.proximal == "behaviour":
                proximal_N = micro.behaviour_N
            shares_N = token_shares(
                micro.rows_N,
                aggregation=self._train.aggregation,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                max_length=self.max_length,
            )
            said = Said(
                behaviour_N=micro.behaviour_N,
                proximal_N=logprobs_N.detach() if proximal_N is None else proximal_N,
                advantages_N=micro.advantages_N,
                rows_N=micro.rows_N,
                shares_N=shares_N,
            )
            loss, sums = policy_loss(logprobs_N, entropy_N=entropy_N, said=said, train=self._train)
            return loss * len(part), sums  # the schedule divides by the number of micro-batches

        total = LossSums.zero(self.world.device)
        for sums in self._scheduled(part, scored, forward_only=False):
            total = total.plus(sums)
        if self._part.rank.tp or not self._part.rank.is_last:
            total = LossSums.zero(self.world.device)  # said once, by the first rank of the last stage
        self._exchange_gradients()
        return LossSums.unflat(self.world.sum(total.flat()))

    def _scheduled(self, part: list[MicroBatch], judge: Any, *, forward_only: bool) -> list[Any]:
        """Megatron's schedule over the stages; the second thing that `judge` returns, on the last stage."""

        def forward(batches: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Any]:
            micro = next(batches)
            rows, length = micro.inputs_BT.shape
            positions_BT = torch.arange(length, device=self.world.device).expand(rows, length)
            bf16 = self._train.precision == "bf16"
            with torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=bf16):
                output = module(micro.inputs_BT, positions_BT, _causal(length, self.world.device))
            return output, partial(judge, micro)

        rows, length = part[0].inputs_BT.shape
        with adapted():
            found = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(part),
                model=self._part.module,
                num_microbatches=len(part),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=forward_only,
            )
        return list(found)

    def _at_tokens(self, micro: MicroBatch, logits_BTV: Tensor) -> Tensor:
        """Logits of the whole vocabulary at the micro-batch's model tokens."""
        logits_NV = gather_from_tensor_model_parallel_region(logits_BTV[micro.mask_BT])
        return logits_NV[:, : self._part.dims.vocab]  # type: ignore[no-any-return]

    def _exchange_gradients(self) -> None:
        """What every rank that holds a parameter must agree on."""
        rank = self._part.rank
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if rank.num_tp > 1 and name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
                # Shared by the heads of all ranks, and each rank has seen its own heads only.
                dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
            if self._part.num_data > 1:
                dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
        if self._part.dims.tied and rank.num_pp > 1 and (rank.is_first or rank.is_last):
            name = "embedding.word_embeddings.weight" if rank.is_first else "output_layer.weight"
            dist.all_reduce(self._parameters[name].grad, group=parallel_state.get_embedding_group())

    def _clip(self) -> float:
        """The norm of the whole model's gradient, before it was clipped; every value counts once."""
        total = torch.zeros((), dtype=torch.double, device=self.world.device)
        if not self._part.data_rank:
            for link, parameter in self._part.links():
                if link.given and parameter.grad is not None:
                    total += parameter.grad[link.rows].double().square().sum()
        norm = float(self.world.sum(total).sqrt())
        scale = self._train.max_grad_norm / (norm + 1e-6)
        if scale < 1:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        return norm


def _unmoved(part: list[MicroBatch]) -> list[Tensor | None]:
    """No proximal log-probs: they are the current ones."""
    return [None for _ in part]


def _causal(length: int, device: torch.device) -> Tensor:
    """True where a position must not look; padding is on the right, and what follows it is never trained on."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)


def _box(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(shard.start, shard.shape, strict=True))


def _check_known(train: Train) -> None:
    for name, seen, known in (("kl", train.kl, "none"), ("sharding", train.sharding, "none")):
        if seen != known:
            raise TrainError(f'train.{name} = {seen!r} is not for trainer "megatron": set it to {known!r}')
    if train.advantage == "gae":
        raise TrainError('train.advantage = "gae" needs a critic, which trainer "megatron" has not: use "torch"')
