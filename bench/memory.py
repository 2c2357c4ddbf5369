"""The memory model of the torch trainer against its steps, with and without data: `python -m bench.memory`.

    weights, gradients, optimizer    what a rank holds all the time
    tokens                           what the tokens of the micro-batch need at the peak, by one of half the size
    gathers                          the rest: layers of sharded weights, their gradients on the way, a chunk of logits
    whole                            the peak of a step

Each model is made at its published sizes with three and with five layers more than there are different first ones, by
the trainer's own code. Its micro-batch goes forward and backward after a first optimizer step, and the peaks are
extrapolated to all layers: every further layer adds the same (hpcrl/testing/fake_steps.py). Smaller models make real
steps on CPUs, whose resident memory is measured (bench/memory_steps.py). A value is model / measured, so 1 is exact; an
error is the larger of it and its inverse.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from bench import figures
from bench.figures import Figure
from bench.memory_steps import StepCase, measure_ranks
from hpcrl.hardware.architecture import read_architecture
from hpcrl.hardware.memory_model import GIB
from hpcrl.hardware.train_memory import RankSetup, estimate_rank_memory
from hpcrl.testing.fake_steps import PeakBytes, measure_passes

BAR = 1.1
FEW_LAYERS, MORE_LAYERS = 3, 5
"""Layers that are like most others: from three on, the last, the first, and one between them are different layers."""
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        **{"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    },
    "Qwen3-0.6B": {
        **{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        "tie_word_embeddings": True,
    },
    "Llama-3.1-70B": {
        **{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
    },
    "Qwen3-30B-A3B": {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1},
        "mlp_only_layers": [],
    },
    "Mixtral-8x7B": {
        **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    },
    "GLM-4.5-Air": {
        **{"model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46},
        **{"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552},
        **{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1},
        **{"first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": False},
    },
    "DeepSeek-V3": {
        **{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61},
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280},
        **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        **{"n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
    },
}


@dataclass(frozen=True)
class MemoryCase:
    """A model in training, and the tokens of its micro-batch."""

    model: str
    num_tokens: int
    setup: RankSetup

    @property
    def title(self) -> str:
        setup = self.setup
        kind = "sharded" if setup.is_sharded else "whole"
        again = ("" if setup.has_recompute else ", all kept") + ", packed" * setup.is_packed
        again += f", {setup.context_parallel} divide each row" * (setup.context_parallel > 1)
        precision = "bf16" if setup.is_bf16 else "fp32"
        return f"{self.model}, {setup.num_ranks} x {self.num_tokens} tokens, {kind}, {precision}{again}"


def _shards(num_ranks: int, *, has_recompute: bool = True, is_bf16: bool = True) -> RankSetup:
    return RankSetup(num_ranks=num_ranks, is_sharded=True, is_bf16=is_bf16, has_recompute=has_recompute)


def _divide_rows(setup: RankSetup, *, size: int) -> RankSetup:
    return msgspec.structs.replace(setup, context_parallel=size)


CASES = (
    MemoryCase("Qwen3-8B", 32768, _shards(16)),
    MemoryCase("Llama-3.1-70B", 32768, _shards(128)),
    MemoryCase("Qwen3-30B-A3B", 16384, _shards(64)),
    MemoryCase("Qwen3-8B", 4096, _shards(16, has_recompute=False)),
    MemoryCase("Qwen3-0.6B", 16384, RankSetup(is_bf16=True, has_recompute=True)),
    MemoryCase("Qwen3-8B", 131072, _divide_rows(_shards(16), size=4)),
    MemoryCase("DeepSeek-V3", 8192, _shards(1024)),
)
MORE_CASES = (
    MemoryCase("Qwen3-8B", 2048, _shards(16)),
    MemoryCase("Qwen3-8B", 8192, _shards(16, is_bf16=False)),
    MemoryCase("Qwen3-8B", 8192, _shards(16, is_bf16=False, has_recompute=False)),
    MemoryCase("Qwen3-8B", 16384, msgspec.structs.replace(_shards(16), is_packed=True)),
    MemoryCase("Llama-3.1-70B", 4096, _shards(128)),
    MemoryCase("Llama-3.1-70B", 8192, _shards(128, has_recompute=False)),
    MemoryCase("Qwen3-30B-A3B", 4096, _shards(64)),
    MemoryCase("Qwen3-30B-A3B", 4096, _shards(64, has_recompute=False)),
    MemoryCase("Qwen3-0.6B", 16384, _shards(4)),
    MemoryCase("Qwen3-0.6B", 4096, _shards(4, has_recompute=False)),
    MemoryCase("Qwen3-0.6B", 4096, RankSetup(is_bf16=True)),
    MemoryCase("Qwen3-0.6B", 4096, RankSetup()),
    MemoryCase("Qwen3-8B", 8192, RankSetup(is_bf16=True, has_recompute=True)),
    MemoryCase("Qwen3-8B", 8192, RankSetup(is_bf16=True)),
    MemoryCase("Qwen3-30B-A3B", 8192, RankSetup(is_bf16=True, has_recompute=True)),
    MemoryCase("Qwen3-30B-A3B", 8192, RankSetup(is_bf16=True)),
    MemoryCase("Qwen3-8B", 8192, _divide_rows(_shards(16, has_recompute=False), size=2)),
    MemoryCase("Qwen3-30B-A3B", 65536, _divide_rows(_shards(64), size=8)),
    MemoryCase("Mixtral-8x7B", 8192, _shards(32)),
    MemoryCase("Mixtral-8x7B", 8192, _shards(32, has_recompute=False)),
    MemoryCase("GLM-4.5-Air", 8192, _shards(64)),
    MemoryCase("GLM-4.5-Air", 8192, _shards(64, has_recompute=False)),
    MemoryCase("DeepSeek-V3", 65536, _shards(1024)),
    MemoryCase("DeepSeek-V3", 4096, _shards(1024, has_recompute=False)),
    MemoryCase("DeepSeek-V3", 32768, _divide_rows(_shards(1024), size=4)),
)
"""Those of --full."""


SCALED_DOWN = MODELS["Qwen3-8B"] | {
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "vocab_size": 32768},
    **{"num_attention_heads": 16, "head_dim": 64},
}
STEPS = {
    "all kept": StepCase(fields=SCALED_DOWN, setup=RankSetup(), num_tokens=1024),
    "recomputed": StepCase(fields=SCALED_DOWN, setup=RankSetup(has_recompute=True), num_tokens=2048),
    "2 ranks, sharded": StepCase(fields=SCALED_DOWN, setup=_shards(2, is_bf16=False), num_tokens=1024),
    "2 ranks, sharded, that divide each row": StepCase(
        fields=SCALED_DOWN, setup=_divide_rows(_shards(2, is_bf16=False), size=2), num_tokens=2048
    ),
}
"""Steps with data, of a model of 143 million weights."""


def measure(full: bool) -> list[Figure]:
    found = [figure for case in (*CASES, *(MORE_CASES if full else ())) for figure in compare(case)]
    return [*found, *(compare_step(name, case) for name, case in STEPS.items())]


def compare_step(name: str, case: StepCase) -> Figure:
    """Compare the model with the resident memory that a real step takes."""
    measured = measure_ranks(case).num_bytes
    ratio = (
        estimate_rank_memory(read_architecture(case.fields), case.setup, num_tokens=case.num_tokens).total / measured
    )
    name = f"real step on a CPU, {name}: error"
    return Figure(name=name, value=max(ratio, 1 / ratio), unit=f"of {measured / GIB:.1f} GiB", bar=BAR, better="lower")


def compare(case: MemoryCase) -> list[Figure]:
    """Compare the parts at the peak, and the whole, of the model with all its layers."""
    measured = split_parts(partial(measure_whole, case), num_tokens=case.num_tokens)
    expected = split_parts(partial(estimate_whole, case), num_tokens=case.num_tokens)
    listed = [
        Figure(name=f"{case.title}: {part}", value=expected[part] / size, unit=f"of {size / GIB:.1f} GiB")
        for part, size in measured.items()
    ]
    ratio = sum(expected.values()) / sum(measured.values())
    error = Figure(name=f"{case.title}: error", value=max(ratio, 1 / ratio), bar=BAR, better="lower")
    whole = Figure(name=f"{case.title}: whole", value=ratio, unit=f"of {sum(measured.values()) / GIB:.1f} GiB")
    return [*listed, whole, error]


def split_parts(find: Callable[[int], PeakBytes], *, num_tokens: int) -> dict[str, float]:
    """Split what comes and goes into what tokens need and the rest, by a micro-batch of half the size."""
    found, half = find(num_tokens), find(num_tokens // 2)
    tokens = (found.passing - half.passing) * num_tokens / (num_tokens - num_tokens // 2)
    state = {"weights": found.weights, "gradients": found.gradients, "optimizer": found.optimizer}
    return state | {"gathers": found.passing - tokens, "tokens": tokens}


def estimate_whole(case: MemoryCase, num_tokens: int) -> PeakBytes:
    memory = estimate_rank_memory(read_architecture(MODELS[case.model]), case.setup, num_tokens=num_tokens)
    return PeakBytes(memory.weights, memory.gradients, memory.optimizer, memory.total - memory.state)


def measure_whole(case: MemoryCase, num_tokens: int) -> PeakBytes:
    """Measure with few layers and with some more, extrapolate forward and backward pass, and return the larger."""
    fields = MODELS[case.model]
    num_first = fields.get("first_k_dense_replace", 1)
    few, more = (
        measure_passes(fields | {"num_hidden_layers": num_first + num}, case.setup, num_tokens=num_tokens)
        for num in (FEW_LAYERS, MORE_LAYERS)
    )
    missing = (fields["num_hidden_layers"] - num_first - FEW_LAYERS) / (MORE_LAYERS - FEW_LAYERS)
    passes = [
        PeakBytes(*(low + missing * (high - low) for low, high in zip(first, second, strict=True)))
        for first, second in zip(few, more, strict=True)
    ]
    return max(passes, key=lambda each: each.passing)


if __name__ == "__main__":
    sys.exit(figures.main("memory", measure))
