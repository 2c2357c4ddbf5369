"""The torch trainer: a transformers causal LM, AdamW, on one rank or many (DDP or FSDP2).

The nodes of a training step are in nodes.py; the methods that they call are here.

Legend: B rows of a micro-batch, T positions, K columns with a model token in any row, N model tokens, V vocabulary

On one rank the same input gives the same bits: dropout is off (the policy that learns is the one that acted),
minibatches are drawn from (seed, step), and no step touches torch's global generator, so a checkpoint needs no
generator state. Many ranks give the same numbers up to the order of sums.
"""

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcrl.config.pipeline import needs_critic
from hpcrl.config.recipe import TrainConfig
from hpcrl.hardware.architecture import read_max_context
from hpcrl.learn.batch import MicroBatch, empty_micro_batch
from hpcrl.learn.loss import LossSums, PolicyLoss
from hpcrl.learn.pipeline import load_update
from hpcrl.spool.record import Trajectory
from hpcrl.system.processes import return_false
from hpcrl.trainers.adapters import ADAPTER_PREFIX, add_adapters, find_adapters
from hpcrl.trainers.base import (
    Minibatch,
    RankSnapshot,
    StepMetrics,
    TokenColumns,
    load_fixed_models,
    nothing_to_check,
)
from hpcrl.trainers.context_group import make_context_group
from hpcrl.trainers.critic import Critic
from hpcrl.trainers.expert_balance import ExpertBalance
from hpcrl.trainers.expert_replay import ExpertReplay
from hpcrl.trainers.memory_error import watch_memory
from hpcrl.trainers.micro_batch_loss import (
    MinibatchTotals,
    PriorLogprobs,
    choose_temperature,
    compute_micro_batch_loss,
)
from hpcrl.trainers.model_files import open_causal
from hpcrl.trainers.published_adapters import PublishedAdapters
from hpcrl.trainers.state import check_same_shapes, fill_shards, read_whole_shapes
from hpcrl.trainers.step import train_step
from hpcrl.trainers.token_model import TokenModel, compute_token_logprobs
from hpcrl.trainers.torch_model import TrainedModel, choose_frozen_dtype, load_fixed
from hpcrl.trainers.world import SINGLE_RANK, World
from hpcrl.weights.stores.sharded_store import LocalShards

MAX_CHECKS = 16
"""The most micro-batches of a minibatch before which ranks agree whether to abandon the step."""


class TorchTrainer:
    """The trainer of the model in a directory; every rank of `world` has one, and all make every call together."""

    def __init__(
        self,
        model_dir: Path,
        train: TrainConfig,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        world: World = SINGLE_RANK,
        reference_dir: Path | None = None,
        has_scored_reference: bool = False,
    ) -> None:
        """Load the model; `temperature` is the rollout's: the stored log-probs were computed under it.

        The reference of the KL is the model in `reference_dir` if there is one, else the initial model, unless a
        teacher's engine has scored the tokens of the trajectories.
        """
        self._recipe_train = self._train = train
        self._seed = seed
        self._temperature = temperature
        self.has_scored_reference = has_scored_reference
        self.world = world
        self.fitting_tokens = 0
        source = open_causal(model_dir, dtype=choose_frozen_dtype(train, world) if train.lora_rank else torch.float32)
        module = source.module
        self._precise_names = source.find_precise_names()
        self._config = module.config
        self._context = make_context_group(world, size=train.degrees.context, is_packed=train.rows == "packed")
        self._replay = ExpertReplay(module, is_on=train.router_replay, context=self._context)
        self._balance = ExpertBalance(module, coef=train.moe_aux_coef, context=self._context)
        if train.lora_rank:
            add_adapters(module, rank=train.lora_rank, alpha=train.lora_alpha)
        self._policy = TrainedModel(
            module,
            train=train,
            world=world,
            learning_rate=train.learning_rate,
            prefix=ADAPTER_PREFIX if train.lora_rank else "",
            update=load_update(train),
            called=TokenModel(module, context=self._context),
            fill=source.fill,
            stored=source.stored,
        )
        self._published: TrainedModel | PublishedAdapters = self._policy
        if train.publish_lora == "adapters":
            self._published = PublishedAdapters(find_adapters(module), stored=source.stored or {}, world=world)
        self.critic: Critic | None = None
        if needs_critic(train):
            self.critic = Critic(model_dir, train=train, world=world, context=self._context)
        self.spread_models, self._fixed_models = load_fixed_models(
            self,
            train,
            model_dir,
            teacher=reference_dir,
            temperature=temperature,
            load=partial(self._load_fixed, initial=model_dir),
        )

    def _load_fixed(self, path: Path, *, initial: Path) -> Callable[..., Any]:
        """Load a model that does not train; with adapters the initial model is there already."""
        if self._recipe_train.lora_rank and path == initial:
            return self._policy.call_without_adapters
        return load_fixed(path, train=self._recipe_train, world=self.world, context=self._context)

    @property
    def num_shares(self) -> int:
        """The number of shares that a step is divided into."""
        return self.world.size // self._context.size

    @property
    def share(self) -> int:
        """The index of this rank's share."""
        return self.world.rank // self._context.size

    @property
    def has_logprobs(self) -> bool:
        """True if this rank is given the log-probs of its tokens."""
        return True

    @property
    def vocabulary_size(self) -> int:
        return int(self._config.vocab_size)

    @property
    def max_length(self) -> int:
        """The positions that the model can read, stretched as its engines stretch them."""
        return read_max_context(self._config.to_dict()) or int(self._config.max_position_embeddings)

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
        """Forget the moments of the policy and the critic."""
        for model in self._models():
            model.optimizer.state.clear()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what is published on every rank; where it is sharded, all ranks must call this together."""
        return self._published.tensors()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that is published, whichever rank holds it."""
        return self._published.weight_shapes()

    @property
    def num_params(self) -> int:
        return sum(math.prod(shape) for shape in self._policy.weight_shapes().values())

    def precise_names(self) -> Collection[str]:
        """Return the tensors that the model's files, or transformers, keep in float32 in a model of fewer bits."""
        return self._precise_names

    def shards(self) -> LocalShards:
        """Return this rank's shards of what is published; over all ranks, each value comes once."""
        return self._published.weight_shards()

    def snapshot(self) -> RankSnapshot:
        """Copy this rank's part of the state, so that the next step does not change it; no weights that are frozen."""
        dtype = getattr(torch, self._recipe_train.moments_dtype)
        state_shards = [each.copy_to_cpu(dtype) for model in self._models() for each in model.state_shards()]
        return RankSnapshot(rank=self.world.rank, state_shards=state_shards)

    def load(self, directory: Path) -> None:
        saved = read_whole_shapes(directory)
        own_shapes = [model.state_shapes() for model in self._models()]
        check_same_shapes(saved, dict(ChainMap(*own_shapes)), directory)
        with_moments = any(part == "exp_avg" for part, _ in saved)
        with torch.no_grad():
            fill_shards(
                [
                    state_shard
                    for model in self._models()
                    for state_shard in model.required_shards(with_moments=with_moments)
                ],
                directory,
            )

    def sleep(self) -> None:
        for model in self._models():
            model.sleep()
        self._move_fixed(torch.device("cpu"))
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        for model in self._models():
            model.wake()
        self._move_fixed(self.world.device)

    def _move_fixed(self, device: torch.device) -> None:
        """Move the models that do not train; that of adapters is the policy's own."""
        for model in self._fixed_models.values():
            if isinstance(model, torch.nn.Module):
                model.to(device)
        for spread in self.spread_models.values():
            spread.move(device)

    def _models(self) -> list[TrainedModel]:
        return [self._policy] if self.critic is None else [self._policy, self.critic.model]

    def place_batches(self, minibatches: list[Minibatch]) -> list[Minibatch]:
        """Give every rank the same number of micro-batches, on its device."""
        if self.world.size > 1:
            most = [self.world.max(len(part)) for part in minibatches]
            minibatches = [
                part + [empty_micro_batch() for _ in range(num - len(part))]
                for part, num in zip(minibatches, most, strict=True)
            ]
        return [[micro.to(self.world.device) for micro in part] for part in minibatches]

    def compute_logprobs(self, minibatches: list[Minibatch], *, model: str | None) -> list[TokenColumns]:
        """Compute the log-probs of all tokens under the policy, or under the model of the node with this name."""
        module = self._policy if model is None else self._fixed_models[model]
        with torch.no_grad():
            return [[self._compute_column(module, micro) for micro in part] for part in minibatches]

    def _compute_column(self, module: Callable[..., Any], micro: MicroBatch) -> Tensor:
        with watch_memory(micro), self._replay.use(micro if module is self._policy else None):  # others did not act
            return compute_token_logprobs(module, micro, temperature=self._temperature)[0]

    def accumulate_gradient(
        self,
        minibatch: Minibatch,
        priors: list[PriorLogprobs],
        *,
        totals: MinibatchTotals,
        policy_loss: PolicyLoss,
        check: Callable[[], None] = nothing_to_check,
    ) -> LossSums:
        """Add the gradient of a minibatch; ranks exchange theirs during its last micro-batch."""
        total = LossSums.zero(self.world.device)
        last, check_interval = len(minibatch) - 1, -(-len(minibatch) // MAX_CHECKS)
        for number, (micro, prior) in enumerate(zip(minibatch, priors, strict=True)):
            if number % check_interval == 0:
                check()
            with (
                watch_memory(micro),
                self._replay.use(micro),  # also where the gradient computes layers again
                self._policy.accumulation_context(last=number == last),
            ):
                with self._balance.watch(micro):
                    logprobs_N, entropy_N = compute_token_logprobs(
                        self._policy,
                        micro,
                        temperature=choose_temperature(self._train, rollout=self._temperature),
                        has_entropy_bonus=bool(self._train.entropy_coef),
                    )
                loss, sums = compute_micro_batch_loss(
                    micro,
                    logprobs_N,
                    entropy_N=entropy_N,
                    prior=prior,
                    totals=totals,
                    train=self._train,
                    max_length=self.max_length,
                    policy_loss=policy_loss,
                )
                share = micro.num_tokens / max(totals.num_tokens, 1)
                self._policy.backward(self._balance.add_loss(loss, share=share))
            total = total.add(sums)
        if self.world.size == 1:
            return total
        return LossSums.unflatten(self.world.sum(total.flatten()) / self._context.size)  # its ranks have the same rows

    def clip_gradient(self) -> float:
        """Clip the gradient and return its norm before clipping, over all ranks."""
        return self._policy.clip_gradient()

    def apply_gradient(self, *, rate: float) -> None:
        """Make an optimizer step of the policy, then clear the gradient."""
        self._policy.step(learning_rate=rate)
        self._policy.optimizer.zero_grad()

    def discard_gradient(self) -> None:
        """Clear the gradient and leave the weights as they are."""
        self._policy.optimizer.zero_grad()
