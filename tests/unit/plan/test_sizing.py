"""The number of prefill and decode workers where the recipe leaves it open."""

import pytest

from hpcrl.errors import ConfigError, PlanError
from hpcrl.hardware.architecture import guess_architecture
from hpcrl.hardware.cost_model import make_model_shape
from hpcrl.plan.plan import Plan
from tests.support.plans import make_recipe, plan_recipe

SETTINGS = (
    "engine.backend=vllm",
    "rollout.mode=sync",
    "model.num_params=8000000000",
    "resources.train.num_workers=4",
    "train.sharding=full",
    "rollout.max_running=4096",
    "engine.max_model_len=32768",
    "domains.lake.max_turns=40",
    "domains.lake.usual_prompt_tokens=500",
    "domains.lake.usual_reply_tokens=60",
)


def planned(*settings: str, site: tuple[str, ...] = ()) -> Plan:
    return plan_recipe(*SETTINGS, *settings, *(f"site.{setting}" for setting in site), site="perlmutter")


def workers(plan: Plan) -> tuple[int, int]:
    return plan.role("prefill").num_workers, plan.role("decode").num_workers


def test_the_nodes_of_a_partition_limit_the_workers() -> None:
    num_prefill, num_decode = workers(planned())
    few = planned(site=("partitions.gpu-hbm80g.max_nodes=4", "partitions.gpu.max_nodes=4"))
    assert workers(few)[0] < num_prefill
    assert workers(few)[1] < num_decode
    assert any(f"of the {num_decode} that it could use, because more do not fit" in line for line in few.sizes)


def test_the_ratio_of_prefill_to_decode_is_kept_where_not_all_fit() -> None:
    num_prefill, num_decode = workers(planned())
    fewer = planned(site=("partitions.gpu-hbm80g.max_nodes=12", "partitions.gpu.max_nodes=12"))
    assert workers(fewer)[0] == -(-num_prefill * workers(fewer)[1] // num_decode)


def test_all_available_nodes_are_used() -> None:
    few = planned(site=("partitions.gpu-hbm80g.max_nodes=4", "partitions.gpu.max_nodes=4"))
    assert few.components[few.role("decode").component].nodes == 4


def test_the_workers_of_one_allocation_are_limited_by_its_nodes() -> None:
    together = planned('job.layout="hetstep"', site=("partitions.gpu.max_nodes=8", "partitions.gpu-hbm80g.max_nodes=8"))
    assert 7 <= sum(component.nodes for component in together.components) <= 8
    assert any("because more do not fit" in line for line in together.sizes)


ASYNC = ("rollout.mode=async", "resources.prefill.num_workers=0", "domains.lake.usual_reply_tokens=600")


def count_decode(*settings: str) -> int:
    return planned(*ASYNC, *settings).role("decode").num_workers


def test_training_decides_the_number_of_engines_with_the_reason() -> None:
    made = planned(*ASYNC)
    assert 1 < made.role("decode").num_workers < count_decode("rollout.mode=sync")
    assert any("tokens/s, and training consumes about" in line for line in made.sizes)


def test_engines_leave_the_trainer_the_gpus_that_they_were_sized_for() -> None:
    made = plan_recipe(recipe="qwen3-32b", site="delta")
    assert made.components[made.role("train").component].gpu == "h200"
    assert made.components[made.role("decode").component].gpu == "h200"
    assert made.role("decode").num_workers == 6, "with a 7th the trainer would have A40s"
    assert any("6 workers of the 7 that it could use, because more do not fit" in line for line in made.sizes)


def test_engines_may_move_the_trainer_to_gpus_of_the_same_speed() -> None:
    made = planned("resources.decode.num_workers=4", "domains.lake.usual_prompt_tokens=4000")
    assert made.components[made.role("prefill").component].nodes == 2
    assert made.components[made.role("train").component].partition == "gpu-hbm80g", "the one of which less is used"
    assert not any("because more do not fit" in line for line in made.sizes)


def test_more_ranks_consume_more_and_get_more_engines() -> None:
    assert count_decode("resources.train.num_workers=8") > count_decode()


def test_a_larger_lag_needs_no_more_engines() -> None:
    numbers = [count_decode(f"rollout.max_lag={lag}") for lag in (0, 1, 4, 16)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1]


def test_there_are_never_more_engines_than_hold_all_episodes() -> None:
    many = ("resources.train.num_workers=64", "rollout.max_running=256")
    assert count_decode(*many) == count_decode(*many, "rollout.mode=sync")


def test_extra_episodes_of_a_group_are_generated_too() -> None:
    assert count_decode("rollout.redundancy=8") > count_decode()


def test_a_conversation_whose_kv_fits_no_worker_is_refused() -> None:
    with pytest.raises(PlanError, match=r"raise resources\.decode\.gpus_per_worker"):
        planned("domains.lake.usual_prompt_tokens=1000000", "engine.max_model_len=20000000")


def test_estimated_conversations_are_limited_to_the_model_length() -> None:
    assert workers(planned("domains.lake.usual_prompt_tokens=1000000"))[1] < 4096


@pytest.mark.parametrize("num_params", [8, 70_000, 10**14])
def test_an_unrealistic_number_of_weights_is_refused(num_params: int) -> None:
    with pytest.raises(ConfigError, match=r"model\.num_params"):
        make_recipe(f"model.num_params={num_params}")


@pytest.mark.parametrize(
    ("num_params", "num_layers", "num_kv_heads"),
    [(8.0e9, 32, 8), (14.8e9, 40, 8), (32.8e9, 64, 8), (70.6e9, 80, 8), (405e9, 126, 8)],
    ids=["Llama-8B", "Qwen3-14B", "Qwen3-32B", "Llama-70B", "Llama-405B"],
)
def test_large_models_have_the_usual_shape_within_a_third(
    num_params: float, num_layers: int, num_kv_heads: int
) -> None:
    shape = make_model_shape(guess_architecture(int(num_params)))
    kv = shape.num_layers * shape.num_kv_heads * shape.head_dim
    assert shape.num_layers == pytest.approx(num_layers, rel=1 / 3)
    assert kv == pytest.approx(num_layers * num_kv_heads * 128, rel=1 / 3)


QWEN3_8B_CONFIG = (
    *("model.config.model_type=qwen3", "model.config.hidden_size=4096", "model.config.intermediate_size=12288"),
    *("model.config.num_hidden_layers=36", "model.config.num_attention_heads=32", "model.config.head_dim=128"),
    *("model.config.num_key_value_heads=8", "model.config.vocab_size=151936"),
)


def test_the_fields_of_a_config_json_take_the_place_of_a_number_of_weights() -> None:
    assert make_recipe(*QWEN3_8B_CONFIG).model.num_weights == 8_190_735_360
    assert make_recipe(*QWEN3_8B_CONFIG, "model.num_params=1000000").model.num_weights == 8_190_735_360


def test_the_smallest_models_have_no_more_kv_heads_than_heads() -> None:
    shape = make_model_shape(guess_architecture(10**6))
    assert 1 <= shape.num_kv_heads <= shape.num_heads


def find_loop_warnings(*settings: str) -> list[str]:
    return [line for line in planned(*settings).warnings if "event loop" in line]


def test_env_workers_that_do_not_bear_the_calls_are_named_with_the_number_that_does() -> None:
    fast = ("resources.decode.num_workers=8", "domains.lake.usual_reply_tokens=10")
    (warning,) = find_loop_warnings(*fast, "resources.env.num_workers=1")
    enough = int(warning.partition("resources.env.num_workers = ")[2].split()[0])
    assert enough > 1
    assert not find_loop_warnings(*fast, f"resources.env.num_workers={enough}")
    assert find_loop_warnings(*fast, f"resources.env.num_workers={enough - 1}")


def test_engines_that_are_slower_than_one_event_loop_are_not_warned_of() -> None:
    assert not find_loop_warnings("resources.decode.num_workers=1", "domains.lake.usual_reply_tokens=2000")


QWEN3_8B = (
    "engine.backend=vllm",
    *("model.num_params=8_200_000_000", "model.tiny.num_heads=4", "model.tiny.num_kv_heads=4"),
    "train.kl=k1",
    "train.kl_in=reward",
    "train.kl_coef=1.0",
)
TEACHER_32B = (*QWEN3_8B, "teacher.path=/models/Qwen3-32B", "teacher.num_params=32_800_000_000")
SIXTEEN = "resources.train.num_workers=16"
FOUR_RANKS = ("resources.train.num_workers=4", "train.trainer=megatron")


def plan_on_gpus(*settings: str) -> Plan:
    """Plan for GPUs of 80 GB."""
    return plan_recipe(*settings, site="perlmutter")


def test_a_teacher_that_every_rank_has_whole_is_refused_where_it_does_not_fit() -> None:
    with pytest.raises(PlanError) as caught:
        plan_on_gpus(*TEACHER_32B, "resources.train.num_workers=4", "train.sharding=none", "train.precision=fp32")
    assert (
        "gradients and optimizer of 8.2 billion weights, 122 for 32.8 billion weights of the model of teacher.path"
        in str(caught.value)
    )
    assert "train.tensor_parallel" in str(caught.value)
    assert "teacher.judge" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        (("teacher.path=/models/Qwen3-32B",), "teacher.path"),
        (('train.pipeline.reference={model="/models/Qwen3-32B"}',), "train.pipeline.reference.model"),
    ],
)
def test_a_model_of_unknown_size_that_the_trainer_holds_is_warned_of(settings: tuple[str, ...], setting: str) -> None:
    table = setting.rpartition(".")[0]
    unknown, known = (
        plan_on_gpus(*QWEN3_8B, SIXTEEN, *settings, *size) for size in ((), (f"{table}.num_params=1_000_000",))
    )
    problem = f"the size of {setting} is not known, and the memory of the trainer is counted without it: set {table}."
    assert [line for line in unknown.warnings if line not in known.warnings] == [
        f"{problem}num_params, or stage the model first (hpcrl stage)"
    ]


def test_a_judge_that_is_the_teacher_is_not_missing_in_the_memory_of_the_trainer() -> None:
    judge = ("judge.grader.path=/models/Qwen3-32B", "teacher.judge=grader", "judge.grader.engine.backend=vllm")
    plan = plan_on_gpus(*QWEN3_8B, SIXTEEN, *judge, "judge.grader.resources.gpus_per_worker=4")
    assert not [line for line in plan.warnings if "the size of" in line]


def test_ranks_that_share_a_teacher_have_room_for_it() -> None:
    assert plan_on_gpus(*TEACHER_32B, *FOUR_RANKS, "train.tensor_parallel=4").role("train").num_workers == 4
    with pytest.raises(PlanError, match="needs 114 GiB"):
        plan_on_gpus(*TEACHER_32B, *FOUR_RANKS, "train.tensor_parallel=2", "train.pipeline_parallel=1")


def test_expert_parallelism_divides_experts_and_tensor_parallelism_does_not() -> None:
    sizes = {"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "model_type": "qwen3_moe"}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    fields = [f"model.config.{name}={value}" for name, value in (sizes | heads | experts).items()]
    ranks = ("train.trainer=megatron", "resources.train.num_workers=8", "train.tensor_parallel=4")
    fixed = [f"train.{name}_parallel=1" for name in ("pipeline", "expert", "context")]
    with pytest.raises(PlanError, match=r"needs 127 GiB.* set train\.pipeline_parallel = 2"):
        plan_on_gpus(*fields, *ranks, *fixed)
    plan_on_gpus(*fields, *ranks, "train.expert_parallel=8")
    assert plan_on_gpus(*fields, *ranks).train_degrees.expert > 1, "it is chosen where it is left open"


def test_a_node_with_its_own_data_parallelism_has_its_model_whole_on_a_rank() -> None:
    node = {"model": "/models/Qwen3-32B", "num_params": 32_800_000_000, "data_parallel": 2}
    settings = [f"train.pipeline.reference.{key}={value}" for key, value in node.items()]
    with pytest.raises(PlanError, match=r"needs 96 GiB .* of the model of train\.pipeline\.reference\.model"):
        plan_on_gpus(*QWEN3_8B, *FOUR_RANKS, *settings, "train.tensor_parallel=4")
