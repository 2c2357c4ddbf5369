"""The memory of a rank of the trainer, against numbers by hand, published totals, and the trainer's own passes."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec
import pytest

from hpcrl.hardware.architecture import ModelArchitecture, find_window, guess_architecture, read_architecture
from hpcrl.hardware.memory_model import GIB
from hpcrl.hardware.train_memory import (
    RankSetup,
    choose_shard_dim,
    count_adapter_params,
    estimate_node_memory,
    estimate_rank_memory,
    estimate_reading_pass,
    find_largest,
)

DENSE: dict[str, Any] = {
    **{"model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 600},
}
"""Small, so that 65,536 tokens have more than a chunk of logits, and one layer needs more than that."""
EXPERTS: dict[str, Any] = {
    **DENSE,
    **{"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384},
    **{"decoder_sparse_step": 1, "mlp_only_layers": []},
}
COMPRESSED: dict[str, Any] = {
    **{"model_type": "deepseek_v3", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 600, "q_lora_rank": 96, "kv_lora_rank": 64},
    **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "moe_intermediate_size": 128},
    **{"n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"n_group": 4, "topk_group": 2},
}
"""Compressed attention, with the relations between the sizes of DeepSeek-V3."""
QWEN3_8B = {
    **{"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}
LLAMA_70B = {
    **{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
}
SHARDED = RankSetup(num_ranks=16, is_sharded=True, is_bf16=True, has_recompute=True)


def make_plain(**sizes: int) -> ModelArchitecture:
    """Make a model of two layers, four heads of 2 numbers, 12 inner values and 10 words."""
    plain = ModelArchitecture(
        **{"family": "llama", "num_layers": 2, "hidden_size": 8, "vocabulary_size": 10, "is_tied": False},
        **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "value_dim": 2, "dense_inner": 12, "dense_layers": (0, 1)},
    )
    return msgspec.structs.replace(plain, **sizes)


def find_most_tokens(shape: ModelArchitecture, setup: RankSetup) -> int:
    return find_largest(lambda num: estimate_rank_memory(shape, setup, num_tokens=num).total, num_bytes=72 * GIB)


def test_the_state_of_a_small_model_is_counted_by_hand() -> None:
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12 + 2 * 8  # queries, keys and values, output, MLP, norms
    weights = 2 * layer + 2 * 10 * 8 + 8
    memory = estimate_rank_memory(make_plain(), RankSetup(num_ranks=2), num_tokens=1)
    assert (memory.weights, memory.gradients, memory.optimizer, memory.buckets) == (
        *(4 * weights, 4 * weights, 8 * weights, 4 * weights),
    )
    sharded = estimate_rank_memory(make_plain(), RankSetup(num_ranks=4, is_sharded=True), num_tokens=1)
    assert (sharded.state, sharded.buckets) == (4 * weights, 0)


def test_the_tokens_of_a_small_model_are_counted_by_hand() -> None:
    """In bf16: two inputs of layers; one layer's norms, attention and MLP; gradients of its output and inner values."""
    norms = 2 * (4 + 2 + 2) * 8
    attention = 2 * (8 + 2 * 4 + 8) + 4 * 4
    each = 2 * 2 * 8 + norms + attention + 4 * 2 * 12 + (2 * 8 + 2 * 2 * 12)
    few, many = (estimate_rank_memory(make_plain(), SHARDED, num_tokens=num) for num in (1 << 22, 1 << 23))
    assert (few.peak, many.peak) == ("layer", "layer")
    assert many.total - few.total == each * (1 << 22)


def test_half_of_all_layers_need_half_of_the_kept_activations() -> None:
    kept = RankSetup(num_ranks=16, is_sharded=True, is_bf16=True)
    shapes = [read_architecture(QWEN3_8B | {"num_hidden_layers": num}) for num in (18, 36)]
    half, whole = (estimate_rank_memory(shape, kept, num_tokens=8192).activations for shape in shapes)
    per_layer = (whole - half) / 18 / 8192
    assert per_layer == pytest.approx(210 * 1024, rel=0.01), "8 norms' worth of 8 KiB, attention, four inner values"


def test_a_published_total_is_met() -> None:
    """ZeRO (arXiv 1910.02054, figure 1): 7.5 billion weights need 120 GB on a rank, and 1.9 GB when 64 share all."""
    shape = guess_architecture(7_500_000_000)
    whole = estimate_rank_memory(shape, RankSetup(), num_tokens=0)
    shared = estimate_rank_memory(shape, RankSetup(num_ranks=64, is_sharded=True), num_tokens=0)
    assert whole.state / 1e9 == pytest.approx(120, rel=0.01)
    assert shared.state / 1e9 == pytest.approx(1.9, rel=0.02)


def test_the_tokens_that_fit_are_the_most() -> None:
    shape = read_architecture(QWEN3_8B)
    most = find_most_tokens(shape, SHARDED)
    assert estimate_rank_memory(shape, SHARDED, num_tokens=most).total <= 72 * GIB
    assert estimate_rank_memory(shape, SHARDED, num_tokens=most + 1).total > 72 * GIB
    assert most > 32768
    assert find_most_tokens(shape, RankSetup()) == 0


def test_recomputation_makes_room_for_more_tokens() -> None:
    shape = read_architecture(LLAMA_70B)
    setup = RankSetup(num_ranks=128, is_sharded=True, is_bf16=True)
    kept, again = (find_most_tokens(shape, msgspec.structs.replace(setup, has_recompute=has)) for has in (False, True))
    assert again > 10 * kept > 0


def test_packed_rows_have_a_mask_of_all_pairs_of_tokens_only_where_they_cannot_be_looked_at_alone() -> None:
    shape, tokens = read_architecture(QWEN3_8B), 16384
    packed, with_mask = (msgspec.structs.replace(SHARDED, is_packed=True, has_mask=has) for has in (False, True))
    plain, masked = (estimate_rank_memory(shape, setup, num_tokens=tokens) for setup in (SHARDED, with_mask))
    assert estimate_rank_memory(shape, packed, num_tokens=tokens) == plain
    heads = 2 * 2 * (32 - 8) * 128 * tokens  # keys and values of all heads, which attention with a mask wants
    assert masked.activations - plain.activations == (1 + 2) * tokens**2 + heads


@pytest.mark.parametrize(
    ("weight", "num_ranks", "dim"),
    [
        ((8, 28672, 4096), 8, 0),
        ((8, 28672, 4096), 32, 1),  # each rank a part of every expert
        ((6, 100, 96), 32, 2),
        ((8, 100, 100), 32, 0),
        ((1000, 512), 3, 0),
        ((7,), 2, 0),
    ],
)
def test_stacks_of_experts_that_ranks_do_not_divide_are_cut_elsewhere(
    weight: tuple[int, ...], num_ranks: int, dim: int
) -> None:
    assert choose_shard_dim(weight, num_ranks) == dim


def test_a_rank_has_whole_experts_where_nothing_of_them_can_be_divided() -> None:
    shape = read_architecture(EXPERTS | {"num_experts": 8, "moe_intermediate_size": 50, "hidden_size": 100})
    few, many = (
        estimate_rank_memory(shape, msgspec.structs.replace(SHARDED, num_ranks=num), num_tokens=0) for num in (4, 64)
    )
    experts = shape.num_expert_params
    assert few.weights == pytest.approx(4 * shape.num_params / 4)
    assert many.weights == pytest.approx(4 * ((shape.num_params - experts) / 64 + experts / 8))


def test_ranks_that_divide_rows_have_a_part_of_their_tokens_and_no_mask() -> None:
    shape = read_architecture(QWEN3_8B)
    divided = msgspec.structs.replace(SHARDED, is_packed=True, context_parallel=4, has_recompute=True)
    whole = msgspec.structs.replace(SHARDED, has_recompute=True)
    mine, theirs = (
        estimate_rank_memory(shape, setup, num_tokens=num) for setup, num in ((divided, 4 * 8192 - 3), (whole, 8192))
    )
    assert mine.activations == pytest.approx(theirs.activations, rel=0.02)
    assert (mine.state, mine.gathers) == (theirs.state, theirs.gathers)


def test_frozen_weights_have_the_precision_of_the_passes_and_are_shared_by_the_ranks() -> None:
    shape = read_architecture(QWEN3_8B)
    adapters = count_adapter_params(shape, rank=8)
    assert adapters == 8 * 36 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * (4096 + 12288))
    whole = estimate_rank_memory(shape, RankSetup(lora_rank=8), num_tokens=1)
    assert whole.weights == 4 * (shape.num_params + adapters)
    setup = msgspec.structs.replace(SHARDED, lora_rank=8)
    shared = estimate_rank_memory(shape, setup, num_tokens=1)
    assert shared.state * 16 == 2 * shape.num_params + (4 + 4 + 8) * adapters
    assert estimate_node_memory(shape, setup, num_ranks=4, published_dtype=None).snapshot == 12 * adapters / 4


def test_a_node_holds_its_share_of_a_snapshot_and_of_two_versions() -> None:
    shape = read_architecture(QWEN3_8B)
    sharded = estimate_node_memory(shape, SHARDED, num_ranks=4, published_dtype="float32")
    assert sharded.snapshot == 12 * shape.num_params / 4
    assert sharded.window == 8 * shape.num_params / 4
    rounded = estimate_node_memory(shape, SHARDED, num_ranks=4, published_dtype="bfloat16")
    assert (rounded.window, rounded.snapshot) == (sharded.window / 2, sharded.snapshot)
    whole = estimate_node_memory(shape, RankSetup(num_ranks=16), num_ranks=4, published_dtype=None)
    assert (whole.snapshot, whole.window) == (12 * shape.num_params, 0)


def test_offloaded_state_moves_from_the_gpus_to_the_nodes() -> None:
    shape, setup = read_architecture(QWEN3_8B), msgspec.structs.replace(SHARDED, is_offloaded=True)
    before, after = (estimate_rank_memory(shape, each, num_tokens=4096) for each in (SHARDED, setup))
    assert (after.state, before.total - after.total) == (0, before.state)
    node, plain = (estimate_node_memory(shape, each, num_ranks=4, published_dtype=None) for each in (setup, SHARDED))
    assert node.total - plain.total == 4 * before.state


@pytest.fixture(scope="module")
def fresh_process() -> Iterator[ProcessPoolExecutor]:
    """Yield a fresh process: other tests of this one may have left a process group."""
    from hpcrl.testing.ranks import RANK_SERVER

    with ProcessPoolExecutor(1, mp_context=RANK_SERVER) as pool:
        yield pool


def test_the_gradients_of_a_layer_with_many_experts_decide_with_few_tokens(fresh_process: ProcessPoolExecutor) -> None:
    """All are there at the end of its backward pass, when its tokens need nothing any more."""
    from hpcrl.testing.fake_steps import measure_passes

    fields = COMPRESSED | {"n_routed_experts": 1024}
    setup = RankSetup(num_ranks=4, is_sharded=True, is_bf16=True, has_recompute=True)
    passes = fresh_process.submit(measure_passes, fields, setup, num_tokens=64).result()
    estimated = estimate_rank_memory(read_architecture(fields), setup, num_tokens=64)
    assert estimated.total == pytest.approx(max(sum(each) for each in passes), rel=0.01)


@pytest.mark.parametrize(
    ("fields", "setup"),
    [
        (DENSE, RankSetup(num_ranks=4, is_sharded=True, is_bf16=True, has_recompute=True)),
        (DENSE, RankSetup(num_ranks=4, is_sharded=True)),
        (DENSE | {"tie_word_embeddings": True}, RankSetup(is_bf16=True)),
        (EXPERTS, RankSetup(num_ranks=4, is_sharded=True, is_bf16=True, has_recompute=True)),
        (EXPERTS, RankSetup(is_bf16=True, has_recompute=True)),
        (DENSE, RankSetup(num_ranks=4, is_sharded=True, is_bf16=True, has_recompute=True, is_packed=True)),
        (DENSE, RankSetup(num_ranks=4, is_sharded=True, is_bf16=True, has_recompute=True, lora_rank=8)),
        (DENSE, RankSetup(num_ranks=4, is_sharded=True, is_bf16=True, context_parallel=4)),
        (COMPRESSED, RankSetup(num_ranks=4, is_sharded=True, is_bf16=True, has_recompute=True)),
        (COMPRESSED, RankSetup(num_ranks=4, is_sharded=True, is_bf16=True)),
        (COMPRESSED, RankSetup(num_ranks=4, is_sharded=True, is_bf16=True, context_parallel=4)),
        (COMPRESSED, RankSetup(is_bf16=True, has_recompute=True)),
    ],
    ids=[
        *("recomputed", "kept, fp32", "one rank", "experts", "experts, one rank", "packed", "adapters", "divided rows"),
        *("compressed", "compressed, kept", "compressed, divided rows", "compressed, one rank"),
    ],
)
def test_the_trainers_own_passes_peak_where_the_estimate_does(
    fields: dict[str, Any], setup: RankSetup, fresh_process: ProcessPoolExecutor
) -> None:
    from hpcrl.testing.fake_steps import measure_passes

    num_tokens = 65_536 * setup.context_parallel
    passes = fresh_process.submit(measure_passes, fields, setup, num_tokens=num_tokens).result()
    measured = max(sum(each) for each in passes)
    estimated = estimate_rank_memory(read_architecture(fields), setup, num_tokens=num_tokens)
    assert estimated.total == pytest.approx(measured, rel=0.05)
    assert estimated.weights == pytest.approx(passes[0].weights, rel=0.01)


def measure_reading_pass(fields: dict[str, Any], dtype: Any, num_tokens: int) -> int:
    """Measure what a packed micro-batch holds at the peak of a pass without a gradient, beside the weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hpcrl.testing.fake_steps import make_micro_batch
    from hpcrl.trainers.context_group import ContextGroup
    from hpcrl.trainers.token_model import TokenModel, compute_token_logprobs
    from tests.support.live_bytes import LiveBytes

    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=dtype)
    model = TokenModel(module.requires_grad_(False).eval(), context=ContextGroup(is_packed=True))
    micro = make_micro_batch(num_tokens, is_packed=True, has_mask=True)
    with LiveBytes() as live, torch.no_grad():
        compute_token_logprobs(model, micro, temperature=1.0)
    return live.peak


FEW_WORDS = {"vocab_size": 16}
"""So few that their logits need less than a layer."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "fields",
    [
        DENSE,
        DENSE | {"intermediate_size": 64},
        DENSE | {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 256},
        EXPERTS,
        EXPERTS | {"num_experts_per_tok": 8, "moe_intermediate_size": 64},
        COMPRESSED,
        COMPRESSED | {"moe_intermediate_size": 1024},
    ],
)
def test_a_pass_without_a_gradient_holds_what_is_estimated(fields: dict[str, Any], dtype: str) -> None:
    import torch

    sizes = fields | FEW_WORDS
    few, many = (measure_reading_pass(sizes, getattr(torch, dtype), num) for num in (512, 1024))
    setup = RankSetup(is_bf16=dtype == "bfloat16")
    found = [estimate_reading_pass(read_architecture(sizes), setup, num_tokens=num) for num in (1 << 22, 1 << 23)]
    assert (found[1].total - found[0].total) / (1 << 22) == pytest.approx((many - few) / 512, rel=0.03)


def measure_windowed_passes(fields: dict[str, Any], num_tokens: int) -> int:
    """Measure the peak of both passes over a padded row, whose layers are computed again."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hpcrl.testing.fake_steps import make_micro_batch
    from hpcrl.trainers.token_model import TokenModel, compute_token_logprobs
    from hpcrl.trainers.torch_model import recompute_layers
    from tests.support.live_bytes import LiveBytes

    model = TokenModel(AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32).eval())
    recompute_layers(model)
    micro = make_micro_batch(num_tokens, is_packed=False, has_mask=True)
    with LiveBytes() as live:
        compute_token_logprobs(model, micro, temperature=1.0)[0].sum().backward()
    return live.peak


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_rows_longer_than_a_sliding_window_have_masks(family: str) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    sizes = {"model_type": family, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 16, "sliding_window": 128}
    fields, lengths = sizes | heads, (512, 1024, 1536)
    measured = [measure_windowed_passes(fields, num) for num in lengths]
    setup = RankSetup(has_recompute=True, window=find_window(fields))
    found = [estimate_rank_memory(read_architecture(fields), setup, num_tokens=64 * num).activations for num in lengths]
    bends = [
        (last - 2 * middle + first) / step**2 for (first, middle, last), step in ((measured, 512), (found, 64 * 512))
    ]
    assert bends[1] == pytest.approx(bends[0], rel=0.02)


def test_rows_within_a_window_have_no_masks() -> None:
    shape, tokens = read_architecture(QWEN3_8B), 16384
    plain, within, beyond = (
        estimate_rank_memory(shape, msgspec.structs.replace(SHARDED, **more), num_tokens=tokens).activations
        for more in ({}, {"window": 4096, "longest_row": 4095}, {"window": 4096, "longest_row": 8192})
    )
    assert within == plain
    assert beyond - plain == (1 + 2) * tokens * 8192, "two rows with a mask of layers, and one of booleans, each"
    assert find_window(QWEN3_8B | {"sliding_window": 4096}) == 0
    assert find_window(QWEN3_8B | {"sliding_window": 4096, "use_sliding_window": True}) == 4096
