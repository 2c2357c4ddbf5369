"""The torch trainer: a transformers causal LM, AdamW, on one rank or many (DDP or FSDP2).

    together     this rank's rows -> micro-batches
    gradients    what adds the gradient of each minibatch; steps.py has the order of things

Legend  B rows of a micro-batch - T positions - K positions that anyone trains on - N model tokens - V vocabulary

The same input gives the same bits on one rank: dropout is off (the policy that learns is the one that acted),
minibatches are drawn from (seed, step), and no step touches torch's global generator, so a checkpoint needs no
generator state. Many ranks give the same numbers up to the order of sums.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrl.config.recipe import Train
from hpcrl.learn.batch import MicroBatch, Row, micro_batches, nothing, packed_batches
from hpcrl.learn.loss import LossSums, chosen_logprobs, log_distribution
from hpcrl.spool.record import Trajectory
from hpcrl.trainers import torch_model
from hpcrl.trainers.base import Snapshot, StepMetrics
from hpcrl.trainers.critic import Critic
from hpcrl.trainers.state import Piece, check_same, fill, wholes
from hpcrl.trainers.step import Before, Minibatch, Totals, learn, rows_in_memory, scored, totals_of, train_step
from hpcrl.trainers.step_metrics import Learned
from hpcrl.trainers.torch_model import Net, load_causal
from hpcrl.trainers.world import ALONE, World

Gradient = Callable[[Totals], LossSums]


class TorchTrainer:
    """Trains the model in a directory; every rank of `world` has one of these and they do everything together."""

    def __init__(
        self,
        model_dir: Path,
        train: Train,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        world: World = ALONE,
    ) -> None:
        """`temperature` is the rollout's: the stored log-probs were taken under it."""
        self._train = train
        self._seed = seed
        self._temperature = temperature
        self.world = world
        module, prefix = load_causal(model_dir), ""
        self._config = module.config
        if train.lora_rank:
            module = torch_model.with_adapters(module, rank=train.lora_rank, alpha=train.lora_alpha)
            prefix = torch_model.PREFIX
        self._policy = Net(module, train=train, world=world, learning_rate=train.learning_rate, prefix=prefix)
        self._critic = Critic(model_dir, train=train, world=world) if train.advantage == "gae" else None
        self._reference = None if train.kl == "none" else load_causal(model_dir).to(world.device).eval()

    @property
    def num_shares(self) -> int:
        """Into how many shares a step is dealt."""
        return self.world.size

    @property
    def share(self) -> int:
        """Which of them is this rank's."""
        return self.world.rank

    @property
    def vocabulary_size(self) -> int:
        return int(self._config.vocab_size)

    @property
    def max_length(self) -> int:
        """Positions that the model can read."""
        return int(self._config.max_position_embeddings)

    def train_step(self, trajectories: Sequence[Trajectory], *, step: int, version: int) -> StepMetrics:
        rows = rows_in_memory(trajectories, share=self.share, train=self._train, max_length=self.max_length)
        return train_step(self, trajectories, train=self._train, seed=self._seed, step=step, version=version, rows=rows)

    def learn(self, parts: list[list[Row]], *, step: int, skipped: str | None = None) -> Learned:
        """One optimizer step per minibatch; the first that is not finite is not taken and ends the training step.

        `parts` are this rank's rows of each minibatch; every rank calls this with as many.
        """
        return learn(self, parts, train=self._train, world=self.world, step=step, skipped=skipped)

    def tensors(self) -> dict[str, Tensor]:
        """The whole weights on every rank; where they are sharded, all ranks must call this together."""
        return {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in self._policy.weights().items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model, whoever holds it."""
        return {name: tuple(tensor.shape) for name, tensor in self._policy.weights().items()}

    def shards(self) -> Iterator[Piece]:
        """The boxes of the weights that this rank gives, each value once over all ranks."""
        return self._policy.weight_pieces()

    def snapshot(self) -> Snapshot:
        """This rank's part of the state, apart from what the next step changes.

        With adapters the merged weights are there too: a checkpoint is always a model that can be exported.
        """
        pieces = [piece.copied() for net in self._nets() for piece in net.pieces()]
        if self._train.lora_rank:
            pieces += [piece.copied() for piece in self._policy.weight_pieces()]
        return Snapshot(rank=self.world.rank, pieces=pieces)

    def load(self, directory: Path) -> None:
        saved = wholes(directory)
        mine = {name: tuple(tensor.shape) for net in self._nets() for name, tensor in net.named().items()}
        check_same(saved, self.shapes() | mine, directory)
        with_moments = any(part == "exp_avg" for part, _ in saved)
        with torch.no_grad():
            fill([piece for net in self._nets() for piece in net.wanted(with_moments=with_moments)], directory)

    def _nets(self) -> list[Net]:
        return [self._policy] if self._critic is None else [self._policy, self._critic.net]

    def together(self, parts: list[list[Row]]) -> tuple[list[Minibatch], list[Totals]]:
        """Micro-batches, as many of each minibatch on every rank, and what all ranks have of each minibatch."""
        make = packed_batches if self._train.rows == "packed" else micro_batches
        minibatches = [make(rows, tokens_per_micro_batch=self._train.tokens_per_micro_batch) for rows in parts]
        totals = totals_of(minibatches, world=self.world)
        if self.world.size > 1:
            most = [self.world.max(len(part)) for part in minibatches]
            minibatches = [
                part + [nothing() for _ in range(num - len(part))] for part, num in zip(minibatches, most, strict=True)
            ]
        return [[micro.to(self.world.device) for micro in part] for part in minibatches], totals

    def gradients(self, minibatches: list[Minibatch]) -> list[Gradient]:
        """For each minibatch what adds its gradient."""
        if self._critic is not None:
            minibatches = self._critic.judged(minibatches)
        moves = len(minibatches) > 1
        before = [[self._before(micro, moves=moves) for micro in part] for part in minibatches]
        return [partial(self._accumulate, part, known) for part, known in zip(minibatches, before, strict=True)]

    def clip(self) -> float:
        """The norm of the gradient over all ranks, before it was clipped."""
        return self._policy.clip()

    def take(self, number: int, *, rate: float | None, totals: Totals, step: int) -> float | None:
        """The optimizer step of minibatch `number`; with no rate its gradient is only forgotten."""
        if rate is not None:
            self._policy.step(learning_rate=rate)
        self._policy.optimizer.zero_grad()
        if rate is None or self._critic is None:
            return None
        return self._critic.learn(number, num_tokens=totals.num_tokens, step=step)

    def _before(self, micro: MicroBatch, *, moves: bool) -> Before:
        """The proximal log-probs are not needed where the policy cannot have moved since."""
        with torch.no_grad():
            wanted = moves and self._train.proximal == "recomputed"
            proximal_N = self._logprobs(micro) if wanted else None
            reference_N = self._logprobs(micro, model=self._reference) if self._reference is not None else None
        return Before(proximal_N, reference_N)

    def _accumulate(self, part: Minibatch, before: list[Before], totals: Totals) -> LossSums:
        """Add the gradient of one optimizer step; ranks exchange theirs with its last micro-batch."""
        total = LossSums.zero(self.world.device)
        for number, (micro, known) in enumerate(zip(part, before, strict=True)):
            with self._policy.passes(last=number == len(part) - 1):
                loss, sums = scored(
                    micro,
                    self._logits(micro),
                    before=known,
                    totals=totals,
                    train=self._train,
                    temperature=self._temperature,
                    max_length=self.max_length,
                )
                self._policy.backward(loss)
            total = total.plus(sums)
        return total if self.world.size == 1 else LossSums.unflat(self.world.sum(total.flat()))

    def _logprobs(self, micro: MicroBatch, *, model: torch.nn.Module | Net | None = None) -> Tensor:
        """Log-probs of the micro-batch's model tokens."""
        logprobs_NV = log_distribution(self._logits(micro, model=model), temperature=self._temperature)
        return chosen_logprobs(logprobs_NV, micro.targets_N)

    def _logits(self, micro: MicroBatch, *, model: torch.nn.Module | Net | None = None) -> Tensor:
        """Logits at the micro-batch's model tokens; none are made for columns without."""
        kept_K = micro.mask_BT.any(0).nonzero().squeeze(-1)
        if not len(kept_K):
            kept_K = kept_K.new_zeros(1)  # a pass that teaches nothing still passes through every layer
        # No attention mask: the padding is on the right of a causal model, and without a mask attention is fastest.
        logits_BKV = (model or self._policy)(
            micro.inputs_BT, position_ids=micro.positions_BT, logits_to_keep=kept_K, use_cache=False
        ).logits
        return logits_BKV[micro.mask_BT[:, kept_K]]  # type: ignore[no-any-return]
