"""The critic of PPO: it predicts the return at each model token, and so turns rewards into advantages.

Legend: B rows of a micro-batch, N model tokens of a micro-batch (row by row), T model tokens of one row
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.advantage import STD_EPSILON, gae
from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.loss import compute_token_shares, compute_value_loss
from hpcrl.trainers.micro_batch_loss import compute_mean_and_std
from hpcrl.trainers.torch_model import TrainedModel, load_critic
from hpcrl.trainers.world import World

CRITIC_PREFIX = "critic."


class Critic:
    """A separate model with the policy's body and a head for one number."""

    def __init__(self, model_dir: Path, *, train: TrainConfig, world: World) -> None:
        self._train = train
        self._world = world
        rate = train.critic_learning_rate
        self.model = TrainedModel(
            load_critic(model_dir), train=train, world=world, learning_rate=rate, prefix=CRITIC_PREFIX
        )
        self._evaluated: list[list[tuple[MicroBatch, Tensor, Tensor]]] = []
        """The micro-batches of each minibatch, with values and returns."""

    def add_advantages(self, minibatches: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
        """Replace rewards by advantages, with mean 0 and variance 1 over all tokens of the step."""
        with torch.no_grad():
            found = [[self._estimate_advantages(micro) for micro in minibatch] for minibatch in minibatches]
        columns = [advantages_N for minibatch in found for advantages_N, _, _ in minibatch]
        mean, std = compute_mean_and_std(columns, world=self._world)
        self._evaluated.clear()
        result = []
        for minibatch, estimates in zip(minibatches, found, strict=True):
            self._evaluated.append(
                [
                    (micro, values_N, returns_N)
                    for micro, (_, values_N, returns_N) in zip(minibatch, estimates, strict=True)
                ]
            )
            result.append(
                [
                    replace(micro, advantages_N=(advantages_N - mean) / (std + STD_EPSILON))
                    for micro, (advantages_N, _, _) in zip(minibatch, estimates, strict=True)
                ]
            )
        return result

    def learn(self, number: int, *, num_tokens: float, rate: float) -> float:
        """Make an optimizer step on minibatch `number` of those evaluated; return the loss over all ranks."""
        total = torch.zeros((), dtype=torch.double, device=self._world.device)
        evaluated = self._evaluated[number]
        for index, (micro, before_N, returns_N) in enumerate(evaluated):
            with self.model.accumulation_context(last=index == len(evaluated) - 1):
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
        value = float(self._world.sum(total))
        if np.isfinite(value) and np.isfinite(self.model.clip_gradient()):
            self.model.step(learning_rate=rate)
        self.model.optimizer.zero_grad()
        return value

    def _predict_values(self, micro: MicroBatch) -> Tensor:
        logits = self.model(micro.inputs_BT, position_ids=micro.positions_BT, use_cache=False).logits
        values_BT = logits.squeeze(-1).float()
        return values_BT[micro.mask_BT]  # type: ignore[no-any-return]

    def _estimate_advantages(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return advantages, values and returns at the model tokens."""
        values_N = self._predict_values(micro)
        rows = micro.rows_N.cpu().numpy()
        lengths_B = np.bincount(rows, minlength=1)  # by trajectory, padded or packed
        advantages_BT = gae(
            _pad_by_row(values_N, rows, lengths_B),
            rewards_BT=_pad_by_row(micro.advantages_N, rows, lengths_B),
            lengths_B=lengths_B.tolist(),
            gamma=self._train.gamma,
            lam=self._train.gae_lambda,
        )
        inside_BT = np.arange(advantages_BT.shape[1]) < lengths_B[:, None]
        advantages_N = torch.from_numpy(advantages_BT[inside_BT]).float().to(values_N.device)
        return advantages_N, values_N, advantages_N + values_N


def _pad_by_row(values_N: Tensor, rows: NDArray[np.int64], lengths_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Arrange a column over N as rows of T, with zeros after the last token."""
    values_BT = np.zeros((len(lengths_B), int(lengths_B.max(initial=0))))
    columns = np.concatenate([np.arange(length) for length in lengths_B]) if len(rows) else rows
    values_BT[rows, columns] = values_N.detach().cpu().double().numpy()
    return values_BT
