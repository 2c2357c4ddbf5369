"""The GPUs of each engine, chosen by the plan where the recipe leaves them open."""

import msgspec
import pytest

from hpcrl.hardware.architecture import read_architecture
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS
from hpcrl.plan.engine_gpus import choose_engine_gpus, divides_heads
from tests.support.plans import make_recipe, make_site

VLLM, LONG = 'engine.backend="vllm"', "engine.max_model_len=32768"
ONE_POOL = "resources.prefill.num_workers=0"


def choose(model: str, *settings: str, gpu: str = "a100-40", num: int = 4) -> tuple[object, str]:
    """Choose the GPUs of decode on a site whose nodes have GPUs of one kind; return them and the reason."""
    site = make_site("perlmutter")
    partition = msgspec.structs.replace(site.partitions["gpu"], gpu=gpu, gpus_per_node=num)
    site = msgspec.structs.replace(site, partitions={"gpu": partition, "cpu": site.partitions["cpu"]})
    recipe = make_recipe(VLLM, ONE_POOL, *settings)
    described = msgspec.structs.replace(recipe.model, tiny=None, path=model, config=MODEL_CONFIGS[model])
    recipe, reasons = choose_engine_gpus(msgspec.structs.replace(recipe, model=described), site)
    return recipe.resources.decode.gpus_per_worker, reasons.get("decode", "")


@pytest.mark.parametrize(
    ("model", "gpu", "num", "settings", "expected"),
    [
        ("Qwen/Qwen3-8B", "a100-40", 4, (LONG,), 1),
        ("Qwen/Qwen3-8B", "a100-40", 4, ("engine.max_model_len=262144",), 2),  # 36 GiB of KV
        ("Qwen/Qwen3-32B", "a100-40", 4, (LONG,), 4),  # 61 GiB of weights, and a quarter of the memory for KV
        ("Qwen/Qwen3-32B", "h100", 4, (LONG,), 2),
        ("Qwen/Qwen3-32B", "h100", 6, (LONG,), 2),
        ("Qwen/Qwen3-30B-A3B", "a100-40", 4, (LONG,), 2),
        ("meta-llama/Llama-3.1-70B", "h100", 4, (LONG,), 4),
        ("meta-llama/Llama-3.1-70B", "a100-40", 4, (LONG,), 8),  # two nodes
        ("meta-llama/Llama-3.1-70B", "a100-40", 4, (LONG, 'engine.backend="embedded"'), 1),
        ("Qwen/Qwen3-8B", "a100-40", 4, (LONG, "engine.pipeline_parallel=2"), 2),
        ("Qwen/Qwen3-32B", "h100", 8, (LONG, "engine.data_parallel=2"), 4),  # each copy two
        ("Qwen/Qwen3-32B", "a100-40", 4, (LONG, "engine.quantization=fp8"), 2),
        ("Qwen/Qwen3-32B", "h100", 4, (LONG, "engine.quantization=fp8"), 1),
        ("Qwen/Qwen3-8B", "a100-40", 4, (LONG, "resources.decode.gpus_per_worker=4"), 4),
        ("Qwen/Qwen3-8B", "a100-40", 4, (LONG, "resources.decode.affinity=cpu"), 0),
    ],
)
def test_an_engine_has_the_fewest_gpus_that_hold_its_model_and_a_conversation(
    model: str, gpu: str, num: int, settings: tuple[str, ...], expected: int
) -> None:
    assert choose(model, *settings, gpu=gpu, num=num)[0] == expected


@pytest.mark.parametrize(
    ("settings", "gpu", "expected"),
    [
        (("engine.expert_parallel=true",), "h200", 2),  # one would have all experts
        (("engine.data_parallel=2",), "a100-40", 2),  # the copies divide 54 GiB of experts, and have 3 GiB besides
        (("engine.data_parallel=2", "engine.expert_parallel=true"), "a100-40", 2),
    ],
)
def test_copies_that_divide_experts_need_less_than_whole_ones(
    settings: tuple[str, ...], gpu: str, expected: int
) -> None:
    assert choose("Qwen/Qwen3-30B-A3B", LONG, *settings, gpu=gpu)[0] == expected


def test_the_plan_gives_the_reason_of_more_than_the_least() -> None:
    assert choose("Qwen/Qwen3-32B", LONG, gpu="h100")[1] == (
        "a decode worker has 2 GPUs, the fewest that hold 32.8 billion weights and the KV of 32768 tokens and divide "
        "its heads: those of gpu (h100) have 80 GiB"
    )
    assert not choose("Qwen/Qwen3-8B", LONG)[1]


def test_a_model_is_not_divided_among_gpus_that_its_heads_do_not_allow() -> None:
    odd = read_architecture(MODEL_CONFIGS["Qwen/Qwen3-32B"] | {"num_attention_heads": 40, "num_key_value_heads": 10})
    assert [num for num in range(1, 9) if divides_heads(odd, num)] == [1, 2, 5]
