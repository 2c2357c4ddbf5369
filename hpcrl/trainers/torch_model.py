"""A network in training: its module on one rank or many, its optimizer, its state.

    TrainedModel               a policy or a critic
    compile_layers             compile layers
    recompute_layers           keep only the inputs of layers for the gradient
    cast_experts               let autocast have its effect on experts
    load_fixed                 load a language model that does not train, sharded as the policy is
    choose_frozen_dtype        the dtype of weights that do not train

On many ranks a network is replicated (DDP) or sharded (FSDP2), as `train.sharding` selects; both average gradients,
so a loss that is this rank's part of a sum is scaled by the number of ranks.

A model with adapters (adapters.py) has all its other weights frozen, in the precision in which it computes.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hpcrl.config.recipe import TrainConfig
from hpcrl.hardware.train_memory import choose_shard_dim
from hpcrl.trainers.adapters import (
    MergedTensors,
    MergedWeight,
    fill_adapters,
    find_adapters,
    gather_merged,
    gather_whole,
    list_base_weights,
    without_adapters,
)
from hpcrl.trainers.context_group import WHOLE_CONTEXT, ContextGroup
from hpcrl.trainers.model_files import open_causal
from hpcrl.trainers.optimizer import MOMENT_PARTS, WeightUpdate, make_optimizer
from hpcrl.trainers.state import WEIGHT_PART, StateShard, list_local_shards, make_whole_shard
from hpcrl.trainers.token_model import TokenModel
from hpcrl.trainers.world import World, computes_in_bf16
from hpcrl.weights.layout import TensorShard
from hpcrl.weights.stored_tensors import StoredTensors, list_model_tensors, split_shard, split_tensors
from hpcrl.weights.stores.sharded_store import LocalShards, ShardValues


class TrainedModel:
    """A module over the ranks of a world, with its optimizer."""

    def __init__(
        self,
        module: Any,
        *,
        train: TrainConfig,
        world: World,
        learning_rate: float,
        prefix: str = "",
        update: WeightUpdate | None = None,
        called: torch.nn.Module | None = None,
        fill: Callable[[torch.nn.Module, torch.device], None] | None = None,
        stored: StoredTensors | None = None,
    ) -> None:
        """Distribute the module and make its optimizer; `prefix` precedes its tensor names in checkpoints.

        `called` is what is called, where that is not the module itself but one around it; `fill` gives parameters
        without memory their values; `stored` has the names in files where they are not the module's.
        """
        self.world = world
        self.prefix = prefix
        self._stored = stored or {}
        self._max_norm = train.max_grad_norm
        self._adapters = find_adapters(module)
        self._is_sharded = is_sharded = _is_sharded(train, world)
        has_bf16 = _has_bf16(train, world)
        self._has_autocast = has_bf16 and not is_sharded and not self._adapters
        self.module = module.eval()  # eval: no dropout; gradients still flow
        self._called = self.module if called is None else called
        if self._has_autocast:
            cast_experts(self._called)
        if train.compile:
            compile_layers(self._called)
        if is_sharded if train.recompute == "auto" else train.recompute:
            recompute_layers(self._called)
        if is_sharded:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if has_bf16 else MixedPrecisionPolicy()
            _shard_module(self._called, world=world, policy=policy, is_offloaded=train.offload)
        if fill is None:
            self._called.to(world.device)
        else:
            fill(self._called, torch.device("cpu") if train.offload else world.device)
        if train.offload:
            _move_buffers(self._called, world.device)
        fill_adapters(self._adapters)
        self._is_offloaded = train.offload
        self._distributed_module: Any = self._distribute()
        self.parameters: list[Tensor] = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(self.parameters, train=train, learning_rate=learning_rate, update=update)

    def _distribute(self) -> Any:
        """Return what computes gradients over all ranks."""
        if self.world.size == 1 or self._is_sharded:
            return self._called
        return DistributedDataParallel(self._called, process_group=self.world.group, broadcast_buffers=False)

    def sleep(self) -> None:
        """Move weights and moments to host memory; with train.offload they are there."""
        self._distributed_module = self._called  # DDP has buffers on the GPU, and hooks that do not survive the move
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        """Move them back."""
        self._move(self.world.device)
        self._distributed_module = self._distribute()

    def _move(self, device: torch.device) -> None:
        if self._is_offloaded:
            _move_buffers(self._called, device)
            return
        self._called.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and name in MOMENT_PARTS:
                    state[name] = value.to(device)

    def __call__(self, *inputs: Tensor, **options: Any) -> Any:
        """Run a forward pass; every rank of the world must run the same number."""
        # Without gradients DDP has nothing to do.
        model = self._distributed_module if torch.is_grad_enabled() else self._called
        with torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=self._has_autocast):
            return model(*inputs, **options)

    def call_without_adapters(self, *inputs: Tensor, **options: Any) -> Any:
        """Run a forward pass of the model that training started from."""
        with without_adapters(self._adapters):
            return self(*inputs, **options)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's part of the loss."""
        (loss * self.world.size).backward()  # type: ignore[no-untyped-call]

    def accumulation_context(self, *, last: bool) -> AbstractContextManager[Any]:
        """Wrap forward and backward of a micro-batch.

        Replicas exchange gradients in the `last` one of a step. Shards do so in each, for no rank can keep the gradient
        of the whole model until then.
        """
        if isinstance(self._distributed_module, DistributedDataParallel):
            return contextlib.nullcontext() if last else self._distributed_module.no_sync()
        return contextlib.nullcontext()

    def clip_gradient(self) -> float:
        """Clip the gradient and return its norm before clipping, over all ranks."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self._max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self, *, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that are trained, by their names in checkpoints."""
        # A tied weight has one name here, the first, as in the files that transformers writes.
        return {
            self.prefix + name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by their names in the module, without adapters."""
        return list_base_weights(self.module)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by the names of the model directory."""
        return self._name_shapes(self.weights())

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights in this model's state."""
        return self._name_shapes(self.trained_parameters() | self._kept_buffers())

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the whole weights by the names of the model directory, with adapters, on every rank.

        If they are sharded, all ranks must call this together.
        """
        weights = self.weights()
        if self._adapters and not self._is_sharded:
            merged = {name: MergedWeight(tensor, self._adapters.get(name)) for name, tensor in weights.items()}
            return MergedTensors(split_tensors(merged, self._stored))
        whole = {
            name: gather_merged(tensor, self._adapters.get(name)) if self._adapters else gather_whole(tensor)
            for name, tensor in weights.items()
        }
        return split_tensors(whole, self._stored)

    def weight_shards(self) -> LocalShards:
        """Return this rank's shards of the weights, with adapters; all ranks must call this together."""
        found: list[tuple[TensorShard, ShardValues]] = []
        for name, tensor in self.weights().items():
            merged = MergedWeight(tensor, self._adapters.get(name)) if self._adapters else None
            if not isinstance(tensor, DTensor) and self.world.rank:
                continue
            for each in list_local_shards(name, tensor, part=WEIGHT_PART):
                values = each.tensor if merged is None else merged
                if stored := self._stored.get(name):
                    found += [(part.shard, part.tensor) for part in split_shard(each.shard, values, stored)]
                else:
                    found.append((each.shard, values))
        return found

    def state_shards(self) -> Iterator[StateShard]:
        """Yield this rank's shards of parameters and moments; rank 0 yields those that all ranks hold."""
        for name, parameter in self.trained_parameters().items():
            sharded = isinstance(parameter, DTensor)
            if not sharded and self.world.rank:
                continue
            yield from self._list_shards(name, parameter.detach())
            state = self.optimizer.state.get(parameter, {})
            for part in MOMENT_PARTS if state else ():
                yield from self._list_shards(name, state[part], part=part)
            if state and not self.world.rank:
                yield from self._list_step_counts(name, state["step"])
        for name, buffer in self._kept_buffers().items() if not self.world.rank else ():
            yield from self._list_shards(name, buffer)

    def required_shards(self, *, with_moments: bool) -> Iterator[StateShard]:
        """Yield every shard that this rank needs to resume; without moments the optimizer starts again."""
        self.optimizer.state.clear()
        for name, buffer in self._kept_buffers().items():
            yield from self._list_shards(name, buffer)
        for name, parameter in self.trained_parameters().items():
            yield from self._list_shards(name, parameter.detach())
            if not with_moments:
                continue
            state = self.optimizer.state[parameter]
            state["step"] = torch.zeros((), device=parameter.device)
            yield from self._list_step_counts(name, state["step"])
            for part in MOMENT_PARTS:
                state[part] = torch.zeros_like(parameter.detach())
                yield from self._list_shards(name, state[part], part=part)

    def _kept_buffers(self) -> dict[str, Tensor]:
        """Return the buffers in this model's state, as the corrections of routers; adapters leave all weights out."""
        if self._adapters:
            return {}
        parameters = {name for name, _ in self.module.named_parameters()}
        found = list_model_tensors(self.module).items()
        return {self.prefix + name: tensor for name, tensor in found if name not in parameters}

    def _list_shards(self, name: str, tensor: Tensor, *, part: str = WEIGHT_PART) -> Iterator[StateShard]:
        """Yield this rank's shards of a tensor by the names of the model directory."""
        for state_shard in list_local_shards(name, tensor, part=part):
            yield from self._name_shards(state_shard)

    def _list_step_counts(self, name: str, count: Tensor) -> Iterator[StateShard]:
        for each in self._name_shapes({name: count}):
            yield make_whole_shard(each, count, part="step")

    def _name_shards(self, held: StateShard) -> Iterator[StateShard]:
        """Yield a shard as shards of the tensors that the model directory has in place of this one."""
        stored = self._stored.get(held.shard.name)
        if stored is None:
            yield held
            return
        for each in split_shard(held.shard, held.tensor, stored):
            yield StateShard(held.part, each.shard, each.stored.shape, each.tensor)

    def _name_shapes(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, tensor in tensors.items():
            stored = self._stored.get(name)
            found |= {name: tuple(tensor.shape)} if stored is None else {each.name: each.shape for each in stored}
        return found


def _is_sharded(train: TrainConfig, world: World) -> bool:
    return world.size > 1 and train.sharding == "full"


def _has_bf16(train: TrainConfig, world: World) -> bool:
    return train.has_bf16(on_bf16_gpus=computes_in_bf16(world.device))


def choose_frozen_dtype(train: TrainConfig, world: World) -> torch.dtype:
    """Return the dtype of weights that do not train: that of the passes."""
    return torch.bfloat16 if _has_bf16(train, world) else torch.float32


def _shard_module(
    called: torch.nn.Module, *, world: World, policy: MixedPrecisionPolicy, is_offloaded: bool = False
) -> None:
    """Shard a model over all ranks; a layer, the embeddings and the head are whole only while they compute."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if is_offloaded else OffloadPolicy()
    shard = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        reshard_after_forward=True,
        shard_placement_fn=partial(_choose_placement, num_ranks=world.size),
    )
    for layer in _list_layers(called):
        shard(layer)
    if isinstance(called, TokenModel):
        for part in called.list_outer_layers():
            shard(part)
    shard(called)


def _choose_placement(parameter: torch.nn.Parameter, *, num_ranks: int) -> Shard | None:
    """Choose the dimension of which each rank has a part: the first (None), unless a stack of experts has too few.

    Some ranks would have none of 8 experts, and the others all of one.
    """
    return None if (found := choose_shard_dim(tuple(parameter.shape), num_ranks)) == 0 else Shard(found)


def _move_buffers(called: torch.nn.Module, device: torch.device) -> None:
    for module in called.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def recompute_layers(called: torch.nn.Module) -> None:
    """Let every layer keep only its input for the gradient, and compute the rest of its forward pass again."""
    for layer in _list_layers(called):
        # Nothing is random in a layer: dropout is off.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def cast_experts(called: torch.nn.Module) -> None:
    """Let experts multiply in autocast's precision, which grouped products do not follow: theirs is the weights'."""
    for part in called.modules():
        if isinstance(experts := getattr(part, "experts", None), torch.nn.Module):
            experts.forward = partial(_call_experts, experts, experts.forward)


def _call_experts(experts: torch.nn.Module, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call a layer's experts with copies of their weights in the precision of autocast."""
    weights = dict(experts.named_parameters())
    device = inputs[0].device.type
    dtype = torch.get_autocast_dtype(device)
    if not torch.is_autocast_enabled(device) or all(weight.dtype == dtype for weight in weights.values()):
        return forward(*inputs)
    copies = {name: weight.to(dtype) for name, weight in weights.items()}
    return cast(Tensor, torch.func.functional_call(experts, copies, inputs))  # it comes back here, with the copies


def compile_layers(called: torch.nn.Module) -> None:
    """Let torch compile the layers, but not their experts, whose numbers of tokens change."""
    for layer in _list_layers(called):
        for part in layer.modules():
            if hasattr(part, "experts"):
                part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
        layer.forward = torch.compile(layer.forward)


def _list_layers(called: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers, as transformers names them for each family."""
    names = {name for submodule in called.modules() for name in getattr(submodule, "_no_split_modules", None) or ()}
    return [submodule for submodule in called.modules() if type(submodule).__name__ in names]


def load_fixed(
    model_dir: Path, *, train: TrainConfig, world: World, context: ContextGroup = WHOLE_CONTEXT
) -> TokenModel:
    """Load a model that does not train, sharded as the policy is, in bf16 if that computes in bf16."""
    source = open_causal(model_dir, dtype=choose_frozen_dtype(train, world))
    called = TokenModel(source.module.requires_grad_(False).eval(), context=context)
    if _is_sharded(train, world):
        _shard_module(called, world=world, policy=MixedPrecisionPolicy())
    source.fill(called, world.device)
    return called
