"""The torch trainer: a transformers causal LM, AdamW, one process.

    train_step = advantages per group -> rows -> minibatches -> for each: accumulate, clip, step

Legend  B rows of a micro-batch - T positions - K positions that anyone trains on - N model tokens - V vocabulary

The same input gives the same bits: dropout is off (the policy that learns is the one that acted), minibatches are
drawn from (seed, step), and no step touches torch's global generator, so a checkpoint needs no generator state.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.errors import TrainError
from hpcrl.learn.advantage import ESTIMATORS, Rewards, group_advantages, indices_by_group, is_flat
from hpcrl.learn.batch import MicroBatch, Row, make_rows, micro_batches
from hpcrl.learn.loss import LossSums, chosen_logprobs, entropies, log_distribution, policy_loss
from hpcrl.recipe import Train
from hpcrl.spool.record import Trajectory
from hpcrl.trainers.base import StepMetrics

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"

Minibatch = list[MicroBatch]


class TorchTrainer:
    """Trains the model in a directory on one device."""

    def __init__(
        self,
        model_dir: Path,
        train: Train,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`temperature` is the rollout's: the stored log-probs were taken under it."""
        self._train = train
        self._seed = seed
        self._temperature = temperature
        self._device = torch.device(device)
        self._model = _load_model(model_dir).to(self._device).eval()  # eval: no dropout; gradients flow all the same
        self._parameters: list[Tensor] = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=train.learning_rate, weight_decay=train.weight_decay, fused=True
        )

    def train_step(self, trajectories: Sequence[Trajectory], *, step: int, version: int) -> StepMetrics:
        began = time.perf_counter()
        _check_trainable(trajectories, vocabulary_size=self._model.get_input_embeddings().num_embeddings)
        rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64)
        groups = [trajectory.group for trajectory in trajectories]
        advantages = group_advantages(rewards, groups=groups, estimator=ESTIMATORS[self._train.advantage])
        context = self._model.config.max_position_embeddings
        rows, num_too_long = make_rows(trajectories, advantages=advantages.tolist(), max_length=context)
        minibatches = self._minibatches(rows, step=step)
        learned = self._learn(minibatches)
        return StepMetrics(
            step=step,
            version=version,
            num_too_long=num_too_long,
            num_tokens=sum(micro.num_tokens for part in minibatches for micro in part),
            num_padded_tokens=sum(micro.num_padded_tokens for part in minibatches for micro in part),
            **_sampled_figures(trajectories, rewards=rewards, version=version),
            **learned.figures(),
            step_s=round(time.perf_counter() - began, 6),
        )

    def tensors(self) -> dict[str, Tensor]:
        # A tied weight has one name here, the first, as in the files that transformers writes.
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def save(self, directory: Path) -> None:
        optimizer = {
            f"{name}.{part}": tensor
            for name, parameter in self._model.named_parameters()
            for part, tensor in self._optimizer.state.get(parameter, {}).items()
        }
        _write_tensors(self.tensors(), directory / MODEL_FILE)
        _write_tensors(optimizer, directory / OPTIMIZER_FILE)

    def load(self, directory: Path) -> None:
        saved = _read_tensors(directory / MODEL_FILE)
        mine = self.tensors()
        if {name: tensor.shape for name, tensor in saved.items()} != {n: tensor.shape for n, tensor in mine.items()}:
            raise TrainError(
                f"{directory / MODEL_FILE}: its tensors are not those of this model "
                f"({_difference(saved, mine)}): resume with the model that the campaign began with"
            )
        for name, tensor in mine.items():
            tensor.copy_(saved[name])
        self._load_optimizer(_read_tensors(directory / OPTIMIZER_FILE))

    def _load_optimizer(self, saved: dict[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        numbers = {name: number for number, (name, _) in enumerate(self._model.named_parameters())}
        for key, tensor in saved.items():
            name, _, part = key.rpartition(".")
            state.setdefault(numbers[name], {})[part] = tensor
        groups = self._optimizer.state_dict()["param_groups"]  # the recipe's, not the checkpoint's
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _minibatches(self, rows: list[Row], *, step: int) -> list[Minibatch]:
        """The rows of each optimizer step; several minibatches get a shuffled share each."""
        num_parts = min(self._train.num_minibatches, len(rows))
        if num_parts > 1:
            rows = random.Random(f"{self._seed}/{step}").sample(rows, len(rows))
        bound = self._train.tokens_per_micro_batch
        parts = [micro_batches(rows[start::num_parts], tokens_per_micro_batch=bound) for start in range(num_parts)]
        return [[micro.to(self._device) for micro in part] for part in parts]

    def _learn(self, minibatches: list[Minibatch]) -> "_Learned":
        """One optimizer step per minibatch; the first that is not finite is not taken and ends the training step."""
        learned = _Learned(LossSums.zero(self._device), skipped=_reason_to_skip(minibatches))
        if learned.skipped is not None:
            return learned
        for part, proximal in zip(minibatches, self._proximal(minibatches), strict=True):
            num_tokens = sum(micro.num_tokens for micro in part)
            sums = self._accumulate(part, proximal, num_tokens=num_tokens)
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._train.max_grad_norm).item()
            learned.add(sums, norm=norm, num_tokens=num_tokens)
            if learned.skipped is None:
                self._optimizer.step()
            self._optimizer.zero_grad()
            if learned.skipped is not None:
                break
        return learned

    def _proximal(self, minibatches: list[Minibatch]) -> list[list[Tensor | None]]:
        """Log-probs before the first optimizer step; None where the policy cannot have moved since."""
        if len(minibatches) == 1:
            return [[None] * len(minibatches[0])]
        with torch.no_grad():
            return [[chosen_logprobs(self._logprobs(micro), micro.targets_N) for micro in part] for part in minibatches]

    def _accumulate(self, part: Minibatch, proximal: list[Tensor | None], *, num_tokens: int) -> LossSums:
        """Add the gradient of one optimizer step, every token weighing the same whatever its micro-batch."""
        total = LossSums.zero(self._device)
        for micro, proximal_N in zip(part, proximal, strict=True):
            logprobs_NV = self._logprobs(micro)
            logprobs_N = chosen_logprobs(logprobs_NV, micro.targets_N)
            with torch.set_grad_enabled(self._train.entropy_coef > 0):
                entropy_N = entropies(logprobs_NV)
            loss, sums = policy_loss(
                logprobs_N,
                entropy_N=entropy_N,
                behaviour_N=micro.behaviour_N,
                proximal_N=logprobs_N if proximal_N is None else proximal_N,
                advantages_N=micro.advantages_N,
                clip_low=self._train.clip_low,
                clip_high=self._train.clip_high,
                max_is_ratio=self._train.max_is_ratio,
                entropy_coef=self._train.entropy_coef,
                num_tokens=num_tokens,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            total = total.plus(sums)
        return total

    def _logprobs(self, micro: MicroBatch) -> Tensor:
        """Log-probs of the vocabulary at the micro-batch's model tokens; no logits are made for other columns."""
        kept_K = micro.mask_BT.any(0).nonzero().squeeze(-1)
        # No attention mask: the padding is on the right of a causal model, and without a mask attention is fastest.
        logits_BKV = self._model(micro.inputs_BT, logits_to_keep=kept_K, use_cache=False).logits
        return log_distribution(logits_BKV[micro.mask_BT[:, kept_K]], temperature=self._temperature)


@dataclass
class _Learned:
    """What the optimizer steps of one training step saw."""

    sums: LossSums
    skipped: str | None
    num_tokens: int = 0
    norms: list[float] = field(default_factory=list)

    def add(self, sums: LossSums, *, norm: float, num_tokens: int) -> None:
        self.sums = self.sums.plus(sums)
        self.num_tokens += num_tokens
        self.norms.append(norm)
        loss = sums.loss.item() / num_tokens
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skipped = f"loss {loss} with gradient norm {norm} is not finite"

    def figures(self) -> dict[str, Any]:
        """The fields of StepMetrics that come from learning."""
        means = torch.stack(self.sums).div(self.num_tokens or math.nan).tolist()
        loss, clipped, is_ratio, truncated, kl, entropy = map(_finite, means)
        return {
            "skipped": self.skipped,
            "loss": loss,
            "grad_norm": _finite(sum(self.norms) / len(self.norms)) if self.norms else None,
            "clip_fraction": clipped,
            "is_ratio_mean": is_ratio,
            "is_truncated_fraction": truncated,
            "kl": kl,
            "entropy": entropy,
        }


def _reason_to_skip(minibatches: list[Minibatch]) -> str | None:
    """What can be told from the input alone, before the first of several minibatches moves the weights."""
    if not minibatches:
        return "no trainable tokens"
    columns = [column for part in minibatches for micro in part for column in (micro.behaviour_N, micro.advantages_N)]
    if not torch.cat(columns).isfinite().all():
        return "a reward or a stored log-prob is not finite"
    return None


def _sampled_figures(trajectories: Sequence[Trajectory], *, rewards: Rewards, version: int) -> dict[str, Any]:
    """The fields of StepMetrics that come from what was sampled."""
    members = indices_by_group([trajectory.group for trajectory in trajectories]).values()
    lags = [version - trajectory.start_version for trajectory in trajectories]
    return {
        "num_trajectories": len(trajectories),
        "num_groups": len(members),
        "num_flat_groups": sum(is_flat(rewards[indices]) for indices in members),
        "reward_mean": _finite(rewards.mean()) if lags else None,
        "reward_std": _finite(rewards.std()) if lags else None,
        "lag_mean": sum(lags) / max(len(lags), 1),
        "lag_max": max(lags, default=0),
    }


def _check_trainable(trajectories: Sequence[Trajectory], *, vocabulary_size: int) -> None:
    for trajectory in trajectories:
        if trajectory.reward is None:
            raise TrainError(f"trajectory {trajectory.id!r} has no reward: train on the spool `scored`, not `rollouts`")
        ids = trajectory.token_ids
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary_size:
            raise TrainError(
                f"trajectory {trajectory.id!r} has token ids from {ids.min()} to {ids.max()}, the model knows "
                f"0 to {vocabulary_size - 1}: engine and trainer must use the same model directory"
            )


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _load_model(model_dir: Path) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainError(f"model directory {str(model_dir)!r} cannot be loaded: {error}") from error


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path.name}: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{path} cannot be read: {error}: resume from an older checkpoint") from error


def _difference(saved: dict[str, Tensor], mine: dict[str, Tensor]) -> str:
    for name in sorted(saved.keys() | mine.keys()):
        if name not in saved or name not in mine:
            return f"{name!r} is only in {'the checkpoint' if name in saved else 'the model'}"
        if saved[name].shape != mine[name].shape:
            return f"{name!r} is {tuple(saved[name].shape)} there and {tuple(mine[name].shape)} here"
    return "none differs"
