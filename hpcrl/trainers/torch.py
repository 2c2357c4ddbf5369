"""The torch trainer: a transformers causal LM, AdamW, on one rank or many (DDP or FSDP2).

step.py has the order of a training step; what it calls is here.

Legend  B rows of a micro-batch - T positions - K positions that anyone trains on - N model tokens - V vocabulary

The same input gives the same bits on one rank: dropout is off (the policy that learns is the one that acted),
minibatches are drawn from (seed, step), and no step touches torch's global generator, so a checkpoint needs no
generator state. Many ranks give the same numbers up to the order of sums.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrl.config.recipe import Train
from hpcrl.learn.batch import MicroBatch, nothing
from hpcrl.learn.loss import LossSums, chosen_logprobs, log_distribution
from hpcrl.spool.record import Trajectory
from hpcrl.trainers import torch_model
from hpcrl.trainers.base import PreparedMinibatch, Snapshot, StepMetrics
from hpcrl.trainers.critic import Critic
from hpcrl.trainers.micro_batch_loss import MinibatchTotals, PriorLogprobs, compute_micro_batch_loss
from hpcrl.trainers.state import Piece, check_same, fill, wholes
from hpcrl.trainers.step import Minibatch, rows_in_memory, train_step
from hpcrl.trainers.torch_model import Net, load_causal
from hpcrl.trainers.world import ALONE, World


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

    def prepare_minibatches(self, minibatches: list[Minibatch]) -> list[PreparedMinibatch]:
        """Give every rank the same number of micro-batches; with their advantages and prior log-probs."""
        if self.world.size > 1:
            most = [self.world.max(len(part)) for part in minibatches]
            minibatches = [
                part + [nothing() for _ in range(num - len(part))] for part, num in zip(minibatches, most, strict=True)
            ]
        minibatches = [[micro.to(self.world.device) for micro in part] for part in minibatches]
        if self._critic is not None:
            minibatches = self._critic.judged(minibatches)
        moves = len(minibatches) > 1
        return [PreparedMinibatch(part, [self._before(micro, moves=moves) for micro in part]) for part in minibatches]

    def accumulate_gradient(self, minibatch: PreparedMinibatch, totals: MinibatchTotals) -> LossSums:
        """Add the gradient of a minibatch; ranks exchange theirs with its last micro-batch."""
        total = LossSums.zero(self.world.device)
        last = len(minibatch.micro_batches) - 1
        for number, (micro, prior) in enumerate(zip(*minibatch, strict=True)):
            with self._policy.passes(last=number == last):
                loss, sums = compute_micro_batch_loss(
                    micro,
                    self._logits(micro),
                    prior=prior,
                    totals=totals,
                    train=self._train,
                    temperature=self._temperature,
                    max_length=self.max_length,
                )
                self._policy.backward(loss)
            total = total.plus(sums)
        return total if self.world.size == 1 else LossSums.unflat(self.world.sum(total.flat()))

    def clip_gradient(self) -> float:
        """Clip the gradient; returns its norm before, over all ranks."""
        return self._policy.clip()

    def apply_gradient(self, *, rate: float) -> None:
        """Make an optimizer step of the policy; the gradient is gone afterwards."""
        self._policy.step(learning_rate=rate)
        self._policy.optimizer.zero_grad()

    def discard_gradient(self) -> None:
        """Leave the weights as they are."""
        self._policy.optimizer.zero_grad()

    def train_critic(self, number: int, *, totals: MinibatchTotals, step: int) -> float | None:
        """Make the critic's optimizer step of minibatch `number`; returns its loss, None without a critic."""
        if self._critic is None:
            return None
        return self._critic.learn(number, num_tokens=totals.num_tokens, step=step)

    def _before(self, micro: MicroBatch, *, moves: bool) -> PriorLogprobs:
        """Take the prior log-probs; the proximal ones are not needed where the policy cannot have moved since."""
        with torch.no_grad():
            wanted = moves and self._train.proximal == "recomputed"
            proximal_N = self._logprobs(micro) if wanted else None
            reference_N = self._logprobs(micro, model=self._reference) if self._reference is not None else None
        return PriorLogprobs(proximal_N, reference_N)

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
