"""The torch trainer: a transformers causal LM, AdamW, on one rank or many (DDP or FSDP2).

    train_step = deal -> this rank's rows -> learn
    learn      = micro-batches -> for each minibatch: accumulate, clip, step

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

from hpcrl.learn.batch import MicroBatch, Row, micro_batches, nothing
from hpcrl.learn.deal import deal, rows_of
from hpcrl.learn.loss import (
    LossSums,
    Said,
    chosen_logprobs,
    judged,
    log_distribution,
    policy_loss,
    token_shares,
)
from hpcrl.recipe import Train
from hpcrl.spool.record import Trajectory
from hpcrl.trainers.base import Snapshot, StepMetrics, check_trainable
from hpcrl.trainers.critic import Critic
from hpcrl.trainers.figures import Laps, Learned, step_metrics
from hpcrl.trainers.net import Net, load_causal
from hpcrl.trainers.schedule import learning_rate
from hpcrl.trainers.state import Piece, check_same, fill, wholes
from hpcrl.trainers.world import ALONE, World

Minibatch = list[MicroBatch]


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
        self._policy = Net(load_causal(model_dir), train=train, world=world, learning_rate=train.learning_rate)
        self._config = self._policy.module.config
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
        """One optimizer step per minibatch; the first that is not finite is not taken and ends the training step.

        `parts` are this rank's rows of each minibatch; every rank calls this with as many.
        """
        rate = learning_rate(step, train=self._train, peak=self._train.learning_rate)
        learned = Learned(LossSums.zero(self.world.device), skipped=skipped, learning_rate=rate)
        if skipped is not None:
            return learned
        minibatches, counts = self._together(parts)
        learned.num_tokens, learned.num_padded_tokens = int(counts[:, 0].sum()), int(counts[:, 3].sum())
        learned.skipped = reason_to_skip(counts)
        if learned.skipped is not None:
            return learned
        if self._critic is not None:
            minibatches = self._critic.judged(minibatches)
        before = [list(self._before(part, moves=len(minibatches) > 1)) for part in minibatches]
        for part, said, (num_tokens, num_sequences, *_) in zip(minibatches, before, counts.tolist(), strict=True):
            sums = self._accumulate(part, said, num_tokens=num_tokens, num_sequences=num_sequences)
            learned.add(sums, norm=self._policy.clip())
            if learned.skipped is None:
                self._policy.step(learning_rate=rate)
            self._policy.optimizer.zero_grad()
            if learned.skipped is not None:
                break
            if self._critic is not None:
                learned.value_losses.append(self._critic.learn(part, num_tokens=num_tokens, step=step))
        return learned

    def tensors(self) -> dict[str, Tensor]:
        """The whole weights on every rank; where they are sharded, all ranks must call this together."""
        return {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in ((name, parameter.detach()) for name, parameter in self._policy.named().items())
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model, whoever holds it."""
        return {name: tuple(parameter.shape) for name, parameter in self._policy.named().items()}

    def shards(self) -> Iterator[Piece]:
        """The boxes of the weights that this rank gives, each value once over all ranks."""
        return (piece for piece in self._policy.pieces() if piece.part == "weight")

    def snapshot(self) -> Snapshot:
        """This rank's part of the state, apart from what the next step changes."""
        return Snapshot(rank=self.world.rank, pieces=[piece.copied() for net in self._nets() for piece in net.pieces()])

    def load(self, directory: Path) -> None:
        saved = wholes(directory)
        mine = {name: tuple(tensor.shape) for net in self._nets() for name, tensor in net.named().items()}
        check_same(saved, mine, directory)
        with_moments = any(part == "exp_avg" for part, _ in saved)
        with torch.no_grad():
            fill([piece for net in self._nets() for piece in net.wanted(with_moments=with_moments)], directory)

    def _nets(self) -> list[Net]:
        return [self._policy] if self._critic is None else [self._policy, self._critic.net]

    def _together(self, parts: list[list[Row]]) -> tuple[list[Minibatch], Tensor]:
        """Micro-batches, as many of each minibatch on every rank, and what all ranks have of each minibatch.

        The counts are model tokens, sequences, values that are not finite, and padded tokens.
        """
        bound = self._train.tokens_per_micro_batch
        minibatches = [micro_batches(rows, tokens_per_micro_batch=bound) for rows in parts]
        counts = torch.tensor([counts_of(part) for part in minibatches], dtype=torch.double).reshape(-1, 4)
        counts = self.world.sum(counts.to(self.world.device)).cpu()
        if self.world.size > 1:
            most = [self.world.max(len(part)) for part in minibatches]
            minibatches = [
                part + [nothing() for _ in range(num - len(part))] for part, num in zip(minibatches, most, strict=True)
            ]
        return [[micro.to(self.world.device) for micro in part] for part in minibatches], counts

    def _before(self, part: Minibatch, *, moves: bool) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Proximal and reference log-probs of each micro-batch, taken before the first optimizer step.

        The proximal ones are None where the policy cannot have moved since: they are the current ones then.
        """
        with torch.no_grad():
            for micro in part:
                proximal_N = reference_N = None
                if self._train.proximal == "behaviour":
                    proximal_N = micro.behaviour_N
                elif moves:
                    proximal_N = self._logprobs(micro)
                if self._reference is not None:
                    reference_N = self._logprobs(micro, model=self._reference)
                yield proximal_N, reference_N

    def _accumulate(
        self,
        part: Minibatch,
        before: list[tuple[Tensor | None, Tensor | None]],
        *,
        num_tokens: float,
        num_sequences: float,
    ) -> LossSums:
        """Add the gradient of one optimizer step, every token weighing its share whatever its micro-batch and rank."""
        total = LossSums.zero(self.world.device)
        for number, (micro, (proximal_N, reference_N)) in enumerate(zip(part, before, strict=True)):
            last = number == len(part) - 1
            with self._policy.passes(last=last):
                logprobs_N, entropy_N = judged(
                    self._logits(micro), micro.targets_N, temperature=self._temperature, train=self._train
                )
                said = Said(
                    behaviour_N=micro.behaviour_N,
                    proximal_N=logprobs_N.detach() if proximal_N is None else proximal_N,
                    advantages_N=micro.advantages_N,
                    rows_N=micro.rows_N,
                    shares_N=token_shares(
                        micro.rows_N,
                        aggregation=self._train.aggregation,
                        num_tokens=num_tokens,
                        num_sequences=num_sequences,
                        max_length=self.max_length,
                    ),
                    reference_N=reference_N,
                )
                loss, sums = policy_loss(logprobs_N, entropy_N=entropy_N, said=said, train=self._train)
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
        logits_BKV = (model or self._policy)(micro.inputs_BT, logits_to_keep=kept_K, use_cache=False).logits
        return logits_BKV[micro.mask_BT[:, kept_K]]  # type: ignore[no-any-return]


def counts_of(part: Minibatch) -> list[float]:
    """Model tokens, sequences, values that are not finite, and padded tokens."""
    columns = [column for micro in part for column in (micro.behaviour_N, micro.advantages_N)]
    return [
        float(sum(micro.num_tokens for micro in part)),
        float(sum(micro.num_sequences for micro in part)),
        float(sum(int((~column.isfinite()).sum()) for column in columns)),
        float(sum(micro.num_padded_tokens for micro in part)),
    ]


def reason_to_skip(counts: Tensor) -> str | None:
    """What can be told from the input alone, before the first of several minibatches moves the weights."""
    if not len(counts) or not counts[:, 0].sum():
        return "no trainable tokens"
    if counts[:, 2].sum():
        return "a reward or a stored log-prob is not finite"
    return None
