"""This rank's part of a megatron-core decoder for a model directory of transformers, on GPUs or CPUs.

    build_model_part     the groups of ranks and the GPTModel, with the weights of the directory
    MegatronPart         a rank's part of a model
    ModelCopies          its data-parallel copies, and what they exchange in a step
    choose_copies        the copy that updates each tensor
    pair_shapes          keep shapes apart between two stages each of which follows the other
    patch_for_cpu        let megatron-core run without CUDA, over gloo, for tests and small machines
    CPU_SETTINGS, CPU    its settings and device then

Sizes come from config.json, and so do the settings of routers; frequencies of RoPE and the scale of attention come from
transformers' own model, which is made without memory for its weights.

Each copy of a part updates, saves and publishes a share of its tensors, and only it has their moments. Others send it
their gradients and receive the new weights: the traffic is that of a sum over all copies. A tensor is never divided, so
that an update may look at the whole of it.

Inside `patch_for_cpu()`, and only without CUDA, tensor factories asked for a GPU return CPU tensors, the
current device is the CPU, and there is nothing to synchronise. The generators that Megatron keeps for dropout do
nothing: a trainer has no dropout.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hpcrl.config.recipe import TrainConfig
from hpcrl.errors import TrainError
from hpcrl.hardware.architecture import read_max_context
from hpcrl.hardware.degrees import ParallelDegrees
from hpcrl.trainers.context_group import ContextGroup
from hpcrl.trainers.megatron.kept_pass import KeptPass
from hpcrl.trainers.megatron.layers import (
    list_attentions,
    list_layers,
    make_block_spec,
    replicate_downward,
    skip_output_layer,
)
from hpcrl.trainers.megatron.stage_balance import StageBalance
from hpcrl.trainers.megatron.stage_replay import StageReplay
from hpcrl.trainers.megatron.weight_names import (
    ModelDims,
    ParallelRank,
    ShardMapping,
    check_parallelism,
    list_chunk_layers,
    map_shards,
    pad_vocab_size,
    read_model_dims,
)
from hpcrl.trainers.model_files import ModelSource, open_causal
from hpcrl.trainers.state import StateShard
from hpcrl.trainers.world import World, computes_in_bf16
from hpcrl.weights.layout import TensorShard
from hpcrl.weights.stored_tensors import StoredTensors, split_shard

CPU = torch.device("cpu")
_EXPERT_MARK = ".local_experts."

CPU_SETTINGS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "batch_p2p_comm": False,
    "batch_p2p_sync": False,
}
"""The TransformerConfig settings without CUDA."""


_CPU_STREAM = SimpleNamespace(record_event=torch.cpu.Event)
"""A stream without a device: what is put into it is done already."""


@contextlib.contextmanager
def patch_for_cpu() -> Iterator[None]:
    """Wrap every call of Megatron; with CUDA this changes nothing."""
    if torch.cuda.is_available():
        yield
        return
    with (
        patch("torch.cuda.current_device", lambda: CPU),
        patch("torch.cuda.synchronize", lambda *_: None),
        patch("torch.cuda.Stream", lambda: _CPU_STREAM),
        patch("torch.cuda.current_stream", lambda *_: _CPU_STREAM),
        patch("torch.cuda.stream", lambda _: contextlib.nullcontext()),
        patch("megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu", _leave_on_cpu),
        _CpuFunctionMode(),
    ):
        yield


def _leave_on_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return sizes as Megatron has them after it has copied them from a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


class _CpuFunctionMode(TorchFunctionMode):
    """A mode in which calls of torch use the CPU in place of any GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if (
            "device" in arguments
            and arguments["device"] is not None
            and torch.device(arguments["device"]).type == "cuda"
        ):
            arguments["device"] = CPU
        return func(*args, **arguments)


def pair_shapes() -> AbstractContextManager[Any]:
    """Replace the exchange of shapes between stages.

    Of two stages with several parts of the model each follows the other, so that both send two shapes to one rank, and
    Megatron's order mixes them up.
    """
    return patch.object(P2PCommunicator, "_communicate_shapes", _exchange_shapes)


def _exchange_shapes(
    communicator: Any, to_next: Tensor | None, to_previous: Tensor | None, from_previous: bool, from_next: bool
) -> tuple[list[int], list[int]]:
    """Send the shapes of the tensors that follow, and receive those of the tensors that come, in one order."""
    device = torch.cuda.current_device()
    ranks = (communicator.next_rank, communicator.prev_rank)
    sent = [None if each is None else torch.tensor(each.shape, device=device) for each in (to_next, to_previous)]
    expected = (from_previous, from_next)
    received = [torch.zeros(3, dtype=torch.int64, device=device) if each else None for each in expected]
    works = []
    for to_rank, shape, from_rank, place in zip(ranks, sent, reversed(ranks), received, strict=True):
        if shape is not None:
            works.append(dist.P2POp(dist.isend, shape, to_rank, communicator.pp_group))
        if place is not None:
            works.append(dist.P2POp(dist.irecv, place, from_rank, communicator.pp_group))
    _wait_for_all(dist.batch_isend_irecv(works) if works else ())
    previous, following = ([0, 0, 0] if place is None else place.tolist() for place in received)
    return previous, following


class ModelCopies:
    """The copies of this rank's tensors. Experts have other copies: other ranks hold the same ones."""

    def __init__(self, tensors: Mapping[str, Tensor], rank: ParallelRank) -> None:
        self._rank = rank
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        self.num: int = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        experts = {name: size for name, size in sizes.items() if _is_expert(name)}
        others = {name: size for name, size in sizes.items() if not _is_expert(name)}
        num_expert_copies = parallel_state.get_expert_data_parallel_world_size()
        self._copies = choose_copies(others, num=self.num) | choose_copies(experts, num=num_expert_copies)

    def is_own(self, name: str) -> bool:
        """Return whether this rank is the one that updates a tensor."""
        return self._copies[name] == (self._rank.expert_copy if _is_expert(name) else self._rank.copy)

    def collect_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Sum the gradient of every parameter over its copies, in the one that updates it."""
        _wait_for_all(
            dist.reduce(parameter.grad, group_dst=self._copies[name], group=group, async_op=True)
            for name, parameter in parameters.items()
            if parameter.grad is not None and (group := _find_group(name)).size() > 1
        )

    def send_weights(self, parameters: Mapping[str, Tensor]) -> None:
        """Send every parameter from the copy that has updated it to the others."""
        _wait_for_all(
            dist.broadcast(parameter.detach(), group_src=self._copies[name], group=group, async_op=True)
            for name, parameter in parameters.items()
            if (group := _find_group(name)).size() > 1
        )


def choose_copies(sizes: Mapping[str, int], *, num: int) -> dict[str, int]:
    """Choose the copy that updates each tensor, the largest first, so that all have about the same number of values."""
    loads, found = [0] * num, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = loads.index(min(loads))
        loads[found[name]] += sizes[name]
    return found


def _is_expert(name: str) -> bool:
    return _EXPERT_MARK in name


def _find_group(name: str) -> Any:
    if _is_expert(name):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _wait_for_all(works: Any) -> None:
    for work in list(works):
        work.wait()


class MegatronPart(NamedTuple):
    """The part of a model on this rank."""

    chunks: torch.nn.ModuleList
    """The GPTModels of this rank: one, or with pipeline_chunks several, which are not next to one another."""
    dims: ModelDims
    rank: ParallelRank
    context: ContextGroup
    """The ranks that divide the positions of the same rows in all of their layers."""
    positions: ContextGroup
    """The ranks that divide them between layers: also by tensor parallelism."""
    copies: ModelCopies
    """The ranks with the same tensors, and which of them updates each."""
    max_length: int
    stored: StoredTensors
    """The tensors of the model directory that make up each of the model's."""
    precise_names: Collection[str]
    balance: StageBalance
    """The loss that balances the experts of this rank's layers."""
    replay: StageReplay
    """The experts that engines chose in these layers."""

    def mapped_tensors(self) -> Iterator[tuple[ShardMapping, Tensor]]:
        """Yield every shard of this rank with the parameter or buffer that contains it."""
        tensors = _list_tensors(self.chunks)
        for mapping in map_shards(self.dims, self.rank):
            yield mapping, tensors[mapping.megatron_name]

    def owned_tensors(self) -> Iterator[tuple[ShardMapping, Tensor]]:
        """Yield the shards that this rank provides, also in a checkpoint; over all ranks, each value comes once."""
        for mapping, tensor in self.mapped_tensors():
            if mapping.is_owner and self.copies.is_own(mapping.megatron_name):
                yield mapping, tensor

    def list_shards(self, mapping: ShardMapping, tensor: Tensor, *, part: str) -> Iterator[StateShard]:
        """Yield what a tensor of Megatron's form has of this shard, by the names of the model directory."""
        own = TensorShard(name=mapping.name, start=mapping.start, shape=mapping.shape)
        view = tensor.detach()[mapping.rows].view(mapping.shape)  # an expert's shard has a dimension more
        if mapping.name not in self.stored:
            yield StateShard(part, own, mapping.whole_shape, view)
            return
        for each in split_shard(own, view, self.stored[mapping.name]):
            yield StateShard(part, each.shard, each.stored.shape, each.tensor)

    def list_shapes(self) -> dict[str, tuple[int, ...]]:
        """List the shapes of all tensors of the model directory, whichever rank has them."""
        whole = {mapping.name: mapping.whole_shape for mapping in map_shards(self.dims, ParallelRank())}
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in whole.items():
            found |= {each.name: each.shape for each in self.stored.get(name, ())} or {name: shape}
        return found


def build_model_part(model_dir: Path, *, train: TrainConfig, world: World, seed: int) -> MegatronPart:
    """Build the part of the model that this rank of `world` trains, with the weights of the directory."""
    source = open_causal(model_dir)
    fields = source.module.config.to_dict()
    dims = read_model_dims(fields)
    if train.moe_aux_coef and not dims.shape.num_experts:
        raise TrainError(
            f"train.moe_aux_coef = {train.moe_aux_coef:g} needs a model with experts, and the one in {model_dir} has "
            "none: remove it"
        )
    degrees, num_chunks = train.degrees, train.pipeline_chunks
    check_parallelism(dims, degrees, num_chunks=num_chunks)
    if world.size % degrees.num_divided:
        shown = ", ".join(f"train.{name} = {num}" for name, num in degrees.settings.items() if num > 1)
        raise TrainError(
            f"{world.size} ranks cannot be split into groups of {shown}: set resources.train.num_workers to a multiple "
            f"of {degrees.num_divided}"
        )
    _join_groups(degrees, num_chunks=num_chunks, seed=seed)
    rank = _find_rank(degrees, num_chunks=num_chunks)
    context = ContextGroup(rank.cp, degrees.context, parallel_state.get_context_parallel_group())
    shared = parallel_state.get_tensor_and_context_parallel_group()
    positions = ContextGroup(rank.cp * degrees.tensor + rank.tp, degrees.tensor * degrees.context, shared)
    made = (_make_gpt_model(fields, dims, rank, chunk=chunk, train=train) for chunk in range(num_chunks))
    chunks = torch.nn.ModuleList(made)
    if dims.shape.kv_rank:
        replicate_downward(chunks)
    _set_positions(chunks, source, context, is_compressed=bool(dims.shape.kv_rank))
    skip_output_layer(chunks[-1])
    balance = StageBalance(list_layers(chunks), coef=train.moe_aux_coef, context=positions)
    numbers = (number for chunk in range(num_chunks) for number in list_chunk_layers(dims, rank, chunk=chunk))
    numbered = zip(numbers, list_layers(chunks), strict=True)
    replay = StageReplay(numbered, is_on=train.router_replay, dims=dims, context=positions)
    if train.recompute is True:
        _recompute_layers(chunks, balance.kept, replay.kept)
    model_part = MegatronPart(
        chunks=chunks.to(world.device).eval(),
        dims=dims,
        rank=rank,
        context=context,
        positions=positions,
        copies=ModelCopies(_list_tensors(chunks), rank),
        max_length=read_max_context(fields) or int(fields["max_position_embeddings"]),
        stored=source.stored or {},
        precise_names=source.find_precise_names(),
        balance=balance,
        replay=replay,
    )
    _fill(model_part, source)
    return model_part


def _list_tensors(chunks: torch.nn.ModuleList) -> dict[str, Tensor]:
    return dict(chunks.named_parameters()) | dict(chunks.named_buffers())


def _join_groups(degrees: ParallelDegrees, *, num_chunks: int, seed: int) -> None:
    """Make the groups of ranks. An expert is never divided, so that tensor parallelism leaves experts whole."""
    if not dist.is_initialized():  # Megatron needs groups even for a single rank
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    asked = (degrees, num_chunks if num_chunks > 1 else None)
    if parallel_state.model_parallel_is_initialized() and asked != _read_joined_degrees():
        parallel_state.destroy_model_parallel()  # of a trainer that this process had before
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            degrees.tensor,
            degrees.pipeline,
            num_chunks if num_chunks > 1 else None,
            context_parallel_size=degrees.context,
            expert_model_parallel_size=degrees.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed)
    else:
        initialize_rng_tracker(inference_rng_tracker=True)


def _read_joined_degrees() -> tuple[ParallelDegrees, int | None]:
    degrees = ParallelDegrees(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
    )
    return degrees, parallel_state.get_virtual_pipeline_model_parallel_world_size()


def _find_rank(degrees: ParallelDegrees, *, num_chunks: int) -> ParallelRank:
    return ParallelRank(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        num_tp=degrees.tensor,
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        num_pp=degrees.pipeline,
        ep=parallel_state.get_expert_model_parallel_rank(),
        num_ep=degrees.expert,
        num_cp=degrees.context,
        num_chunks=num_chunks,
        copy=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        expert_copy=parallel_state.get_expert_data_parallel_rank(),
    )


def _make_gpt_model(
    fields: Mapping[str, Any], dims: ModelDims, rank: ParallelRank, *, chunk: int, train: TrainConfig
) -> Any:
    rotary = fields.get("rope_parameters") or fields
    return GPTModel(
        config=_make_transformer_config(fields, dims, rank, train=train),
        transformer_layer_spec=make_block_spec(dims, list_chunk_layers(dims, rank, chunk=chunk)),
        vocab_size=pad_vocab_size(dims, num_tp=rank.num_tp),
        max_sequence_length=fields["max_position_embeddings"],
        pre_process=rank.is_first and chunk == 0,
        post_process=rank.is_last and chunk == rank.num_chunks - 1,
        vp_stage=chunk if rank.num_chunks > 1 else None,
        parallel_output=True,
        # Over several stages the two copies stay equal because their gradients are summed: see MegatronTrainer.
        share_embeddings_and_output_weights=dims.shape.is_tied and rank.num_pp == 1,
        position_embedding_type="rope",
        rotary_percent=rotary.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0,
    )


def _make_transformer_config(
    fields: Mapping[str, Any], dims: ModelDims, rank: ParallelRank, *, train: TrainConfig
) -> TransformerConfig:
    """Configure plain layers without fusion or dropout; autocast sets the dtype."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, on_gpus, num_parts = dims.shape, device.type == "cuda", rank.num_pp * rank.num_chunks
    num_layers = (
        -(-shape.num_layers // num_parts) * num_parts
    )  # Megatron wants the same on each; what it makes is listed
    settings = dict(
        num_layers=num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.dense_inner,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_heads if shape.kv_rank else shape.num_kv_heads,
        kv_channels=shape.head_dim,
        tensor_model_parallel_size=rank.num_tp,
        pipeline_model_parallel_size=rank.num_pp,
        virtual_pipeline_model_parallel_size=rank.num_chunks if rank.num_chunks > 1 else None,
        context_parallel_size=rank.num_cp,
        expert_model_parallel_size=rank.num_ep,
        expert_tensor_parallel_size=1,
        # What is between the layers is divided over the ranks too: the same traffic, and a part of the memory.
        sequence_parallel=rank.num_tp > 1,
        # Rows of one micro-batch are much longer than those of another.
        variable_seq_lengths=rank.num_pp > 1,
        moe_token_dispatcher_type="alltoall",
        # Megatron's layers pass on the dtype of their last product, so stages must too.
        pipeline_dtype=torch.bfloat16 if train.has_bf16(on_bf16_gpus=computes_in_bf16(device)) else torch.float32,
        normalization="RMSNorm",
        layernorm_epsilon=fields["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=dims.qkv_bias,
        qk_layernorm=shape.has_query_norm or bool(shape.kv_rank),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=False,
        **({} if on_gpus else CPU_SETTINGS),
        **(_list_expert_settings(fields, dims) if shape.num_experts else {}),
    )
    if not shape.kv_rank:
        return TransformerConfig(**settings)
    return MLATransformerConfig(
        **settings,
        multi_latent_attention=True,
        q_lora_rank=shape.query_rank or None,
        kv_lora_rank=shape.kv_rank,
        qk_head_dim=shape.head_dim - shape.rope_dim,
        qk_pos_emb_head_dim=shape.rope_dim,
        v_head_dim=shape.value_dim,
        rope_type="rope",
        rotary_percent=1.0,
    )


def _list_expert_settings(fields: Mapping[str, Any], dims: ModelDims) -> dict[str, Any]:
    """List the settings of layers with experts; no token is ever dropped."""
    shape = dims.shape
    settings: dict[str, Any] = {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.expert_inner,
        "moe_shared_expert_intermediate_size": shape.shared_inner or None,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }
    if not dims.has_router_bias:
        # A softmax over the chosen experts alone makes their weights sum up to one.
        is_normalized = shape.family == "mixtral" or fields.get("norm_topk_prob", False)
        return settings | {"moe_router_pre_softmax": not is_normalized}
    num_groups = fields.get("n_group") or 1
    groups = {"moe_router_num_groups": num_groups, "moe_router_group_topk": fields["topk_group"]}
    return (
        settings
        | {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_topk_scaling_factor": fields.get("routed_scaling_factor") or 1.0,
        }
        | (groups if num_groups > 1 else {})
    )


def _set_positions(
    chunks: torch.nn.ModuleList, source: ModelSource, context: ContextGroup, *, is_compressed: bool
) -> None:
    """Take the frequencies of RoPE, and the scale of attention, from transformers' model, and this rank's positions.

    Megatron would give each rank two parts of a row, so that all have the same share of the pairs of tokens; here ranks
    have whole rows where they attend, and so one part each.
    """
    decoder = source.module.get_decoder()
    rotary, scale = decoder.rotary_emb, float(decoder.layers[0].self_attn.scaling)
    num_turned = 2 * len(rotary.inv_freq)
    turned = slice(-num_turned, None) if is_compressed else slice(num_turned)
    for attention in list_attentions(chunks):
        attention.core_attention.softmax_scale = scale
        # What turns queries and keys also multiplies both, in the part of a head that it turns.
        attention.core_attention.turned_factor = float(rotary.attention_scaling) ** 2
        attention.core_attention.turned = turned
        attention.core_attention.context = context
    part: Any
    for part in chunks.modules():
        own = getattr(part, "inv_freq", None)
        if isinstance(own, Tensor):
            own.copy_(rotary.inv_freq)
            part.cp_group = None
            part.get_emb = partial(_embed_own_positions, part.get_emb, context)


def _embed_own_positions(embed: Callable[..., Tensor], context: ContextGroup, length: int, offset: int = 0) -> Tensor:
    """Return what turns queries and keys at this rank's positions of rows that have `length` of them."""
    num_own = length // context.size
    return embed(num_own, offset + context.rank * num_own)


def _recompute_layers(chunks: torch.nn.ModuleList, *kept: KeptPass[Any]) -> None:
    """Let every layer keep only its input for the gradient, and compute the rest of its forward pass again."""
    for layer in list_layers(chunks):
        forward = partial(_forward_and_release, layer, layer.forward)
        layer.forward = partial(
            checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=partial(_keep_passes, kept)
        )


def _keep_passes(
    kept: Iterable[KeptPass[Any]],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a layer that is recomputed, for the first time and for the second."""
    return contextlib.nullcontext(), _enter_all([each.use_again() for each in kept])


@contextlib.contextmanager
def _enter_all(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def _forward_and_release(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer's forward pass, and let its dispatcher forget the tensors of this pass.

    It would keep them until the next one, and with them all that attention has computed again for the gradient.
    """
    try:
        return forward(*args, **kwargs)
    finally:  # what is computed again ends with an exception, as soon as enough is there
        dispatcher = getattr(layer.mlp, "token_dispatcher", None)
        for name, held in vars(dispatcher).items() if dispatcher is not None else ():
            if isinstance(held, Tensor) and held.requires_grad:
                setattr(dispatcher, name, None)


def _fill(model_part: MegatronPart, source: ModelSource) -> None:
    """Copy this rank's shards, and no others, from the files of the directory."""
    source.read_shards(
        (
            TensorShard(name=mapping.name, start=mapping.start, shape=mapping.shape),
            tensor.detach()[mapping.rows].view(mapping.shape),
        )
        for mapping, tensor in model_part.mapped_tensors()
    )
