"""The memory of a rank of trainer "megatron", against numbers by hand and the trainer's own passes."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.hardware import megatron_memory
from hpcrl.hardware.architecture import read_architecture
from hpcrl.hardware.megatron_memory import MegatronSetup, estimate_megatron_memory
from hpcrl.trainers.megatron.weight_names import ParallelRank, map_shards, read_model_dims
from tests.support.megatron import skip_without_megatron
from tests.unit.hardware.test_train_memory import LLAMA_70B, make_plain

EIGHT = MegatronSetup(num_ranks=8, tensor_parallel=2, pipeline_parallel=2)
SIZES: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 256, "max_position_embeddings": 4096},
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
COMPRESSED = {
    **{"head_dim": None, "num_key_value_heads": 8, "q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 64},
    **{"qk_rope_head_dim": 32, "v_head_dim": 64, "moe_intermediate_size": 384, "n_routed_experts": 8},
    **{"num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "experts": ("qwen3_moe", EXPERTS),
    "balanced": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 384}),
    "compressed": ("deepseek_v3", COMPRESSED),
    "words": ("qwen3", {"vocab_size": 65536, "num_hidden_layers": 2}),
}
"""The families and further sizes of the models; tokens of the balanced one are sent to all experts."""
NUM_TOKENS = 2048
ONE_RANK = [(name, recompute) for name in ("dense", "experts", "balanced", "compressed") for recompute in (False, True)]
TENSOR, EXPERT, STAGES = {"tensor_parallel": 2}, {"expert_parallel": 2}, {"pipeline_parallel": 2}
CONTEXT, CHUNKS = {"context_parallel": 2}, STAGES | {"pipeline_chunks": 2}
TWO_RANKS = [
    *(("dense", TENSOR, True), ("dense", TENSOR, False), ("dense", STAGES, True), ("dense", STAGES, False)),
    *(("balanced", TENSOR | EXPERT, True), ("balanced", TENSOR | EXPERT, False), ("balanced", EXPERT, False)),
    *(("balanced", TENSOR, True), ("balanced", STAGES, True), ("balanced", STAGES, False)),
    *(("compressed", TENSOR, True), ("compressed", TENSOR, False), ("words", TENSOR, True), ("words", STAGES, True)),
    *(("dense", CONTEXT, True), ("dense", CONTEXT, False), ("compressed", CONTEXT, False)),
]


def test_the_state_of_a_small_model_is_counted_by_hand() -> None:
    """A stage has one of two layers, and one table of words: half of each, and norms whole."""
    divided = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12 + 10 * 8
    memory = estimate_megatron_memory(make_plain(), EIGHT, num_tokens=1)
    norms = 2 * 8 + 8  # those of the last stage's layer, and the last one
    assert memory.weights == memory.gradients == 4 * (divided / 2 + norms)
    assert memory.optimizer == 8 * max((divided / 2 + norms) / 2, 2 * 8 * 12 / 2)


def test_more_copies_share_the_moments_up_to_the_largest_tensor() -> None:
    shape = read_architecture(LLAMA_70B)
    moments = [
        estimate_megatron_memory(shape, MegatronSetup(num_ranks=num, tensor_parallel=8), num_tokens=0).optimizer
        for num in (8, 16, 8 * 4096)
    ]
    assert moments[0] == 2 * moments[1]
    assert moments[2] == 8 * 128256 * 8192 / 8, "the words' table"


def test_a_rank_with_one_expert_may_have_far_more_tokens_than_one_with_many() -> None:
    shape = read_architecture({**SIZES, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 64})
    kept = [
        estimate_megatron_memory(shape, MegatronSetup(num_ranks=64, expert_parallel=num), num_tokens=4096).activations
        for num in (4, 16, 64)
    ]
    assert kept[0] < kept[1] < kept[2]
    assert (kept[1] - kept[0]) / (kept[2] - kept[0]) == pytest.approx((1 - 0.5) / (2 - 0.5)), "16, 4 and 1"


def test_the_first_stage_keeps_a_micro_batch_for_every_stage() -> None:
    shape, setup = read_architecture(LLAMA_70B), MegatronSetup(num_ranks=8, pipeline_parallel=8, is_bf16=True)
    kept = [
        estimate_megatron_memory(shape, each, num_tokens=8192).activations
        for each in (setup, msgspec.structs.replace(setup, num_ranks=1, pipeline_parallel=1))
    ]
    assert kept[0] == pytest.approx(kept[1], rel=0.01), "an eighth of the layers, eight times"


@pytest.mark.parametrize(
    ("sparse", "num_stages"),
    [({"decoder_sparse_step": 2}, 2), ({"mlp_only_layers": [0, 1, 3]}, 4)],
    ids=["every", "named"],
)
def test_each_stage_has_experts_in_the_layers_that_the_trainer_gives_them(
    sparse: dict[str, Any], num_stages: int
) -> None:
    fields = {**SIZES, **EXPERTS, **sparse, "model_type": "qwen3_moe"}
    stages = [ParallelRank(pp=stage, num_pp=num_stages) for stage in range(num_stages)]
    held = [sum(math.prod(each.shape) for each in map_shards(read_model_dims(fields), stage)) for stage in stages]
    setup = MegatronSetup(num_ranks=num_stages, pipeline_parallel=num_stages)
    assert estimate_megatron_memory(read_architecture(fields), setup, num_tokens=0).weights == 4 * max(held)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, found = tmp_path_factory.mktemp("models"), {}
    for name, (family, more) in MODELS.items():
        fields = {key: value for key, value in (SIZES | more).items() if value is not None}
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).save_pretrained(folder / name)
        found[name] = folder / name
    return found


def measure(num_ranks: int, models: dict[str, Path], cases: list[tuple[str, dict[str, Any]]], **more: Any) -> list[int]:
    """Return, for each case, the bytes of the rank that holds most."""
    from hpcrl.testing.ranks import run_ranks

    given = [{"model": str(models[name]), "train": train, "num_tokens": NUM_TOKENS} | more for name, train in cases]
    ranks = run_ranks(num_ranks, "tests.support.live_bytes:measure_megatron_passes", given, timeout_s=600)
    return [max(each) for each in zip(*ranks, strict=True)]


def estimate(model: Path, **setup: Any) -> float:
    """Return what the passes hold beside the state, by the estimate."""
    shape = read_architecture(json.loads((model / "config.json").read_bytes()))
    memory = estimate_megatron_memory(shape, MegatronSetup(is_bf16=True, **setup), num_tokens=NUM_TOKENS)
    return memory.total - memory.state


@pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
def test_the_passes_of_one_rank_hold_what_is_estimated(models: dict[str, Path]) -> None:
    skip_without_megatron()
    measured = measure(1, models, [(name, {"recompute": recompute}) for name, recompute in ONE_RANK])
    for (name, recompute), num_bytes in zip(ONE_RANK, measured, strict=True):
        estimated = estimate(models[name], has_recompute=recompute)
        assert estimated == pytest.approx(num_bytes, rel=0.05), (name, recompute)


@pytest.mark.timeout(900)
def test_the_passes_of_parallel_ranks_hold_what_is_estimated(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the buffers of their collectives: gathered inputs and output layers, swapped tokens, what stages receive."""
    skip_without_megatron()
    monkeypatch.setattr(megatron_memory, "EXPERT_IMBALANCE", 0.0)  # every expert has every token
    cases = [(name, {**parallel, "recompute": recompute}) for name, parallel, recompute in TWO_RANKS]
    for (name, parallel, recompute), num_bytes in zip(TWO_RANKS, measure(2, models, cases), strict=True):
        estimated = estimate(models[name], num_ranks=2, has_recompute=recompute, **parallel)
        assert estimated == pytest.approx(num_bytes, rel=0.05), (name, parallel, recompute)


@pytest.mark.timeout(900)
def test_stages_with_several_parts_of_the_model_hold_what_is_estimated(models: dict[str, Path]) -> None:
    """More micro-batches than are ever under way at once are given."""
    skip_without_megatron()
    both = (True, False)
    measured = measure(2, models, [("dense", CHUNKS | {"recompute": each}) for each in both], num_micro_batches=4)
    for recompute, num_bytes in zip(both, measured, strict=True):
        estimated = estimate(models["dense"], num_ranks=2, has_recompute=recompute, **CHUNKS)
        assert estimated == pytest.approx(num_bytes, rel=0.05), recompute
