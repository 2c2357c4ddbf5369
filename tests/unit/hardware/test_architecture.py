"""The weights of published models, counted from their config.json, against transformers' models on the meta device."""

from typing import Any

import pytest

from hpcrl.hardware.architecture import KNOWN_FAMILIES, guess_architecture, read_architecture, read_max_context

DENSE = {"num_hidden_layers": 2, "vocab_size": 1000}
"""Fewer layers and tokens than published, so that each model is made in a moment."""
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        **{"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    },
    "Qwen3-0.6B": {
        **{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        **{"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
        **{"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    },
    "Llama-3.1-70B": {
        **{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
    },
    "Mistral-7B-v0.3": {
        **{"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768},
    },
    "Mixtral-8x7B": {
        **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    },
    "Qwen3-30B-A3B": {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1},
        "mlp_only_layers": [],
    },
    "Qwen1.5-MoE-A2.7B": {
        **{"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936},
        **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1},
        "shared_expert_intermediate_size": 5632,
    },
    "DeepSeek-V3": {
        **{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61},
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "attention_bias": False},
        **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048},
        **{"first_k_dense_replace": 3, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
    },
    "DeepSeek-V2-Lite": {
        **{"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "q_lora_rank": None},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1408, "num_experts_per_tok": 6},
        **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    },
    "GLM-4.5": {
        **{"model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92},
        **{"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552},
        **{"attention_bias": True, "use_qk_norm": True, "n_routed_experts": 160, "n_shared_experts": 1},
        **{"moe_intermediate_size": 1536, "num_experts_per_tok": 8, "first_k_dense_replace": 3},
    },
    "Gemma-2-9B": {
        **{"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000},
    },
    "Gemma-3-4B (text)": {
        **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    },
}
PUBLISHED_BILLIONS = {
    **{"Qwen3-8B": 8.19, "Qwen2.5-7B": 7.62, "Llama-3.1-70B": 70.6, "Mixtral-8x7B": 46.7, "Qwen3-30B-A3B": 30.5},
    **{"DeepSeek-V3": 671.0, "DeepSeek-V2-Lite": 15.7, "GLM-4.5": 353.0, "Gemma-2-9B": 9.24, "Qwen3-0.6B": 0.596},
}


def cut_config(name: str) -> dict[str, Any]:
    """Return a published configuration with few layers, one more than those without experts."""
    config = CONFIGS[name]
    return config | {"num_hidden_layers": config.get("first_k_dense_replace", 1) + 1}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_counted_as_transformers_makes_them(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = cut_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    shape = read_architecture(fields)
    weights = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in weights.items() if ".experts." in name)
    assert shape.family in KNOWN_FAMILIES
    assert shape.num_params == sum(weights.values())
    assert shape.num_expert_params == experts
    assert shape.embedding_params == weights["model.embed_tokens.weight"]
    last = f".{shape.num_layers - 1}."
    assert shape.largest_layer_params >= sum(size for name, size in weights.items() if last in name)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_BILLIONS.items())
def test_whole_models_have_the_published_number_of_weights(name: str, billions: float) -> None:
    assert read_architecture(CONFIGS[name]).num_params / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_language_model_within_a_model_of_images_is_read_with_its_family_defaults() -> None:
    nested = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "model_type": "gemma3_text"}
    found = read_architecture({"model_type": "gemma3", "text_config": nested, "vision_config": {"hidden_size": 1152}})
    assert found == read_architecture(CONFIGS["Gemma-3-4B (text)"])


def test_compressed_attention_keeps_less_of_a_token() -> None:
    shape = read_architecture(CONFIGS["DeepSeek-V3"])
    assert shape.kv_values_per_token == 61 * (512 + 64)


def test_an_unknown_family_is_counted_and_known_to_be_an_estimate() -> None:
    found = read_architecture(CONFIGS["Mistral-7B-v0.3"] | {"model_type": "new_family"})
    assert found.family not in KNOWN_FAMILIES
    assert found.num_params == read_architecture(CONFIGS["Mistral-7B-v0.3"]).num_params


@pytest.mark.parametrize("num_params", [1_000_000, 8_200_000_000, 70_000_000_000, 10**12])
def test_a_guessed_model_has_the_given_number_of_weights(num_params: int) -> None:
    assert guess_architecture(num_params).num_params == pytest.approx(num_params, rel=0.1)


@pytest.mark.parametrize(
    ("length", "rope", "expected"),
    [
        (40960, {}, 40960),
        (40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (163840, {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840),
        (4096, {"rope_type": "linear", "factor": 2.0}, 8192),
        (131072, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072),
    ],
    ids=["plain", "Qwen3", "DeepSeek-V3", "linear", "Llama-3.1"],
)
def test_the_context_is_stretched_by_rope_scaling_once(length: int, rope: dict[str, Any], expected: int) -> None:
    assert read_max_context({"max_position_embeddings": length, "rope_scaling": rope}) == expected
