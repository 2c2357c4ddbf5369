"""The division of a model over the ranks of trainer "megatron", where the recipe leaves it open."""

import pytest

from hpcrl.errors import PlanError
from hpcrl.hardware.degrees import ParallelDegrees
from hpcrl.plan.plan import Plan
from tests.support.plans import plan_recipe
from tests.unit.plan.test_trainer_memory import LLAMA_70B, QWEN3_30B

EXPERTS = (
    *QWEN3_30B,
    *("train.trainer=megatron", "train.precision=bf16", "train.groups_per_step=16", "engine.max_model_len=16384"),
    *("resources.prefill.gpus_per_worker=4", "resources.decode.gpus_per_worker=4"),
)

SOME_8B = (
    *("model.path=some/model", "model.num_params=8_000_000_000", "engine.backend=vllm", "engine.max_model_len=32768"),
    *("train.trainer=megatron", "train.groups_per_step=16", "site.partitions.gpu-hbm80g.gpu=a100-40"),
)


VLLM = ("engine.backend=vllm", "model.tiny.num_heads=4")


def plan_ranks(num_ranks: int, *settings: str) -> Plan:
    engines = () if settings[: len(SOME_8B)] == SOME_8B else VLLM
    return plan_recipe(*engines, *settings, f"resources.train.num_workers={num_ranks}", site="perlmutter")


def list_fixed(degrees: ParallelDegrees) -> list[str]:
    return [f"train.{name}={num}" for name, num in degrees.settings.items()]


def test_a_layer_is_divided_within_a_node_and_stages_do_the_rest() -> None:
    plan = plan_ranks(64, *LLAMA_70B)
    assert plan.train_degrees == ParallelDegrees(tensor=4, pipeline=4), "a node has four GPUs"
    assert (
        "train.tensor_parallel = 4 and train.pipeline_parallel = 4: the trainer does not fit on fewer ranks"
        in plan.sizes
    )
    assert plan.train_memory is not None
    assert plan.train_memory.free_gib > 0


@pytest.mark.parametrize("fewer", [ParallelDegrees(tensor=4, pipeline=2), ParallelDegrees(tensor=2, pipeline=4)])
def test_fewer_ranks_for_a_copy_of_the_model_would_not_fit(fewer: ParallelDegrees) -> None:
    with pytest.raises(PlanError, match="a train worker needs"):
        plan_ranks(64, *LLAMA_70B, *list_fixed(fewer))


def test_experts_are_divided_before_anything_else_is() -> None:
    plan = plan_ranks(64, *EXPERTS)
    assert plan.train_degrees == ParallelDegrees(expert=8)
    with pytest.raises(PlanError, match="a train worker needs"):
        plan_ranks(64, *EXPERTS, *list_fixed(ParallelDegrees(expert=4)))


def test_degrees_that_a_recipe_gives_stay_and_the_others_are_chosen() -> None:
    for memory_gb, tensor in ((40, 4), (80, 2)):
        site = f"site.partitions.gpu.gpu=a100-{memory_gb}"
        stages = plan_ranks(64, *LLAMA_70B, "train.pipeline_parallel=8", site)
        assert stages.train_degrees == ParallelDegrees(tensor=tensor, pipeline=8)
    assert plan_ranks(64, *EXPERTS, "train.tensor_parallel=2").train_degrees == ParallelDegrees(tensor=2, expert=4)


def test_stages_with_several_parts_of_the_model_are_two_or_more() -> None:
    plan = plan_ranks(64, *EXPERTS, "train.pipeline_chunks=4")
    assert plan.train_degrees.pipeline == 2
    with pytest.raises(PlanError, match=r"25 on each of 2 stages are more parts than the model's 48 layers"):
        plan_ranks(64, *EXPERTS, "train.pipeline_chunks=25", "train.pipeline_parallel=2")
    with pytest.raises(PlanError, match=r"train.pipeline_chunks = 25 needs stages"):
        plan_ranks(64, *EXPERTS, "train.pipeline_chunks=25")
    with pytest.raises(PlanError, match='is for trainer "megatron"'):
        plan_ranks(64, *EXPERTS, "train.pipeline_chunks=2", "train.trainer=torch")


@pytest.mark.parametrize("num_ranks", [8, 16])
def test_degrees_are_chosen_for_a_model_of_which_the_number_of_weights_is_known(num_ranks: int) -> None:
    plan = plan_ranks(num_ranks, *SOME_8B)
    assert plan.train_degrees == ParallelDegrees(tensor=4)
    assert plan.train_memory is not None
    assert plan.train_memory.free_gib > 0
    assert plan_ranks(16, *SOME_8B, "train.pipeline_chunks=2").train_degrees.pipeline == 2


def test_a_guess_of_what_tokens_need_refuses_no_degrees() -> None:
    assert plan_ranks(16, *SOME_8B, "engine.max_model_len=4_000_000").train_degrees == ParallelDegrees(tensor=2)


@pytest.mark.parametrize("context", [1, 16])
def test_degrees_that_are_too_few_for_a_number_of_weights_are_refused_with_more(context: int) -> None:
    fixed = list_fixed(ParallelDegrees(context=context))
    with pytest.raises(PlanError, match=r"set train.tensor_parallel = 2 and train.pipeline_parallel = 2"):
        plan_ranks(16, *SOME_8B, *fixed)


def test_a_small_batch_has_fewer_shares_and_more_ranks_for_each() -> None:
    plan = plan_ranks(64, *EXPERTS, "train.groups_per_step=2", "rollout.group_size=8")
    assert 64 // plan.train_degrees.num_together <= 16
    assert any("or a step has too few trajectories for more shares" in size for size in plan.sizes)
    with pytest.raises(PlanError, match="a step has 16 trajectories for 64 ranks"):
        plan_ranks(
            64,
            *EXPERTS,
            "train.groups_per_step=2",
            "rollout.group_size=8",
            *list_fixed(plan_ranks(64, *EXPERTS).train_degrees),
        )


def test_a_trainer_that_fits_nowhere_is_refused_with_degrees_that_would() -> None:
    with pytest.raises(PlanError) as caught:
        plan_ranks(4, *EXPERTS)
    assert "set train.pipeline_parallel = 2 and train.expert_parallel = 4" in str(caught.value)
    assert plan_ranks(16, *EXPERTS, "train.pipeline_parallel=2", "train.expert_parallel=4").train_memory is not None


def test_a_model_whose_whole_state_fits_on_a_rank_is_not_divided() -> None:
    small = [f"model.config.{name}={num}" for name, num in {"num_hidden_layers": 4, "hidden_size": 1024}.items()]
    plan = plan_ranks(8, *LLAMA_70B, *small, "model.config.num_attention_heads=8")
    assert plan.train_degrees == ParallelDegrees()
    assert not any("_parallel" in size for size in plan.sizes)


def test_a_layer_is_divided_within_a_node_of_the_partition_that_the_trainer_gets() -> None:
    """Delta has nodes of eight GPUs too, which are fewer than the trainer needs."""
    plan = plan_recipe(*VLLM, *LLAMA_70B, "resources.train.num_workers=64", site="delta")
    assert plan.train_degrees.tensor <= plan.role("train").workers_per_node


def test_experts_of_the_initial_model_are_divided_as_those_of_the_policy_are() -> None:
    """With a KL the model is there twice, once without gradients and moments."""
    plain, with_kl = (plan_ranks(64, *EXPERTS, f"train.kl={kl}", "train.expert_parallel=16") for kl in ("none", "k3"))
    assert plain.train_memory is not None
    assert with_kl.train_memory is not None
    assert with_kl.train_degrees == plain.train_degrees
    assert with_kl.train_memory.others_gib == pytest.approx(plain.train_memory.weights_gib, rel=0.01)


def test_the_partition_that_suits_the_trainer_best_is_tried_with_all_degrees_first() -> None:
    settings = ("train.trainer=megatron", "engine.max_model_len=32768")
    plan = plan_recipe(*settings, recipe="qwen3-8b-math", site="perlmutter")
    assert plan.components[plan.role("train").component].partition == "gpu"
    assert plan.train_degrees.tensor == 4
    assert not [line for line in plan.fallbacks if line.startswith("train")]
    fixed = [f"train.{name}_parallel=1" for name in ("pipeline", "context")]
    given = plan_recipe(*settings, "train.tensor_parallel=2", *fixed, recipe="qwen3-8b-math", site="perlmutter")
    assert given.components[given.role("train").component].partition == "gpu-hbm80g"
    assert [line for line in given.fallbacks if line.startswith("train wanted compute, got gpu-hbm80g")]
