"""Small models of real families, in the files that transformers writes: experts one by one.

make_family_model  make and save one
stack_experts      write it as transformers has it in memory
"""

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.config.recipe import TinyModel
from hpcrl.models.expert_routers import find_routers
from hpcrl.models.tiny import _make_tokenizer
from tests.support.learners import CONTEXT, VOCABULARY

_SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": False},
    **{"moe_intermediate_size": 32, "num_experts_per_tok": 2},
}
DENSE_FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"head_dim": None, "hidden_size": 128},  # of its heads: vLLM reads no other
    "qwen3": {},
}
_BIASED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 1}
"""The sizes of families whose routers have a correction, which files hold and no optimizer changes."""
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
"""The sizes of compressed attention; on CPUs vLLM has kernels for a rank of 512 with 64 rotated values alone."""
EXPERT_FAMILIES = {
    "qwen3_moe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4, "moe_intermediate_size": None},  # a field that it does not have
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32, "head_dim": None, "hidden_size": 128},
    "deepseek_v3": {
        **{**_BIASED, **_LATENT, "num_key_value_heads": 4, "head_dim": None, "n_group": 2},
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # in files of the hub: vLLM would use softmax alone
    },
    "glm4_moe": {**_BIASED, "n_group": 1, "use_qk_norm": True},
}


SCALED_FAMILIES: dict[str, dict[str, object]] = {
    "granite": {"logits_scaling": 4.0, "head_dim": None},
    "cohere": {"logit_scale": 0.25, "head_dim": None},
}
"""Families that change what their output layer gives."""


def make_family_model(directory, family, *, seed=0, **changed):
    """Save a model of a family in two layers, with norms and corrections other than one and zero."""
    fields = {
        name: value
        for name, value in (_SIZES | (DENSE_FAMILIES | EXPERT_FAMILIES | SCALED_FAMILIES)[family] | changed).items()
        if value is not None
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.ndim == 1 or "gate.weight" in name:
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(directory)
    return directory


def stack_experts(directory):
    """Write a model again with the experts of each layer as one tensor, under the names that it has in memory."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})


def make_close_model(directory, family, **changed):
    """Save a model that can be served, whose experts differ much and whose scores of them differ little.

    Small changes of a router choose other experts, whose weights are nearly the same.
    """
    tokenizer = _make_tokenizer(TinyModel())
    make_family_model(directory, family, vocab_size=len(tokenizer), max_position_embeddings=256, **changed)
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter *= 20
        for router in find_routers(model):
            router.weight *= 1e-5
            if hasattr(router, "e_score_correction_bias"):
                router.e_score_correction_bias *= 1e-5
    model.save_pretrained(directory)
    return directory


def perturb_routers(model):
    """Change the scores of experts by as little as they differ."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for router in find_routers(model):
            router.weight += 1e-6 * torch.randn(router.weight.shape, generator=generator)
            if (bias := getattr(router, "e_score_correction_bias", None)) is not None:
                bias += 1e-5 * torch.randn(bias.shape, generator=generator)
