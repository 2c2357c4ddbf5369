"""This rank's part of a megatron-core decoder for a model directory of transformers, on GPUs or CPUs.

    build_model_part     the groups of ranks and the GPTModel
    MegatronPart         a rank's part of a model
    fill_from_directory  copy HF weights into it
    patch_for_cpu        let megatron-core run without CUDA, over gloo, for tests and small machines
    CPU_SETTINGS, CPU    its settings and device then

Inside `patch_for_cpu()`, and only without CUDA, tensor factories asked for a GPU return CPU tensors, the
current device is the CPU, and there is nothing to synchronise. The generators that Megatron keeps for dropout do
nothing: a trainer has no dropout.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from hpcrl.config.recipe import TrainConfig
from hpcrl.errors import TrainError
from hpcrl.trainers.megatron.weight_names import (
    ModelDims,
    ParallelRank,
    ShardMapping,
    check_parallelism,
    map_shards,
    pad_vocab_size,
    read_model_dims,
)
from hpcrl.trainers.world import World

CPU = torch.device("cpu")

CPU_SETTINGS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "batch_p2p_comm": False,
    "batch_p2p_sync": False,
}
"""The TransformerConfig settings without CUDA."""


@contextlib.contextmanager
def patch_for_cpu() -> Iterator[None]:
    """Wrap every call of Megatron; with CUDA this changes nothing."""
    if torch.cuda.is_available():
        yield
        return
    with (
        patch("torch.cuda.current_device", lambda: CPU),
        patch("torch.cuda.synchronize", lambda *_: None),
        _CpuFunctionMode(),
    ):
        yield


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


class MegatronPart(NamedTuple):
    """The part of a model on this rank."""

    module: Any
    config: Any
    """The Hugging Face configuration."""
    dims: ModelDims
    rank: ParallelRank
    data_rank: int
    num_data: int

    def mapped_parameters(self) -> Iterator[tuple[ShardMapping, Tensor]]:
        """Yield every shard of this rank with the parameter that contains it."""
        parameters = dict(self.module.named_parameters())
        for mapping in map_shards(self.dims, self.rank):
            yield mapping, parameters[mapping.megatron_name]


def build_model_part(model_dir: Path, *, train: TrainConfig, world: World, seed: int) -> MegatronPart:
    """Build the part of the model that this rank of `world` trains, with the weights of the directory."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    dims = read_model_dims(config)
    num_tp, num_pp = train.tensor_parallel, train.pipeline_parallel
    check_parallelism(dims, num_tp=num_tp, num_pp=num_pp)
    if world.size % (num_tp * num_pp):
        raise TrainError(
            f"{world.size} ranks cannot be split into groups of train.tensor_parallel x train.pipeline_parallel = "
            f"{num_tp} x {num_pp}: set resources.train.num_workers to a multiple"
        )
    if not dist.is_initialized():  # Megatron needs groups even for a single rank
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(num_tp, num_pp, create_gloo_process_groups=False)
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed)
    else:
        initialize_rng_tracker(inference_rng_tracker=True)
    rank = ParallelRank(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        num_tp=num_tp,
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        num_pp=num_pp,
    )
    module = _make_gpt_model(config, dims, rank, train).to(world.device).eval()
    model_part = MegatronPart(
        module=module,
        config=config,
        dims=dims,
        rank=rank,
        data_rank=parallel_state.get_data_parallel_rank(),
        num_data=parallel_state.get_data_parallel_world_size(),
    )
    fill_from_directory(model_part, model_dir)
    return model_part


def _make_gpt_model(config: Any, dims: ModelDims, rank: ParallelRank, train: TrainConfig) -> Any:
    rope = getattr(config, "rope_parameters", None) or {}
    return GPTModel(
        config=_make_transformer_config(config, dims, rank, train),
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=dims.qk_norm, normalization="RMSNorm"),
        vocab_size=pad_vocab_size(dims, num_tp=rank.num_tp),
        max_sequence_length=config.max_position_embeddings,
        pre_process=rank.is_first,
        post_process=rank.is_last,
        parallel_output=True,
        # Over several stages the two copies stay equal because their gradients are summed: see MegatronTrainer.
        share_embeddings_and_output_weights=dims.tied and rank.num_pp == 1,
        position_embedding_type="rope",
        rotary_base=int(rope.get("rope_theta", getattr(config, "rope_theta", 10000))),
    )


def _make_transformer_config(config: Any, dims: ModelDims, rank: ParallelRank, train: TrainConfig) -> TransformerConfig:
    """Configure plain layers without fusion or dropout; autocast sets the dtype."""
    on_cpu = {} if torch.cuda.is_available() else CPU_SETTINGS
    return TransformerConfig(
        num_layers=dims.num_layers,
        hidden_size=dims.hidden,
        ffn_hidden_size=dims.ffn,
        num_attention_heads=dims.num_heads,
        num_query_groups=dims.num_groups,
        kv_channels=dims.head,
        tensor_model_parallel_size=rank.num_tp,
        pipeline_model_parallel_size=rank.num_pp,
        # Megatron's layers pass on the dtype of their last product, so stages must too.
        pipeline_dtype=torch.bfloat16 if train.has_bf16(on_gpus=torch.cuda.is_available()) else torch.float32,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=dims.qkv_bias,
        qk_layernorm=dims.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=False,
        **on_cpu,
    )


def fill_from_directory(model_part: MegatronPart, model_dir: Path) -> None:
    """Copy this rank's shards, and no others, from the safetensors files."""
    path_by_name = _map_tensor_files(model_dir)
    with torch.no_grad():
        for mapping, parameter in model_part.mapped_parameters():
            path = path_by_name.get(mapping.name)
            if path is None:
                raise TrainError(f"model directory {str(model_dir)!r} has no tensor {mapping.name!r}: is it complete?")
            slices = tuple(slice(start, start + size) for start, size in zip(mapping.start, mapping.shape, strict=True))
            with _open_safetensors(path) as file:
                parameter[mapping.rows].copy_(file.get_slice(mapping.name)[slices])


def _map_tensor_files(model_dir: Path) -> Mapping[str, Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: model_dir / file for name, file in names.items()}
    single_file = model_dir / "model.safetensors"
    with _open_safetensors(single_file) as file:
        return dict.fromkeys(file.keys(), single_file)


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TrainError(f"model directory {str(path.parent)!r} cannot be loaded: {error}") from error
