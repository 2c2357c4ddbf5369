"""The critic of PPO: it predicts the return at each model token, and so turns rewards into advantages.

    Critic                the model, in training
    estimate_advantages   generalised advantage estimation, from values of a critic or of the user's function

Legend: B rows of a micro-batch, N model tokens of a micro-batch (row by row), T model tokens of one row
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.advantage import gae
from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.loss import compute_token_shares, compute_value_loss
from hpcrl.trainers.context_group import WHOLE_CONTEXT, ContextGroup, use_context_attention
from hpcrl.trainers.memory_error import watch_memory
from hpcrl.trainers.micro_batch_loss import normalize_advantages
from hpcrl.trainers.model_files import open_critic
from hpcrl.trainers.torch_model import TrainedModel
from hpcrl.trainers.world import World

CRITIC_PREFIX = "critic."


class Critic:
    """A separate model with the policy's body and a head for one number."""

    def __init__(
        self, model_dir: Path, *, train: TrainConfig, world: World, context: ContextGroup = WHOLE_CONTEXT
    ) -> None:
        """Load the model; the ranks of `context` divide the positions of their rows."""
        self._train = train
        self._world = world
        rate = train.critic_learning_rate
        source = open_critic(model_dir)
        self._context = use_context_attention(source.module, context)
        self.model = TrainedModel(
            source.module, train=train, world=world, learning_rate=rate, prefix=CRITIC_PREFIX, fill=source.fill
        )
        self._evaluated: list[list[tuple[MicroBatch, Tensor, Tensor]]] = []
        """The micro-batches of each minibatch, with values and returns."""

    def add_advantages(self, minibatches: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """Replace rewards by advantages, with mean 0 and variance 1 over all tokens of the step."""
        with torch.no_grad():
            values = [[self._predict_values(micro) for micro in minibatch] for minibatch in minibatches]
        estimated = estimate_advantages(minibatches, values, train=self._train)
        self._evaluated = [
            [(micro, values_N, micro.advantages_N + values_N) for micro, values_N in zip(*each, strict=True)]
            for each in zip(estimated, values, strict=True)
        ]
        return normalize_advantages(estimated, world=self._world)

    def learn(self, number: int, *, num_tokens: float, rate: float) -> float:
        """Make an optimizer step on minibatch `number` of those evaluated; return the loss over all ranks."""
        total = torch.zeros((), dtype=torch.double, device=self._world.device)
        evaluated = self._evaluated[number]
        for index, (micro, before_N, returns_N) in enumerate(evaluated):
            with watch_memory(micro), self.model.accumulation_context(last=index == len(evaluated) - 1):
                loss = compute_value_loss(
                    self._predict_values(micro),
                    before_N=before_N,
                    returns_N=returns_N,
                    shares_N=compute_token_shares(
                        micro.rows_N, aggregation="token", num_tokens=num_tokens, num_sequences=1, budget=1
                    ),
                    clip=self._train.value_clip,
                )
                self.model.backward(loss)
            total += loss.detach()
        value = float(self._world.sum(total)) / self._context.size  # its ranks have the same rows
        if np.isfinite(value) and np.isfinite(self.model.clip_gradient()):
            self.model.step(learning_rate=rate)
        self.model.optimizer.zero_grad()
        return value

    def _predict_values(self, micro: MicroBatch) -> Tensor:
        part = self._context.divide(micro.inputs_BT, micro.mask_BT, positions_BT=micro.positions_BT)
        with watch_memory(micro):
            logits = self.model(part.inputs_BS, position_ids=part.positions_BS, use_cache=False, **part.options).logits
        (values_N,) = part.join(logits.squeeze(-1).float()[part.mask_BS])
        return values_N


def estimate_advantages(
    minibatches: Sequence[Sequence[MicroBatch]], values: Sequence[Sequence[Tensor | None]], *, train: TrainConfig
) -> list[list[MicroBatch]]:
    """Turn rewards into advantages, not yet normalised."""
    return [
        [
            replace(micro, advantages_N=_estimate_row_advantages(micro, values_N, train=train))
            for micro, values_N in zip(*each, strict=True)
        ]
        for each in zip(minibatches, values, strict=True)
    ]


def _estimate_row_advantages(micro: MicroBatch, values_N: Tensor | None, *, train: TrainConfig) -> Tensor:
    assert values_N is not None, "a rank with log-probs has the values of its tokens"
    rows = micro.rows_N.cpu().numpy()
    lengths_B = np.bincount(rows, minlength=1)  # by trajectory, padded or packed
    advantages_BT = gae(
        _pad_by_row(values_N, rows, lengths_B),
        rewards_BT=_pad_by_row(micro.advantages_N, rows, lengths_B),
        lengths_B=lengths_B.tolist(),
        gamma=train.gamma,
        lam=train.gae_lambda,
    )
    inside_BT = np.arange(advantages_BT.shape[1]) < lengths_B[:, None]
    return torch.from_numpy(advantages_BT[inside_BT]).float().to(values_N.device)


def _pad_by_row(values_N: Tensor, rows: NDArray[np.int64], lengths_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Arrange a column over N as rows of T, with zeros after the last token."""
    values_BT = np.zeros((len(lengths_B), int(lengths_B.max(initial=0))))
    columns = np.concatenate([np.arange(length) for length in lengths_B]) if len(rows) else rows
    values_BT[rows, columns] = values_N.detach().cpu().double().numpy()
    return values_BT
