"""The sizes of common models (`MODEL_CONFIGS`), by their names on Hugging Face, as in their config.json. Pure.

find_model_config    the sizes of one; None if it is not here

Measurements that others publish name their models like this. Models whose attention is linear in some layers are here
as if it were not, so that their KV is too large.
"""

from typing import Any

_DEEPSEEK_V3 = dict(
    model_type="deepseek_v3", hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, intermediate_size=18432,
    moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
    first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, vocab_size=129280,
)  # fmt: skip
_LLAMA_70B = dict(
    model_type="llama", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    intermediate_size=28672, vocab_size=128256,
)  # fmt: skip
MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": dict(
        model_type="qwen3", hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, intermediate_size=12288, vocab_size=151936,
    ),
    "Qwen/Qwen3-14B": dict(
        model_type="qwen3", hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=8,
        head_dim=128, intermediate_size=17408, vocab_size=151936,
    ),
    "Qwen/Qwen3-32B": dict(
        model_type="qwen3", hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, intermediate_size=25600, vocab_size=151936,
    ),
    "Qwen/Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        vocab_size=151936,
    ),
    "Qwen/Qwen3-235B-A22B": dict(
        model_type="qwen3_moe", hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4,
        head_dim=128, intermediate_size=12288, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8,
        vocab_size=151936,
    ),
    "Qwen/Qwen3.5-397B-A17B": dict(
        hidden_size=4096, num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=2, head_dim=256,
        intermediate_size=1024, moe_intermediate_size=1024, num_experts=512, num_experts_per_tok=10,
        shared_expert_intermediate_size=1024, vocab_size=248320,
    ),
    "meta-llama/Llama-3.1-8B": dict(
        model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256,
    ),
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.3-70B": _LLAMA_70B,
    "openai/gpt-oss-120b": dict(
        hidden_size=2880, num_hidden_layers=36, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4, vocab_size=201088,
    ),
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V3.1": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-R1": _DEEPSEEK_V3,
    "moonshotai/Kimi-K2.5": _DEEPSEEK_V3
    | dict(num_attention_heads=64, n_routed_experts=384, first_k_dense_replace=1, vocab_size=163840),
    "MiniMaxAI/MiniMax-M2.5": dict(
        hidden_size=3072, num_hidden_layers=62, num_attention_heads=48, num_key_value_heads=8, head_dim=128,
        intermediate_size=1536, num_local_experts=256, num_experts_per_tok=8, vocab_size=200064,
    ),
    "zhipuai/GLM-5": dict(
        model_type="deepseek_v3", hidden_size=6144, num_hidden_layers=78, num_attention_heads=64,
        intermediate_size=12288, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
        n_shared_experts=1, first_k_dense_replace=3, q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192,
        qk_rope_head_dim=64, v_head_dim=256, vocab_size=154880,
    ),
}  # fmt: skip
_VARIANTS = ("-Instruct", "-FP8", "-NVFP4", "-MXFP4", "-Base", "-BF16", "-AWQ")
"""Endings of names whose models have the same sizes."""


def find_model_config(name: str) -> dict[str, Any] | None:
    """Return the sizes of a model, also under the name of a quantized or tuned variant, of any publisher."""
    if name in MODEL_CONFIGS:
        return MODEL_CONFIGS[name]
    short = name.rpartition("/")[2]
    for ending in _VARIANTS:
        short = short.removesuffix(ending)
    by_short_name = {known.rpartition("/")[2]: config for known, config in MODEL_CONFIGS.items()}
    return by_short_name.get(short)
