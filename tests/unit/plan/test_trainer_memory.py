"""What the plan finds of the memory of the trainer, and what it refuses, for Qwen3-8B on nodes of four A100."""

import itertools
import re

import pytest

from hpcrl.errors import PlanError
from hpcrl.plan.demand import average_episode, compute_node_needs, count_episodes
from hpcrl.plan.plan import Plan
from hpcrl.plan.trainer_memory import TrainerMemory, advise_on_shortage
from tests.support.plans import make_recipe, plan_recipe

QWEN3_8B = (
    *("model.config.model_type=qwen3", "model.config.hidden_size=4096", "model.config.intermediate_size=12288"),
    *("model.config.num_hidden_layers=36", "model.config.num_attention_heads=32", "model.config.head_dim=128"),
    *("model.config.num_key_value_heads=8", "model.config.vocab_size=151936"),
    "model.config.max_position_embeddings=40960",
)
QWEN3_30B = (
    *("model.config.model_type=qwen3_moe", "model.config.hidden_size=2048", "model.config.intermediate_size=6144"),
    *("model.config.num_hidden_layers=48", "model.config.num_attention_heads=32", "model.config.head_dim=128"),
    *("model.config.num_key_value_heads=4", "model.config.vocab_size=151936", "model.config.num_experts=128"),
    *("model.config.num_experts_per_tok=8", "model.config.moe_intermediate_size=768"),
)
WIDE_EXPERTS = (
    *("model.config.model_type=mixtral", "model.config.hidden_size=7168", "model.config.intermediate_size=2048"),
    *("model.config.num_hidden_layers=6", "model.config.num_attention_heads=64", "model.config.vocab_size=129280"),
    *("model.config.num_key_value_heads=8", "model.config.num_local_experts=256", "train.groups_per_step=128"),
    *("model.config.num_experts_per_tok=8", "engine.max_model_len=16384", "train.precision=bf16"),
    *("resources.prefill.gpus_per_worker=4", "resources.decode.gpus_per_worker=4"),
    *("engine.backend=vllm", "model.path=some/model"),
)
BF16_SHARDS = ("train.sharding=full", "train.precision=bf16")
SIXTEEN = "resources.train.num_workers=16"
ENGINES = (
    *("resources.prefill.gpus_per_worker=4", "resources.prefill.mem_gib_per_worker=16"),
    *("resources.decode.gpus_per_worker=4", "resources.decode.mem_gib_per_worker=16"),
    *("resources.train.num_workers=128", "train.groups_per_step=64", "model.tiny.num_heads=4"),
)
LONG = "model.config.max_position_embeddings=262144"
DEFAULT_TOKENS = "train.tokens_per_micro_batch=16384"


VLLM = ("engine.backend=vllm", "model.tiny.num_heads=4")


def plan_on_a100(*settings: str) -> Plan:
    return plan_recipe(*VLLM, *QWEN3_8B, *settings, site="perlmutter")


def find_memory(*settings: str) -> TrainerMemory:
    memory = plan_on_a100(*settings).train_memory
    assert memory is not None
    return memory


def refuse(*settings: str) -> str:
    """Return why a recipe is refused whose ranks have whole rows."""
    with pytest.raises(PlanError) as caught:
        plan_on_a100("train.context_parallel=1", *settings)
    return str(caught.value)


def test_qwen3_8b_on_four_nodes_has_room_for_trajectories_of_32k_tokens() -> None:
    memory = find_memory(*BF16_SHARDS, SIXTEEN, DEFAULT_TOKENS, "engine.max_model_len=32768")
    assert (memory.gpu, memory.usable_gib, memory.num_tokens, memory.recompute) == ("a100-80", 72, 32768, True)
    assert memory.gpu_gib == pytest.approx(28.1, abs=0.3), "as `python -m bench.memory` measures it"
    assert memory.weights_gib == memory.gradients_gib == pytest.approx(4 * 8.19e9 / 16 / 2**30, abs=0.01)
    parts = (memory.weights_gib, memory.gradients_gib, memory.optimizer_gib, memory.gathers_gib)
    assert sum(parts) + memory.activations_gib + memory.logits_gib == pytest.approx(memory.gpu_gib, abs=0.05)
    assert memory.node_snapshot_gib == pytest.approx(12 * 8.19e9 / 4 / 2**30, abs=0.01)
    assert memory.node_gib + memory.node_free_gib == pytest.approx(235)


def test_a_mixture_of_experts_of_30b_on_sixteen_nodes_has_room_for_16k_tokens() -> None:
    engines = ("resources.prefill.gpus_per_worker=4", "resources.decode.gpus_per_worker=4")
    steps = ("train.groups_per_step=16", "engine.max_model_len=16384", "resources.train.num_workers=64")
    settings = (*BF16_SHARDS, DEFAULT_TOKENS, *engines, *steps)
    memory = plan_recipe(*VLLM, *QWEN3_30B, *settings, site="perlmutter").train_memory
    assert memory is not None
    assert memory.gpu_gib == pytest.approx(19.2, abs=0.3), "as `python -m bench.memory` measures it"


def test_experts_to_replay_are_in_the_host_memory_of_every_rank_that_reads_their_rows() -> None:
    """The ranks of a context-parallel group read the same rows."""
    engines = ("resources.prefill.num_workers=0", "resources.decode.gpus_per_worker=4")
    steps = ("train.groups_per_step=64", "engine.max_model_len=16384", "resources.train.num_workers=64")
    model = ("engine.backend=vllm", "model.path=some/model", *QWEN3_30B, "rollout.max_new_tokens=8192")
    settings = (*model, *BF16_SHARDS, *engines, *steps)
    found = []
    for more in ((), ("train.router_replay=true",), ("train.router_replay=true", "train.context_parallel=4")):
        plan = plan_recipe(*settings, *more, site="perlmutter")
        assert plan.train_memory is not None
        found.append((plan.train_memory, plan.role("train").step_mem_gib))
    recipe = make_recipe(*settings)
    num_tokens = average_episode(recipe)[1] * count_episodes(recipe)
    assert num_tokens > 64 * 8192
    on_node = 48 * 8 * num_tokens * 4 / 64 / 2**30
    assert [memory.node_experts_gib for memory, _ in found] == pytest.approx([0, on_node, 4 * on_node], abs=0.01)
    for (plain, _), (memory, _) in itertools.pairwise(found):
        more_gib = memory.node_experts_gib - plain.node_experts_gib
        assert memory.node_gib == pytest.approx(plain.node_gib + more_gib, abs=0.02)
        assert memory.node_free_gib == pytest.approx(plain.node_free_gib - more_gib, abs=0.02)
    assert found[2][1] > found[0][1], "Slurm's limit for the step too"
    assert f"experts to replay {4 * on_node:.1f}; " in " ".join(found[2][0].describe())


def test_what_the_recipe_leaves_open_is_chosen_so_that_it_fits() -> None:
    plan, chosen = plan_on_a100(SIXTEEN), 'train.sharding = "full": the whole model does not fit on each rank'
    assert plan.train_sharding == "full"
    assert chosen in plan.sizes
    assert plan.train_memory == find_memory(*BF16_SHARDS, SIXTEEN)
    assert chosen not in plan_on_a100(*BF16_SHARDS, SIXTEEN).sizes, "it was asked for"


@pytest.mark.parametrize("settings", [("model.config.num_hidden_layers=2",), ("train.lora_rank=8", "train.kl=k3")])
def test_a_model_that_fits_on_each_rank_is_not_sharded(settings: tuple[str, ...]) -> None:
    assert plan_on_a100(SIXTEEN, *settings).train_sharding == "none"


def test_adapters_are_sharded_where_the_frozen_model_does_not_fit_and_need_no_model_for_the_kl() -> None:
    adapters = ("train.lora_rank=8", "train.kl=k3", SIXTEEN, "train.precision=fp32")
    engines = ("resources.prefill.gpus_per_worker=4", "resources.decode.gpus_per_worker=4")
    memory = find_memory(*adapters, *engines, "model.config.num_hidden_layers=100")
    assert memory.weights_gib == pytest.approx(4 * 20.5e9 / 16 / 2**30, rel=0.05)
    assert find_memory(*adapters, "train.sharding=full", "train.precision=bf16").weights_gib < 1
    assert memory.others_gib == 0
    assert find_memory(*adapters, "train.pipeline.reference.data_parallel=4").others_gib > 0


WHOLE_REFERENCE = ("train.kl=k3", "train.kl_coef=0.1", "train.pipeline.reference.data_parallel=1")


def test_a_rank_with_a_whole_reference_gets_all_tokens_of_a_micro_batch() -> None:
    """Four tensors of the hidden size and three of the inner one; the policy's ranks divide the tokens."""
    divided = (*BF16_SHARDS, SIXTEEN, "train.context_parallel=8", LONG, "engine.max_model_len=200000")
    memory = find_memory(*divided, "train.tokens_per_micro_batch=200000", "train.rows=packed", *WHOLE_REFERENCE)
    expected = 200000 * 2 * (4 * 4096 + 3 * 12288 + 2 * 128)
    assert memory.others_gib == pytest.approx(2 * 8.19e9 / 2**30, abs=0.05)
    assert (memory.activations_gib, memory.gathers_gib) == (pytest.approx(expected / 2**30, abs=0.01), 0)
    message = refuse_sharded(*divided, "train.tokens_per_micro_batch=600000", *WHOLE_REFERENCE)
    assert "activations and logits of 600000 tokens" in message
    assert "or remove train.pipeline.reference.data_parallel" in message


def refuse_sharded(*settings: str) -> str:
    with pytest.raises(PlanError) as caught:
        plan_on_a100(*settings)
    return str(caught.value)


def test_the_refusal_of_a_model_that_does_not_fit_even_sharded_asks_for_more_ranks() -> None:
    message = refuse("resources.train.num_workers=2")
    assert "train.sharding" not in message
    assert "set resources.train.num_workers = 4" in message
    assert plan_on_a100("resources.train.num_workers=4").train_sharding == "full"


@pytest.mark.parametrize(
    ("settings", "num_tokens"),
    [
        ((), 65536),
        (("engine.max_model_len=70000", LONG), 70000),
        (("resources.train.num_workers=3", "engine.max_model_len=4096"), 53248),
        (("train.rows=packed", "engine.max_model_len=20000"), 65536),
        (("train.tokens_per_micro_batch=8192",), 8192),
        (("train.tokens_per_micro_batch=8192", "engine.max_model_len=20000"), 8192),
    ],
)
def test_a_micro_batch_has_the_tokens_that_fit_or_those_of_the_recipe(
    settings: tuple[str, ...], num_tokens: int
) -> None:
    plan = plan_on_a100(*BF16_SHARDS, SIXTEEN, *settings)
    assert plan.tokens_per_micro_batch == num_tokens
    assert plan.train_memory is not None
    assert plan.train_memory.free_gib >= 0
    asked = any("tokens_per_micro_batch" in setting for setting in settings)
    assert any(line.startswith(f"train.tokens_per_micro_batch = {num_tokens}:") for line in plan.sizes) is not asked


def test_trajectories_of_128k_tokens_fit_where_ranks_divide_their_positions() -> None:
    settings = (*BF16_SHARDS, SIXTEEN, LONG, "engine.max_model_len=131072")
    assert "set train.context_parallel = 2" in refuse(*settings)
    plan = plan_on_a100(*settings)
    assert plan.train_degrees.context == 2
    assert "train.context_parallel = 2: the longest trajectory does not fit on fewer ranks" in plan.sizes
    tokens = "train.tokens_per_micro_batch"
    for num_tokens, what in ((200000, "a micro-batch"), (65536, "the longest trajectory")):
        (line,) = (line for line in plan_on_a100(*settings, f"{tokens}={num_tokens}").sizes if "context" in line)
        assert line.endswith(f": {what} does not fit on fewer ranks")
    shorter = plan_on_a100(*BF16_SHARDS, SIXTEEN, LONG, "engine.max_model_len=70000")
    assert shorter.train_degrees.context == 1
    with pytest.raises(PlanError, match="a train worker needs"):  # 15 ranks make up groups of 2, 4 or 8 in no way
        plan_on_a100(*BF16_SHARDS, "resources.train.num_workers=15", LONG, "engine.max_model_len=131072")
    whole = find_memory(*BF16_SHARDS, SIXTEEN, "engine.max_model_len=32768", "train.tokens_per_micro_batch=32768")
    divided = find_memory(*settings, "train.context_parallel=4", "train.tokens_per_micro_batch=131072")
    assert (divided.num_tokens, divided.activations_gib) == (131072, pytest.approx(whole.activations_gib, rel=0.02))
    assert divided.weights_gib == whole.weights_gib
    assert divided.most_tokens == pytest.approx(4 * whole.most_tokens, rel=0.05)
    assert divided.row_limit == divided.most_tokens
    assert divided.free_gib > 0
    warned = " ".join(plan_on_a100(*BF16_SHARDS, SIXTEEN, LONG).warnings)
    assert ", or set train.context_parallel = 4" in warned


def test_layers_are_not_computed_again_for_a_larger_micro_batch() -> None:
    plan = plan_on_a100(SIXTEEN, "model.config.num_hidden_layers=2")
    assert plan.train_memory is not None
    assert not plan.train_memory.recompute
    assert plan_recipe(site="local").tokens_per_micro_batch == 16384, "no GPU limits it"


def test_the_description_names_every_part_and_what_is_left() -> None:
    text = "\n".join(find_memory(*BF16_SHARDS, SIXTEEN, DEFAULT_TOKENS).describe())
    for part in ("weights 1.9", "optimizer 3.8", "activations 8.7", "52.6 GiB are left", "checkpoint 23", "window 15"):
        assert part in text
    assert "other models" not in text


def test_tokens_that_fit_with_recomputation_alone_are_described_so() -> None:
    plan = plan_on_a100(SIXTEEN, "model.config.num_hidden_layers=2")
    memory = plan.train_memory
    assert memory is not None
    assert memory.row_limit is not None
    assert not memory.recompute
    assert memory.row_limit < memory.most_tokens
    would_fit = f"{memory.most_tokens} tokens would fit"
    assert memory.describe()[1].endswith(f"and {would_fit} with recomputation")
    assert any(line.endswith(f": {memory.most_tokens} would fit with recomputation") for line in plan.sizes)
    kept = find_memory(SIXTEEN, "model.config.num_hidden_layers=2", "train.recompute=false")
    assert kept.describe()[1].endswith(f"and {kept.most_tokens} tokens would fit")


def test_layers_are_recomputed_only_where_it_is_needed_or_asked_for() -> None:
    settings = (*BF16_SHARDS, SIXTEEN, "train.tokens_per_micro_batch=2048")
    assert not find_memory(*settings).recompute
    assert find_memory(*settings, "train.recompute=true").recompute
    assert find_memory(*BF16_SHARDS, SIXTEEN).recompute


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ((SIXTEEN, "train.sharding=none"), "train.sharding"),
        (("resources.train.num_workers=1",), "resources.train.num_workers"),
        ((*BF16_SHARDS, SIXTEEN, "train.recompute=false"), "train.recompute"),
        ((*BF16_SHARDS, SIXTEEN, "train.tokens_per_micro_batch=200000"), "train.tokens_per_micro_batch"),
        ((*BF16_SHARDS, SIXTEEN, LONG, "engine.max_model_len=200000"), "engine.max_model_len"),
        ((SIXTEEN, "train.precision=fp32", "train.tokens_per_micro_batch=65536"), "train.precision"),
        (("train.lora_rank=8", "train.recompute=false"), "train.recompute"),
        (
            (
                *("resources.train.num_workers=2", "model.config.num_hidden_layers=24", "train.precision=bf16"),
                "train.tokens_per_micro_batch=65536",
            ),
            "train.offload",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_a_change_after_which_it_fits(settings: tuple[str, ...], change: str) -> None:
    message = refuse(*settings)
    changes = [advice for advice in message.partition("): ")[2].split(", or ") if advice.startswith("set ")]
    assert any(change in advice for advice in changes)
    for advice in changes:
        changed = [setting.replace(" ", "") for setting in advice.removeprefix("set ").split(" and ")]
        assert find_memory(*settings, *changed).free_gib >= 0


def test_gpus_smaller_than_one_layer_are_refused_whatever_the_number_of_ranks() -> None:
    layer = ("model.config.hidden_size=32768", "model.config.intermediate_size=131072", "model.config.vocab_size=32000")
    message = refuse(*layer, "model.config.num_hidden_layers=1", "train.compile=true", *ENGINES)
    assert "for layers that are gathered or copied" in message
    assert message.endswith(": choose a site whose GPUs have more memory, or a smaller model")


def test_a_refusal_names_what_the_memory_would_be_for() -> None:
    message = refuse(SIXTEEN, "train.sharding=none")
    assert "153 for weights, gradients and optimizer of 8.2 billion weights" in message
    assert re.search(r"\d+ for activations and logits of 16384 tokens", message)
    assert "has 72 GiB on a GPU of type a100-80" in message


def test_a_number_of_weights_alone_decides_on_the_state_only() -> None:
    known = ("model.num_params=8_190_735_360", *BF16_SHARDS, SIXTEEN, "train.tokens_per_micro_batch=10000000")
    memory = plan_recipe(*known, site="perlmutter").train_memory
    assert memory is not None
    assert memory.free_gib < 0
    with pytest.raises(PlanError, match="122 for weights, gradients and optimizer"):
        plan_recipe(known[0], site="perlmutter")


def test_trajectories_longer_than_a_gpu_has_room_for_are_warned_of() -> None:
    settings = (*BF16_SHARDS, "resources.train.num_workers=2", "train.tokens_per_micro_batch=8192")
    memory = find_memory(*settings)
    assert memory.most_tokens < 40960
    (warning,) = (line for line in plan_on_a100(*settings).warnings if "a trajectory may have 40960 tokens" in line)
    limit = int(re.findall(r"engine\.max_model_len = (\d+)", warning)[0])
    assert not any(
        "a trajectory may" in line for line in plan_on_a100(*settings, f"engine.max_model_len={limit}").warnings
    )


def test_the_longest_row_that_fits_is_that_of_layers_as_they_are_computed() -> None:
    settings = (*BF16_SHARDS, SIXTEEN, "train.tokens_per_micro_batch=2048")
    kept, again = find_memory(*settings), find_memory(*settings, "train.recompute=true")
    assert kept.row_limit is not None
    assert 2048 <= kept.row_limit < kept.most_tokens == again.row_limit
    (warning,) = (line for line in plan_on_a100(*settings).warnings if "a trajectory may have 40960 tokens" in line)
    assert "set train.recompute = true" in warning
    assert not [line for line in plan_on_a100(*settings, "train.recompute=true").warnings if "a trajectory may" in line]


def test_a_limit_of_rows_makes_room_for_what_would_not_fit() -> None:
    settings = (*BF16_SHARDS, SIXTEEN, LONG, DEFAULT_TOKENS, "engine.max_model_len=200000")
    refuse(*settings)
    memory = find_memory(*settings, "train.max_row_tokens=32768")
    assert memory.num_tokens == 32768
    assert memory.free_gib > 0


def test_ranks_on_cpus_need_memory_for_tokens_and_a_snapshot_too() -> None:
    ranks = ("resources.train.gpus_per_worker=0", *ENGINES[:4], "train.sharding=full", SIXTEEN)
    message = refuse(*ranks, "resources.train.mem_gib_per_worker=8")
    for part in ("8 for weights, gradients and optimizer", r"\d+ for activations and logits of 16384 tokens"):
        assert re.search(part, message)
    assert "6 for the snapshot of a checkpoint, 1 for its process) and has 8 GiB (cpu)" in message
    found = re.search(r"raise resources\.train\.mem_gib_per_worker to (\d+)", message)
    assert found is not None
    ranks = (*ranks, "train.context_parallel=1")
    assert plan_on_a100(*ranks, f"resources.train.mem_gib_per_worker={found[1]}").role("train").gpus_per_worker == 0
    assert "a train worker needs" in refuse(*ranks, f"resources.train.mem_gib_per_worker={int(found[1]) - 1}")
    fewer = refuse(*ranks, "resources.train.mem_gib_per_worker=8", "train.tokens_per_micro_batch=4096")
    assert "of 16384 tokens" not in fewer


def test_a_tiny_model_on_cpus_needs_no_more_than_the_default() -> None:
    assert plan_recipe(site="local").role("train").mem_gib_per_worker == 4.0


@pytest.mark.parametrize(
    ("settings", "num_rows", "changes"),
    [
        ((), 4, ["train.tokens_per_micro_batch = 450 at the most", "train.recompute = true", "mem_gib_per_worker"]),
        (("train.recompute=true",), 1, ["engine.max_model_len = 450 at the most", "resources.train.num_workers"]),
        (("train.sharding=none",), 1, ['train.sharding = "full" and more ranks (resources.train.num_workers)']),
        (('train.trainer="megatron"',), 4, ["train.tensor_parallel"]),
    ],
)
def test_the_advice_after_a_shortage_has_settings_that_need_less(
    settings: tuple[str, ...], num_rows: int, changes: list[str]
) -> None:
    advice = advise_on_shortage(make_recipe(*settings), has_gpus=False, num_rows=num_rows, num_tokens=900)
    assert all(change in advice for change in changes)
    assert "precision" not in advice
    single = make_recipe(*settings, "train.precision=fp32")
    assert 'train.precision = "bf16"' in advise_on_shortage(single, has_gpus=True)


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        (("train.kl=k3",), 2 / 16),
        (("train.advantage=gae",), 16 / 16),
        (("train.kl=k3", "train.advantage=gae"), 18 / 16),
    ],
    ids=["reference", "critic", "both"],
)
def test_a_reference_in_bf16_and_a_critic_are_sharded_too(settings: tuple[str, ...], others: float) -> None:
    memory = find_memory(*BF16_SHARDS, SIXTEEN, *settings)
    assert memory.others_gib == pytest.approx(others * 8.19e9 / 2**30, abs=0.01)


def test_a_node_reserves_what_its_ranks_and_their_snapshot_need() -> None:
    recipe = make_recipe(*QWEN3_8B, *BF16_SHARDS, SIXTEEN)
    _, mem_gib = compute_node_needs("train", recipe, workers_per_node=4)
    assert mem_gib == 4 * 3 + 23 + 16, "12 bytes of a quarter of the weights for the snapshot, and 8 for two versions"


def test_the_window_is_counted_in_the_dtype_of_the_engines() -> None:
    settings = (*BF16_SHARDS, SIXTEEN, 'engine.backend="vllm"')
    whole, rounded = (find_memory(*settings, f'engine.dtype="{dtype}"') for dtype in ("float32", "bfloat16"))
    assert rounded.node_window_gib == pytest.approx(whole.node_window_gib / 2, abs=0.01)
    assert rounded.node_snapshot_gib == whole.node_snapshot_gib
    decode = (
        compute_node_needs("decode", make_recipe(*QWEN3_8B, *settings, f'engine.dtype="{dtype}"'), workers_per_node=1)
        for dtype in ("float32", "bfloat16")
    )
    (_, more_gib), (_, less_gib) = decode
    assert more_gib - less_gib == pytest.approx(4 * 8.19e9 / 2**30, abs=1)


def test_engine_nodes_that_cannot_hold_two_versions_read_files() -> None:
    sixteen_bit = (*BF16_SHARDS, SIXTEEN, "engine.backend=vllm", "engine.dtype=bfloat16")
    fitting, large = (
        plan_on_a100(*sixteen_bit),
        plan_on_a100(*sixteen_bit, "model.config.num_hidden_layers=400", *ENGINES),
    )
    assert fitting.has_couriers
    assert not any("files" in line for line in fitting.sizes)
    assert not large.has_couriers
    assert any(
        re.match(r"weights are sent by files: two versions of them \(29\d GiB\) do not fit", line)
        for line in large.sizes
    )
    recipe = make_recipe(*QWEN3_8B, *sixteen_bit)
    for role, window in (("decode", 31), ("train", 0)):
        needs = [compute_node_needs(role, recipe, workers_per_node=4, has_couriers=has)[1] for has in (True, False)]
        assert needs[0] - needs[1] == window, "the trainer's node has the window of its part"


def test_a_node_that_cannot_hold_the_snapshot_is_refused() -> None:
    settings = (*BF16_SHARDS, *MEMORY_120)
    message = refuse(*settings, "resources.train.num_workers=4")
    assert "92 for the snapshot of a checkpoint" in message
    assert message.endswith(": set resources.train.num_workers = 8")
    assert find_memory(*settings, "resources.train.num_workers=8").node_free_gib > 0


MEMORY_120 = (
    "site.partitions.gpu.mem_gib_per_node=120",
    "site.partitions.gpu-hbm80g.mem_gib_per_node=120",
)


def test_without_gpus_or_sizes_nothing_is_known() -> None:
    assert plan_recipe(site="perlmutter").train_memory is None
    assert plan_recipe(site="local").train_memory is None


LLAMA_70B = (
    *("model.config.model_type=llama", "model.config.hidden_size=8192", "model.config.intermediate_size=28672"),
    *("model.config.num_hidden_layers=80", "model.config.num_attention_heads=64", "model.config.vocab_size=128256"),
    *("model.config.num_key_value_heads=8", "model.config.max_position_embeddings=131072"),
    *("train.trainer=megatron", "train.groups_per_step=128", "train.precision=bf16", "engine.max_model_len=16384"),
    *("resources.prefill.gpus_per_worker=4", "resources.decode.gpus_per_worker=4"),
)


def test_megatron_ranks_of_a_model_of_70b_are_planned_with_what_each_holds() -> None:
    parallel = ("train.tensor_parallel=4", "train.pipeline_parallel=8", "resources.train.num_workers=128")
    plan = plan_recipe(*VLLM, *LLAMA_70B, *parallel, site="perlmutter")
    memory = plan.train_memory
    assert memory is not None
    assert memory.recompute, "eight micro-batches of 16k tokens with all activations would not fit"
    assert 0 < memory.free_gib < memory.usable_gib
    assert memory.weights_gib == pytest.approx(4 * 70.55e9 / 32 / 2**30, rel=0.1)
    assert memory.optimizer_gib == pytest.approx(memory.weights_gib / 2, rel=0.01), "two moments, in four copies"
    assert memory.num_tokens == 16384


def test_a_refusal_of_megatron_names_a_parallelism_that_fits() -> None:
    (advice,) = re.findall(r": set (.*?)(?:, or |$)", refuse("train.trainer=megatron"))
    settings = [setting.replace(" ", "") for setting in advice.split(" and ")]
    assert settings == ["train.pipeline_parallel=2", "resources.train.num_workers=2"]
    assert find_memory("train.trainer=megatron", *settings).free_gib > 0


ONE_LAYER = (
    *("model.config.model_type=llama", "model.config.hidden_size=32768", "model.config.intermediate_size=98304"),
    *("model.config.num_hidden_layers=1", "model.config.num_attention_heads=256", "model.config.vocab_size=128256"),
    *("model.config.num_key_value_heads=8", "model.config.max_position_embeddings=131072", "train.precision=bf16"),
    *("train.trainer=megatron", "train.groups_per_step=128", "engine.max_model_len=4096"),
    *("resources.prefill.gpus_per_worker=4", "resources.decode.gpus_per_worker=4"),
)


def test_ranks_that_share_a_layer_are_advised_within_a_node() -> None:
    with pytest.raises(PlanError) as caught:
        plan_recipe(*VLLM, *ONE_LAYER, site="perlmutter")
    (advice,) = re.findall(r": set (.*?)(?:, or |$)", str(caught.value))
    settings = dict(setting.split(" = ") for setting in advice.split(" and "))
    assert settings["train.tensor_parallel"] == "4", "the GPUs of a node"
    assert int(settings["resources.train.num_workers"]) >= 8, "more than one node has"
    changes = [f"{name}={value}" for name, value in settings.items()]
    memory = plan_recipe(*VLLM, *ONE_LAYER, *changes, site="perlmutter").train_memory
    assert memory is not None
    assert memory.free_gib >= 0


def test_more_ranks_are_advised_with_the_groups_that_the_plan_would_make_of_them() -> None:
    settings = (*LLAMA_70B, *VLLM, "train.trainer=torch", "engine.max_model_len=65536")
    with pytest.raises(PlanError, match=r": set resources.train.num_workers = 32$"):
        plan_recipe(*settings, SIXTEEN, site="perlmutter")
    plan = plan_recipe(*settings, "resources.train.num_workers=32", site="perlmutter")
    assert plan.train_degrees.context == 4


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (("train.sharding=full", "resources.train.num_workers=64"), '"megatron" and train.sharding = "auto"'),
        (
            ("train.sharding=none", "train.context_parallel=2", "resources.train.num_workers=2"),
            '"megatron" and resources.train.num_workers = 24',
        ),
    ],
)
def test_trainer_megatron_is_advised_for_a_model_that_shards_cannot_hold(
    settings: tuple[str, ...], advice: str
) -> None:
    wide = (*WIDE_EXPERTS, *settings)
    with pytest.raises(PlanError) as caught:
        plan_recipe(*wide, site="perlmutter")
    assert str(caught.value).endswith(f": set train.trainer = {advice}")
    changes = [change.replace(" ", "") for change in f"train.trainer = {advice}".split(" and ")]
    plan = plan_recipe(*wide, *changes, site="perlmutter")
    assert plan.train_memory is not None
    assert plan.train_memory.free_gib >= 0
    with pytest.raises(PlanError, match=r"choose a site whose GPUs have more memory, or a smaller model$"):
        plan_recipe(*wide, "train.compile=true", site="perlmutter")
    with pytest.raises(PlanError, match=r"choose a site whose GPUs have more memory, or a smaller model$"):
        plan_recipe(*wide, "model.config.model_type=qwen2_moe", site="perlmutter")


def test_experts_are_divided_by_their_own_parallelism() -> None:
    steps = ("train.groups_per_step=16", "engine.max_model_len=16384", "resources.train.num_workers=64")
    engines = ("resources.prefill.gpus_per_worker=4", "resources.decode.gpus_per_worker=4", "train.precision=bf16")
    parallel = ("train.trainer=megatron", "train.tensor_parallel=4", "train.expert_parallel=16")
    memory = plan_recipe(*VLLM, *QWEN3_30B, *engines, *steps, *parallel, site="perlmutter").train_memory
    assert memory is not None
    experts = 48 * 128 * 3 * 2048 * 768
    assert memory.weights_gib == pytest.approx(4 * ((30.5e9 - experts) / 4 + experts / 16) / 2**30, rel=0.03)


def test_auto_is_fp32_on_gpus_without_bfloat16_and_no_advice_is_to_set_bf16_there() -> None:
    site = [f"site.partitions.{label}.gpu=v100-32" for label in ("gpu", "gpu-hbm80g")]
    settings = ("model.config.num_hidden_layers=8", SIXTEEN, DEFAULT_TOKENS, "train.sharding=full", *site)
    auto, single, rounded = (
        find_memory(*settings, *precision) for precision in ((), ("train.precision=fp32",), ("train.precision=bf16",))
    )
    assert auto == single != rounded
    for precision in ("auto", "fp32"):
        message = refuse(*site, "train.sharding=none", DEFAULT_TOKENS, f"train.precision={precision}")
        assert "resources.train.num_workers" in message
        assert "bf16" not in message


def test_a_plan_counts_the_masks_of_a_sliding_window() -> None:
    rows = (*BF16_SHARDS, SIXTEEN, DEFAULT_TOKENS, "engine.max_model_len=16384")
    window = ("model.config.sliding_window=4096", "model.config.use_sliding_window=true")
    plain, masked = find_memory(*rows), find_memory(*rows, *window)
    assert masked.gpu_gib - plain.gpu_gib == pytest.approx(3 * 16384**2 / 2**30, abs=0.02)
