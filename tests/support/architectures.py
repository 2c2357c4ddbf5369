"""Real architectures with small dimensions, for trainers that divide a model, and what their ranks run."""

from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.learners import CONTEXT, VOCABULARY, train_megatron, train_torch

SIZES = {
    "vocab_size": VOCABULARY + 1,  # which two ranks pad
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": CONTEXT},
    **{"tie_word_embeddings": False, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
}
_SCALED = {"rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 16}
_YARN = {**_SCALED, "rope_type": "yarn"}
_LLAMA3 = {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_CORRECTED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}


class SmallArchitecture(NamedTuple):
    """The fields of a config.json that are not those of SIZES."""

    family: str
    has_experts: bool
    fields: dict[str, Any]


FAMILIES = {
    "llama3": SmallArchitecture("llama", False, {"rope_parameters": _LLAMA3}),
    "qwen2": SmallArchitecture("qwen2", False, {}),
    "qwen3": SmallArchitecture("qwen3", False, {"tie_word_embeddings": True, "rope_parameters": _YARN}),
    "qwen3_moe": SmallArchitecture("qwen3_moe", True, {"num_experts": 4, "norm_topk_prob": True}),
    "mixtral": SmallArchitecture("mixtral", True, {"num_local_experts": 4, "moe_intermediate_size": None}),
    "deepseek_v3": SmallArchitecture(
        "deepseek_v3",
        True,
        {
            **{**_CORRECTED, **_LATENT, "num_key_value_heads": 4, "head_dim": 4, "num_experts_per_tok": 4},
            **{"n_group": 4, "topk_group": 2},
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
        },
    ),
    "glm4_moe": SmallArchitecture(
        "glm4_moe",
        True,
        {
            **{**_CORRECTED, "n_group": 1, "topk_group": 1, "attention_bias": True, "use_qk_norm": True},
            "num_hidden_layers": 5,  # which no number of stages divides
            "rope_parameters": {**_YARN, "partial_rotary_factor": 0.5},
        },
    ),
}


def make_small(directory, family, *, seed=0):
    """Save a model of a family in which no norm, bias or correction of a router is one or zero."""
    architecture = FAMILIES[family]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture.family, **SIZES | architecture.fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_((0.1 if tensor.ndim == 1 else 0.05) * torch.randn_like(tensor))
    model.save_pretrained(directory)
    return directory


def make_families(folder, families):
    """Save a model of each family; return their directories."""
    return {family: make_small(folder / family, family) for family in families}


def train_families(world, cases):
    """Make a step of Megatron for each model directory and parallelism, in ranks that are started once."""
    return [
        train_megatron(world, model_dir, {"trainer": "megatron", **parallel}, save_to=save_to, last=1)
        for model_dir, parallel, save_to in cases
    ]


def train_torch_families(world, cases):
    """Make a step of torch for each model directory and settings."""
    return [train_torch(world, model_dir, changed, last=1) for model_dir, changed in cases]


def train_torch_ranks(directories, changed):
    """Make a step of torch on one rank and on two; return the numbers by family and number of ranks."""
    cases = [(str(path), changed) for path in directories.values()]
    alone = train_torch_families(SINGLE_RANK, cases)
    two = run_ranks(2, "tests.support.architectures:train_torch_families", cases)[0]
    return {(family, num): found[at] for num, found in ((1, alone), (2, two)) for at, family in enumerate(directories)}


def train_two_ranks(directories, changed, parallel):
    """Make a step of two ranks of Megatron; return the numbers by family and name of the parallelism."""
    keys = [(family, name) for family in directories for name in parallel]
    cases = [(str(directories[family]), changed | parallel[name], None) for family, name in keys]
    ranks = run_ranks(2, "tests.support.architectures:train_families", cases, timeout_s=800)
    return dict(zip(keys, ranks[0], strict=True))
