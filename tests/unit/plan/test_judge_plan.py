"""Judges in a plan: a separate component, where their model fits, and what is refused."""

import msgspec
import pytest

from hpcrl.config.pipeline import add_judges, make_pipeline
from hpcrl.errors import ConfigError, PlanError
from hpcrl.plan.demand import compute_node_needs
from tests.support.plans import make_recipe, plan_recipe

JUDGE = ("judge.grader.path=/models/judge", 'domains.lake.judges=["grader"]')


def plan(*settings, site="lab"):
    return plan_recipe(*JUDGE, *settings, site=site)


def refused(*settings):
    with pytest.raises((PlanError, ConfigError)) as caught:
        plan(*settings)
    return str(caught.value)


def test_a_judge_has_a_separate_component_behind_the_others():
    made = plan("judge.grader.resources.num_workers=2")
    role = made.role("judge-grader")
    component = made.components[role.component]
    assert (component.roles, role.num_workers, role.gpus_per_worker) == (["judge-grader"], 2, 1)
    assert [other.roles[0] for other in made.components] == ["env", "prefill", "decode", "train", "judge-grader"]
    assert made.judge_roles == ["judge-grader"]


def test_a_judge_without_gpus_goes_to_cpu_nodes():
    made = plan('judge.grader.resources.affinity="cpu"', "judge.grader.resources.gpus_per_worker=0")
    assert made.components[made.role("judge-grader").component].gpus_per_node == 0


@pytest.mark.parametrize(
    ("site", "settings", "layout"),
    [("local", (), "local"), ("perlmutter", ("job.layout=hetstep", "job.walltime_min=20"), "hetstep")],
)
def test_a_judge_is_part_of_every_layout(site, settings, layout):
    made = plan(*settings, site=site)
    assert made.layout == layout
    assert "judge-grader" in made.components[made.role("judge-grader").component].roles


def test_the_window_of_weights_is_not_reserved_on_nodes_of_judges():
    recipe = make_recipe(*JUDGE, "model.num_params=1000000000")
    needs = {
        role: compute_node_needs(role, recipe, workers_per_node=1)[1] - recipe.role_resources(role).mem_gib_per_worker
        for role in ("decode", "judge-grader")
    }
    assert needs["decode"] > needs["judge-grader"] == 0


def test_a_judge_that_no_domain_uses_is_a_warning():
    assert "judge.spare is in no domain's `judges`: its engines would idle" in plan("judge.spare.path=/m").warnings
    assert not any("judge.grader" in warning for warning in plan().warnings)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('domains.lake.judges=["grade"]', "domains.lake.judges names 'grade': did you mean 'grader'?"),
        ("judge.grader.resources.gpus_per_worker=64", "cannot hold judge.grader.resources"),
        ("judge.grader.num_params=700000000000", 'set judge.grader.engine.backend = "vllm"'),
        ("judge.grader.engine.pipeline_parallel=2", "judge.grader.engine.pipeline_parallel = 2 with"),
        ('judge.grader.engine.sim.gpu="h100"', "judge.grader.engine.sim is set"),
        ('judge.grader.resources.affinity="cpu"', "judge.grader.resources asks for 1 GPUs"),
        ("judge.grader.tiny.hidden_size=64", "[judge.grader] needs either `path`"),
        ("judge.other.engine.max_batch=1", "[judge.other] needs either `path`"),
        ("judge.my-judge.path=/m", "lower-case letters, digits and '_'"),
        ("judge.Grader.path=/m", "lower-case letters, digits and '_'"),
    ],
)
def test_a_judge_that_cannot_be_served_is_refused(setting, message):
    assert message in refused(setting)


def test_the_built_in_reward_names_a_judge_of_its_domain():
    settings = ('domains.lake.reward="hpcrl.envs.judge:judge"', 'domains.lake.reward_options.judge="other"')
    assert "domains.lake.reward_options.judge = 'other': add it to domains.lake.judges" in refused(*settings)


@pytest.mark.parametrize("judges", ['["grader"]', "[]"])
def test_the_built_in_reward_without_a_judge_or_an_address_is_refused(judges):
    settings = ('domains.lake.reward="hpcrl.envs.judge:judge"', f"domains.lake.judges={judges}")
    assert "set domains.lake.reward_options.judge to one of domains.lake.judges" in refused(*settings)
    assert plan(*settings, 'domains.lake.reward_options.url="http://judge:1/v1"')


def test_a_program_that_calls_a_judge_names_one_of_its_domain():
    options = ('domains.lake.env="hpcrl.envs.agent:AgentProgram"', 'domains.lake.options={calls_judges = ["other"]}')
    assert "domains.lake.options.calls_judges = 'other': add it to domains.lake.judges" in refused(*options)


def test_a_plan_with_judges_survives_json():
    made = plan()
    assert msgspec.json.decode(made.to_json(), type=type(made)) == made


TEACHER = ("teacher.judge=grader", "train.kl=k1", "train.kl_in=reward")


def test_a_judge_that_is_the_teacher_is_planned_and_does_not_idle():
    made = plan_recipe("judge.grader.path=/models/judge", *TEACHER)
    assert made.judge_roles == ["judge-grader"]
    assert not any("judge.grader" in warning for warning in made.warnings)
    assert "judge-grader" in add_judges(make_pipeline(make_recipe(*TEACHER).train), make_recipe(*JUDGE, *TEACHER))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("teacher.judge=grade", "teacher.judge = 'grade': did you mean 'grader'?"),
        ("teacher.path=/models/teacher", "[teacher] needs either `path`"),
        ("judge.grader.engine.backend=sim", 'whose engine.backend = "sim" has no probabilities'),
        ("rollout.temperature=0.7", "rollout.temperature = 0.7 with teacher.judge"),
        ("train.pipeline.reference.data_parallel=1", "train.pipeline.reference.data_parallel = 1: the engines of"),
        ("train.pipeline.reference.model=/m", "teacher.judge and train.pipeline.reference.model both set"),
    ],
)
def test_a_teaching_judge_that_cannot_work_is_refused_with_the_reason(setting, message):
    assert message in refused(*TEACHER, setting)
