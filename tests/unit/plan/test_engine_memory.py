"""The memory of the engines' GPUs and nodes in a plan."""

import pytest

from hpcrl.config.engine_speed import count_copy_bytes
from hpcrl.config.recipe import EngineConfig
from hpcrl.errors import PlanError
from hpcrl.hardware.architecture import read_architecture
from hpcrl.hardware.memory_model import GIB
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS
from hpcrl.plan.engine_memory import EngineMemory
from tests.support.plans import plan_recipe

QWEN3_32B = read_architecture(MODEL_CONFIGS["Qwen/Qwen3-32B"])


def find_memory(*settings: str, site: str = "jupiter") -> dict[str, EngineMemory]:
    plan = plan_recipe(*settings, site=site, recipe="qwen3-32b")
    return {memory.role: memory for memory in plan.engine_memory}


@pytest.mark.parametrize("settings", [(), ("engine.quantization=fp8",)])
def test_weights_and_kv_fill_what_is_usable_of_each_gpu(settings: tuple[str, ...]) -> None:
    memory = find_memory("resources.decode.gpus_per_worker=4", *settings)["decode"]
    if not settings:
        assert memory.weights_gib == pytest.approx(QWEN3_32B.num_params * 2 / 4 / GIB, abs=1e-3)
    kv_gib = memory.kv_tokens * 2 * QWEN3_32B.kv_values_per_token / 4 / GIB
    assert memory.weights_gib + kv_gib == pytest.approx(memory.usable_gib, rel=1e-3)
    assert memory.usable_gib == pytest.approx(0.9 * 96)
    gpu, node = memory.describe()
    num = memory.kv_tokens // 16384
    assert gpu.endswith(f"an engine has room for {memory.kv_tokens} tokens, {num} of the longest (16384)")
    assert node.startswith("each node of decode holds 126 GiB: its workers and the weight window; ")


def test_a_node_of_engines_holds_its_step_and_the_rest_is_left() -> None:
    plan = plan_recipe(site="jupiter", recipe="qwen3-32b")
    for memory in plan.engine_memory:
        assert memory.node_gib == plan.role(memory.role).step_mem_gib
        assert memory.node_gib is not None
        assert memory.node_free_gib is not None
        assert memory.node_gib + memory.node_free_gib == pytest.approx(439.9, abs=40)  # that of jupiter's nodes


def test_rounded_weights_take_half_but_for_embeddings_and_head() -> None:
    plain, rounded = find_memory()["decode"], find_memory("engine.quantization=fp8")["decode"]
    precise = 2 * QWEN3_32B.embedding_params
    assert rounded.weights_gib * 4 * GIB == pytest.approx(QWEN3_32B.num_params + precise, rel=1e-3)
    assert rounded.weights_gib < 0.53 * plain.weights_gib
    assert rounded.kv_tokens > plain.kv_tokens
    assert count_copy_bytes(EngineConfig(backend="vllm", quantization="fp8"), 10, None) == 10


def test_each_copy_of_the_model_has_its_weights() -> None:
    one, two = (
        find_memory()["decode"],
        find_memory("engine.data_parallel=2", "resources.decode.gpus_per_worker=4")["decode"],
    )
    assert two.weights_gib == pytest.approx(2 * one.weights_gib)


def find_expert_memory(*settings: str) -> EngineMemory:
    plan = plan_recipe(
        "resources.decode.gpus_per_worker=4", 'engine.backend="vllm"', *settings, site="jupiter", recipe="qwen3-30b-a3b"
    )
    (memory,) = [memory for memory in plan.engine_memory if memory.role == "decode"]
    return memory


@pytest.mark.parametrize("expert_parallel", ["false", "true"])
def test_copies_of_the_model_divide_its_experts_and_nothing_else(expert_parallel: str) -> None:
    """The 4 GPUs have a quarter of the experts each; those of a copy share its other weights."""
    shape = read_architecture(MODEL_CONFIGS["Qwen/Qwen3-30B-A3B"])
    num_other = shape.num_params - shape.num_expert_params
    for num_copies in (1, 2, 4):
        settings = (f"engine.expert_parallel={expert_parallel}", f"engine.data_parallel={num_copies}")
        memory = find_expert_memory(*settings)
        num_held = shape.num_expert_params / 4 + num_other * num_copies / 4
        assert memory.weights_gib == pytest.approx(2 * num_held / GIB, abs=1e-3)
        kv_copies = max(1, 4 // num_copies // shape.num_kv_heads)
        kv_gib = memory.kv_tokens * 2 * shape.kv_values_per_token * kv_copies / 4 / GIB
        assert memory.weights_gib + kv_gib == pytest.approx(memory.usable_gib, rel=1e-3)


def test_stages_divide_the_experts_of_copies_further() -> None:
    flat, staged = (
        find_expert_memory("engine.data_parallel=2", *more) for more in ((), ("engine.pipeline_parallel=2",))
    )
    assert staged.weights_gib == pytest.approx(flat.weights_gib, abs=1e-3)


def test_a_worker_has_memory_for_all_its_copies() -> None:
    """Four copies of 61 GiB and a quarter of the memory for KV are 325 GiB, which four GPUs of 80 do not have."""
    settings = ("resources.decode.gpus_per_worker=4", "resources.prefill.num_workers=0", 'engine.backend="vllm"')
    plan_recipe(*settings, site="perlmutter", recipe="qwen3-32b")
    with pytest.raises(PlanError, match=r"needs 325 GiB for 32\.8 billion weights in 4 copies and has 320 GiB"):
        plan_recipe(*settings, "engine.data_parallel=4", site="perlmutter", recipe="qwen3-32b")


def test_nodes_that_roles_share_are_shown_once_with_the_trainer() -> None:
    plan = plan_recipe("job.layout=colocated", site="jupiter", recipe="qwen3-8b-math")
    assert plan.layout == "colocated"
    assert [len(memory.describe()) for memory in plan.engine_memory] == [1]


@pytest.mark.parametrize(("name", "site"), [("quickstart", "lab"), ("quickstart", "local"), ("sft", "lab")])
def test_engines_without_gpus_or_sizes_have_no_figures(name: str, site: str) -> None:
    assert plan_recipe(site=site, recipe=name).engine_memory == []


QWEN3_8B = read_architecture(MODEL_CONFIGS["Qwen/Qwen3-8B"])


@pytest.mark.parametrize(
    "settings", [('engine.backend="vllm"', 'engine.dtype="float32"'), ('engine.backend="embedded"',)]
)
def test_engines_in_float32_hold_weights_and_kv_of_four_bytes(settings: tuple[str, ...]) -> None:
    plan = plan_recipe(*settings, "resources.decode.gpus_per_worker=1", site="jupiter", recipe="qwen3-8b-math")
    memory = next(memory for memory in plan.engine_memory if memory.role == "decode")
    assert memory.weights_gib == pytest.approx(4 * QWEN3_8B.num_params / GIB, abs=1e-3)
    kv_gib = 4 * memory.kv_tokens * QWEN3_8B.kv_values_per_token / GIB
    assert memory.weights_gib + kv_gib == pytest.approx(memory.usable_gib, rel=1e-3)


def test_an_embedded_engine_has_its_model_on_one_gpu_of_those_of_a_worker() -> None:
    settings = ('engine.backend="embedded"', "resources.prefill.num_workers=0", "resources.decode.gpus_per_worker=4")
    with pytest.raises(PlanError) as caught:
        plan_recipe(*settings, site="jupiter", recipe="qwen3-32b")
    assert str(caught.value) == (
        "a decode worker needs 163 GiB for 32.8 billion weights in float32 and has 96 GiB (booster): "
        'set engine.backend = "vllm", or choose GPUs with more memory: an embedded engine is on one GPU'
    )


def test_an_engine_without_room_for_one_conversation_is_refused() -> None:
    settings = (
        "resources.decode.gpus_per_worker=1",
        "engine.max_model_len=32768",
        "model.config.num_hidden_layers=34",
        "site.partitions.gpu-hbm80g.gpu=a100-40",
    )
    plan_recipe(*settings, site="perlmutter", recipe="qwen3-8b-math")
    with pytest.raises(PlanError) as caught:
        plan_recipe(*settings, 'engine.dtype="float32"', site="perlmutter", recipe="qwen3-8b-math")
    assert str(caught.value) == (
        "a conversation may have 32768 tokens, and a decode worker (gpu, a100-40) has room for the KV of 26695 beside "
        '29.1 GiB of weights on each GPU: set engine.max_model_len to 26695 or less, or engine.dtype = "auto", which '
        "is half as large, or raise resources.decode.gpus_per_worker"
    )
