"""make_plan: roles to partitions, and every check before the queue."""

import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.site import Site, load_site
from hpcrl.errors import PlanError
from hpcrl.plan.plan import Plan, make_plan
from hpcrl.slurm.allocation import JobAllocation
from hpcrl.slurm.script import make_batch_script
from tests.support.plans import make_recipe, plan_recipe, refuse_plan


def test_each_role_goes_to_the_partition_of_its_affinity() -> None:
    where = {role.role: plan_recipe().components[role.component].partition for role in plan_recipe().roles}
    assert where == {"env": "env", "prefill": "prefill", "decode": "decode", "train": "train", "reward": "env"}


def test_bandwidth_goes_to_the_gpu_with_the_fastest_memory() -> None:
    assert plan_recipe().components[2].gpu == "h20"


def test_a_site_without_gpus_is_reported_as_a_fallback() -> None:
    assert any("decode wanted 1 GPU" in line for line in plan_recipe(site="local").fallbacks)


def test_a_site_with_one_gpu_type_reports_bandwidth_as_a_fallback() -> None:
    fallbacks = plan_recipe(site="leonardo").fallbacks
    assert any("decode wanted bandwidth, got a100-64" in line for line in fallbacks)


def test_the_same_input_gives_the_same_bytes() -> None:
    assert plan_recipe().to_json() == plan_recipe().to_json()


def test_a_plan_survives_json() -> None:
    assert msgspec.json.decode(plan_recipe().to_json(), type=Plan) == plan_recipe()


def test_a_walltime_above_the_limit_is_refused() -> None:
    message = refuse_plan("job.walltime_min=2000")
    assert "job.walltime_min = 2000" in message
    assert "allows 1440" in message


def test_a_drain_longer_than_the_job_is_refused() -> None:
    assert "job.drain_s = 600" in refuse_plan("job.drain_s=600", "job.walltime_min=10")


def test_more_gpus_than_a_node_has_are_refused() -> None:
    message = refuse_plan("resources.decode.gpus_per_worker=8")
    assert "resources.decode" in message
    assert "8 GPUs" in message


def test_gpus_for_a_cpu_role_are_refused() -> None:
    assert "affinity" in refuse_plan("resources.env.gpus_per_worker=1")


def test_a_role_keeps_its_other_defaults_when_one_is_changed() -> None:
    assert plan_recipe("resources.decode.num_workers=2").components[2].gpu == "h20"


def test_more_workers_than_nodes_can_hold_are_refused() -> None:
    assert "allows 2 nodes" in refuse_plan("resources.prefill.num_workers=100")


def test_more_memory_than_a_node_has_is_refused() -> None:
    assert "900 GiB" in refuse_plan("resources.env.mem_gib_per_worker=900")


def test_a_full_partition_falls_back_to_the_next_best_and_reports_it() -> None:
    made = plan_recipe("resources.decode.num_workers=8", "site.partitions.decode.max_nodes=1")
    assert made.components[1].partition == "prefill"
    assert any("decode wanted bandwidth, got prefill: decode allows 1 nodes" in line for line in made.fallbacks)


def test_too_few_episodes_at_once_for_one_group_are_refused() -> None:
    assert "set it to 16" in refuse_plan("rollout.max_running=15", "resources.env.num_workers=2")


def test_a_chain_of_jobs_needs_a_scheduler() -> None:
    assert plan_recipe("job.num_jobs=3").num_jobs == 3
    alone = plan_recipe("job.num_jobs=3", site="local")
    assert alone.num_jobs == 1
    assert any("without a scheduler, only `hpcrl resume` starts the next one" in line for line in alone.warnings)


def test_a_limit_of_isolated_environments_by_memory_is_a_warning() -> None:
    warnings = plan_recipe("domains.lake.isolation=process", "resources.env.mem_gib_per_worker=5").warnings
    assert any(
        "8 isolated environments or programs run at once, not rollout.max_running = 96" in line for line in warnings
    )
    roomy = plan_recipe("domains.lake.isolation=process", "rollout.max_running=8", "resources.env.mem_gib_per_worker=5")
    assert not any("isolated" in line for line in roomy.warnings)


def test_an_isolated_environment_that_fits_nowhere_is_refused() -> None:
    message = refuse_plan("domains.lake.isolation=sandbox", "domains.lake.env_memory_gib=4")
    assert "raise it to 5 or more" in message


def test_a_trainer_of_several_ranks_has_a_worker_for_each() -> None:
    assert plan_recipe("resources.train.num_workers=2").role("train").num_workers == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("train.tensor_parallel=2",), 'train.trainer = "megatron"'),
        (("train.trainer=megatron", "train.pipeline_parallel=2"), "resources.train.num_workers = 1 is not a multiple"),
        (("train.expert_parallel=2",), 'train.trainer = "megatron"'),
        (("train.trainer=megatron", "train.expert_parallel=2"), "and the model has no experts"),
        (("train.trainer=megatron", "train.context_parallel=2"), "not a multiple of train.context_parallel = 2"),
        (("train.trainer=megatron", "train.compile=true"), 'not supported by trainer "megatron": set it to false'),
        (("train.trainer=megatron", "train.advantage=gae"), "needs a critic"),
        (("resources.train.num_workers=500",), "raise train.groups_per_step"),
    ],
)
def test_a_trainer_with_conflicting_settings_is_refused(settings: tuple[str, ...], message: str) -> None:
    assert message in refuse_plan(*settings).replace("'", '"')


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("train.advantage=sft",), "its gradient is zero on average"),
        (("train.clip_high=0.28",), "the clipped ratio is exactly 1"),
        (("train.ratio=sequence",), "the clipped ratio is exactly 1"),
        (("train.dual_clip=3",), 'train.proximal = "behaviour"'),
        (("train.surrogate=cispo",), "set train.num_minibatches or train.epochs"),
        (("train.surrogate=cispo", "train.ratio=sequence", "train.epochs=2"), 'set ratio = "token"'),
        (("train.proximal=behaviour", "train.correction=mask-token"), "its ratio is exactly 1"),
        (("train.kl=k1",), 'set kl_in = "reward"'),
        (("train.kl=k3", "train.kl_in=reward"), 'set kl = "k1"'),
        (("train.kl_in=reward",), 'set kl = "k1"'),
        (("train.flat_groups=drop", "train.advantage=reinforce++"), "equal rewards still have a gradient"),
        (("train.flat_groups=drop", "train.kl=k1", "train.kl_in=reward"), 'set flat_groups = "keep"'),
        (("rollout.top_p=0.9", "train.proximal=behaviour"), "would not start at 1"),
        (("rollout.top_p=0.9", "train.correction=mask-sequence"), "vanishes"),
        (("train.response_budget.lakes=9",), 'Did you mean "lake"'),
    ],
)
def test_settings_of_the_algorithm_that_cannot_act_are_refused(settings: tuple[str, ...], message: str) -> None:
    assert message.lower() in refuse_plan(*settings).replace("'", '"').lower()


@pytest.mark.parametrize(
    "settings",
    [
        ("train.clip_high=0.28", "train.num_minibatches=4"),
        ("train.ratio=sequence", "train.proximal=behaviour"),
        ("train.dual_clip=3", "train.epochs=2"),
        ("train.kl=k1", "train.kl_in=reward"),
        ("rollout.top_p=0.9", "train.correction=geometric", "train.max_is_ratio=1.05"),
    ],
)
def test_settings_of_the_algorithm_that_act_are_planned(settings: tuple[str, ...]) -> None:
    assert plan_recipe(*settings)


def test_a_node_has_room_for_two_versions_of_the_weights_beside_its_workers() -> None:
    one_each = ("resources.prefill.num_workers=1", "resources.decode.num_workers=1")
    sized = plan_recipe("model.num_params=100000000", *one_each)
    for before, after in zip(plan_recipe().components, sized.components, strict=True):
        grown = after.mem_gib_per_node - before.mem_gib_per_node
        assert grown == (0 if "env" in before.roles else 1), before.roles


def test_a_model_too_large_for_its_gpu_is_refused() -> None:
    assert "70.0 billion" in refuse_plan("model.num_params=70000000000")


def test_a_missing_account_is_refused_where_one_is_charged() -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(make_recipe(), load_site("perlmutter"))
    assert "account" in str(caught.value)
    assert "perlmutter.toml" in str(caught.value)


@pytest.mark.parametrize("account", ["''", "' '"])
def test_an_empty_account_is_none(account: str) -> None:
    message = refuse_plan(f"site.account={account}", site="perlmutter")
    assert "charges an account, and none is known for its partitions cpu, gpu" in message
    assert "-s site.account=..." in message
    message = refuse_plan(f"site.partitions.booster.account={account}", site="leonardo")
    assert "none is known for its partitions booster: " in message
    flags = plan_recipe(f"site.account={account}").components[0].slurm_flags
    assert not any("--account" in flag for flag in flags)


def test_a_second_gpu_of_a_rank_is_refused_with_the_number_of_workers() -> None:
    message = refuse_plan("resources.train.gpus_per_worker=4", "resources.train.num_workers=2")
    assert message.startswith("resources.train.gpus_per_worker = 4: ")
    assert message.endswith("set it to 1, and resources.train.num_workers = 8")


def test_each_component_has_its_own_account() -> None:
    made = plan_recipe(site="perlmutter")
    flags = {component.partition: component.slurm_flags for component in made.components}
    assert "--account=m1234_g" in flags["gpu"]
    assert "--account=m1234" in flags["cpu"]
    assert "--constraint=gpu" in flags["gpu"]
    assert not any(flag.startswith("--partition") for flag in flags["gpu"])


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        (("train.correction=none", "rollout.max_lag=8"), True),
        (("train.correction=none", "rollout.max_lag=0"), False),
        (("train.correction=none", "rollout.max_lag=8", "rollout.mode=sync"), False),
        (("train.correction=none", "rollout.max_lag=8", "train.proximal=behaviour"), False),
        (("rollout.max_lag=8",), False),
    ],
)
def test_stale_data_without_a_correction_are_warned_of(settings: tuple[str, ...], is_warned: bool) -> None:
    assert is_warned == any('train.correction = "none" with' in line for line in plan_recipe(*settings).warnings)


@pytest.mark.parametrize(("num_env", "is_warned"), [(100, False), (1000, True)])
def test_workers_that_would_load_a_shared_file_system_are_a_warning(num_env: int, is_warned: bool) -> None:
    settings = (
        f"resources.env.num_workers={num_env}",
        "rollout.max_running=100000",
        "resources.env.mem_gib_per_worker=1",
    )
    warnings = plan_recipe(*settings, site="perlmutter").warnings
    assert is_warned == any("look at shared files about" in line for line in warnings)


def test_unconfirmed_facts_are_warnings() -> None:
    assert any("not confirmed for cpu" in line for line in plan_recipe(site="perlmutter").warnings)


ONE = ("site.het_jobs=no",)
SPLIT = "resources.prefill.num_workers=1"


def partitions(made: Plan) -> set[str]:
    return {component.partition for component in made.components}


def test_a_site_without_het_jobs_gets_one_allocation_with_the_reason() -> None:
    made = plan_recipe("resources.decode.num_workers=4", site="lab-hetstep")
    assert made.layout == "hetstep"
    assert 'het_jobs = "no"' in made.layout_reason
    assert partitions(made) == {"h100"}
    assert [component.nodes for component in made.components] == [1, 1, 1]
    assert {role.role: role.component for role in made.roles}["reward"] == 0


UNKNOWN = "site.het_jobs=unknown"
"""Alps has one partition."""


def test_roles_on_one_partition_get_a_plain_allocation_where_het_jobs_are_not_confirmed() -> None:
    made = plan_recipe(UNKNOWN, recipe="qwen3-8b-math", site="alps")
    assert made.layout == "hetstep"
    assert made.layout_reason == (
        "all roles are on one partition (normal), and it is not confirmed that alps runs heterogeneous jobs: one "
        "allocation for all"
    )
    assert not any("heterogeneous" in line for line in made.warnings)
    asked = plan_recipe(UNKNOWN, "job.layout=hetjob", recipe="qwen3-8b-math", site="alps")
    assert asked.layout == "hetjob"
    assert (asked.num_nodes, asked.cost, asked.roles) == (made.num_nodes, made.cost, made.roles)


def test_roles_on_one_partition_stay_a_heterogeneous_job_where_the_site_runs_these() -> None:
    assert plan_recipe("site.het_jobs=yes", recipe="qwen3-8b-math", site="alps").layout == "hetjob"


def test_roles_on_two_partitions_stay_a_heterogeneous_job_with_a_warning_where_it_is_not_confirmed() -> None:
    made = plan_recipe(UNKNOWN, recipe="qwen3-8b-math", site="leonardo")
    assert (made.layout, partitions(made)) == ("hetjob", {"booster", "dcgp"})
    assert any("not confirmed that leonardo runs heterogeneous jobs" in line for line in made.warnings)


def test_one_allocation_has_prefill_nodes_where_they_are_asked_for() -> None:
    made = plan_recipe(SPLIT, site="lab-hetstep")
    assert [component.roles[0] for component in made.components] == ["env", "prefill", "decode", "train"]


def test_a_compromise_for_one_partition_is_a_fallback() -> None:
    fallbacks = plan_recipe("job.layout=hetstep", site="lab-hetstep").fallbacks
    assert "decode wanted bandwidth, got h100: one allocation is on one partition" in fallbacks
    assert "env wanted cpu, got h100: one allocation is on one partition" in fallbacks
    assert len(fallbacks) == 2


def test_one_allocation_has_the_nodes_of_all_roles_and_the_largest_need_per_node() -> None:
    made = plan_recipe("resources.decode.gpus_per_worker=2", "resources.train.mem_gib_per_worker=9", site="lab-hetstep")
    script = make_batch_script(made, job=CampaignDir(Path("/c/x")).job(0), python="python")
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=3", "--cpus-per-task=8", "--mem=9G", "--gres=gpu:h100:2", "--partition=h100"} <= set(asked)
    assert "hetjob" not in asked
    assert len([flag for flag in asked if flag.startswith("--nodes")]) == 1


def test_cost_and_idle_gpus_count_every_node_of_one_allocation() -> None:
    apart = ("job.layout=hetstep", "job.walltime_min=60")
    made = plan_recipe("resources.decode.gpus_per_worker=2", *apart, site="lab-hetstep")
    assert (made.cost.node_hours, made.cost.gpu_hours) == (3.0, 6.0)
    idle = [line for line in made.warnings if "all are charged" in line]
    assert [line.split(maxsplit=1)[0] for line in idle] == ["env", "train"]
    assert idle[0] == "env uses 0 of the 2 GPUs of each node, and all are charged"


def test_a_recipe_may_ask_for_one_allocation() -> None:
    made = plan_recipe("job.layout=hetstep", site="perlmutter")
    assert made.layout == "hetstep"
    assert "job.layout" in made.layout_reason
    assert partitions(made) == {"gpu-hbm80g"}, "the fewest compromises: it has the memory bandwidth"
    assert all("--account=m1234_g" in component.slurm_flags for component in made.components)


def test_the_next_partition_is_chosen_if_the_best_cannot_hold_all() -> None:
    full = "site.partitions.gpu-hbm80g.max_nodes=2"
    assert partitions(plan_recipe("job.layout=hetstep", full, site="perlmutter")) == {"gpu"}
    short = "site.partitions.gpu-hbm80g.max_walltime_min=10"
    assert partitions(plan_recipe("job.layout=hetstep", short, site="perlmutter")) == {"gpu"}


def test_one_allocation_that_no_partition_can_hold_is_refused_by_role_and_partition() -> None:
    message = refuse_plan("job.layout=hetstep", "resources.decode.num_workers=4")
    assert "train: prefill allows 2 nodes, and 1 workers need 1 beside 2 for other roles" in message
    assert "decode: env has no GPUs, and one worker needs 1" in message


def test_where_no_partition_can_hold_all_roles_each_component_is_a_job() -> None:
    made = plan_recipe(*ONE, "resources.decode.num_workers=4")
    assert made.layout == "multi-job"
    assert "no partition can hold all roles" in made.layout_reason
    assert partitions(made) == {"env", "prefill", "decode", "train"}
    assert all("--nodes=1" in component.slurm_flags for component in made.components)


def test_what_fits_neither_one_partition_nor_several_is_refused_as_one_allocation() -> None:
    message = refuse_plan(*ONE, "resources.decode.num_workers=40")
    assert 'het_jobs = "no"' in message
    assert "decode: decode allows 2 nodes, and 40 workers need 10" in message


def test_a_qos_counts_each_component_that_is_a_job() -> None:
    limit = "site.partitions.decode.max_jobs=1"
    settings = ("job.layout=multi-job", limit, "resources.prefill.num_workers=0")
    assert not any("jobs of a user" in line for line in plan_recipe(*settings).warnings)
    assert any("decode allows 1 jobs of a user" in line for line in plan_recipe(*settings, "job.num_jobs=2").warnings)


@pytest.mark.parametrize(
    ("settings", "num_ahead", "num"),
    [
        (("job.num_jobs=2",), 1, 4),
        (("job.num_jobs=6",), 2, 6),
        (("job.num_jobs=6", "site.nodes_may_submit=false"), 5, 12),
        (("job.num_jobs=6", "job.layout=colocated", "resources.prefill.num_workers=0"), 2, 3),
    ],
)
def test_a_qos_counts_the_jobs_of_a_chain_that_wait_in_the_queue(
    settings: tuple[str, ...], num_ahead: int, num: int
) -> None:
    few, enough = (
        plan_recipe("job.layout=hetjob", *settings, f"site.partitions.booster.max_jobs={most}", site="leonardo")
        for most in (num - 1, num)
    )
    words = f"booster allows {num - 1} jobs of a user, and this one with the next {num_ahead}, which wait in the queue"
    assert any(words in line and f"counts as {num}:" in line for line in few.warnings)
    assert not any("jobs of a user" in line for line in enough.warnings)


def test_a_model_too_large_for_the_only_partition_is_refused_with_both() -> None:
    message = refuse_plan("model.num_params=70000000000", site="lab-hetstep")
    assert "70.0 billion" in message
    assert "(h100)" in message


def test_a_layout_that_the_site_cannot_run_is_refused() -> None:
    assert 'set job.layout = "auto"' in refuse_plan("job.layout=hetjob", *ONE)


def test_where_mpi_cannot_span_components_the_job_stays_heterogeneous_with_a_warning() -> None:
    apart = ("site.mpi.world_over_components=no",)
    made = plan_recipe(*apart, site="perlmutter")
    assert made.layout == "hetjob"
    assert any('job.layout = "hetstep" they go by MPI' in line for line in made.warnings)
    for settled in ("job.layout=hetjob", "site.mpi.couriers=false", "site.partitions.gpu.max_nodes=2"):
        more = ("site.partitions.gpu-hbm80g.max_nodes=2",) if "max_nodes" in settled else ()
        assert not any("hetstep" in line for line in plan_recipe(*apart, settled, *more, site="perlmutter").warnings)


def test_one_machine_has_no_layout_to_choose() -> None:
    assert plan_recipe("job.layout=hetstep", site="local").layout == "local"


def test_to_survive_node_loss_every_role_has_two_nodes_of_one_allocation() -> None:
    roomy = "site.partitions.h100.max_nodes=8"
    made = plan_recipe("job.survive_node_loss=true", roomy, site="lab-hetstep")
    assert [component.nodes for component in made.components] == [2, 2, 2]
    script = make_batch_script(made, job=CampaignDir(Path("/c/x")).job(0), python="python")
    assert script.count("--no-kill") == script.count("--nodes=6") == 1
    apart = plan_recipe("job.survive_node_loss=true", site="lab-hetstep")
    assert (apart.layout, {component.nodes for component in apart.components}) == ("multi-job", {2})
    only = ("job.survive_node_loss=true", "job.layout=hetstep")
    assert "h100 allows 4 nodes" in refuse_plan(*only, site="lab-hetstep")


def test_workers_are_sized_for_the_gpus_of_the_one_partition() -> None:
    settings = ("model.num_params=1000000000", "rollout.max_running=512", "resources.train.num_workers=4")
    large = ("job.layout=hetstep", "rollout.mode=sync", *settings)
    assert plan_recipe(*large, site="perlmutter").role("decode").num_workers >= 8
    assert plan_recipe(*large, site="perlmutter").sizes


def test_to_survive_node_loss_every_component_has_two_nodes() -> None:
    made = plan_recipe("job.survive_node_loss=true")
    assert all(component.nodes == 2 for component in made.components)
    script = make_batch_script(made, job=CampaignDir(Path("/c/x")).job(0), python="python")
    assert script.count("--no-kill") == len(made.components)


def test_whole_nodes_are_asked_for_with_all_their_memory() -> None:
    plan = plan_recipe()
    assert all("--mem=0" not in component.slurm_flags for component in plan.components)
    whole = plan_recipe("site.partitions.train.exclusive=true", site="lab").components[-1]
    assert {"--mem=0", "--exclusive"} <= set(whole.slurm_flags)
    allocation = JobAllocation(job_id="1", end_time=0.0, nodes=[["t1"]])
    assert "--mem=0" in allocation.step_prefix(whole, ["t1"], cpus=1, mem_gib=1, gpus=1)


def test_cost_counts_whole_nodes_where_they_are_exclusive() -> None:
    cost = plan_recipe("job.walltime_min=60", site="perlmutter").cost
    assert (cost.node_hours, cost.gpu_hours) == (4.0, 12.0)


def test_unused_gpus_that_are_charged_are_warnings() -> None:
    assert "train uses 1 of the 4 GPUs of each node, and all are charged" in plan_recipe(site="perlmutter").warnings


def test_a_thousand_node_recipe_is_planned() -> None:
    workers = ("resources.env.num_workers=40000", "resources.decode.num_workers=3000")
    started = time.process_time()
    made = plan_recipe(*workers, "rollout.max_running=400000", site="perlmutter")
    assert sum(component.nodes for component in made.components) > 1000
    assert time.process_time() - started < 1.0  # the only time limit that is part of the contract


def test_a_path_with_spaces_and_quotes_is_quoted_in_the_script() -> None:
    campaign = CampaignDir(Path('/scratch/my runs/it\'s 100% "new"'))
    script = make_batch_script(plan_recipe(), job=campaign.job(0), python="/opt/my python/bin/python")
    assert '--output="/scratch/my runs/it\'s 100%% \\"new\\"/jobs/000/logs/batch.log"' in script
    assert "exec '/opt/my python/bin/python'" in script


@pytest.mark.parametrize("site", ["local", "lab", "lab-hetstep", "perlmutter", "leonardo"])
def test_shipped_sites_load(site: str) -> None:
    assert isinstance(load_site(site), Site)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        (
            'engine.tool_parser="qwen"',
            "engine.tool_parser = 'qwen' is not known: choose one of auto, hermes, qwen3-coder",
        ),
        ('engine.tool_parser="vllm:"', "or vllm:NAME"),
        ('engine.reasoning_parser="hermes"', "choose one of auto, think, magistral"),
    ],
)
def test_a_parser_that_is_not_known_is_refused_with_the_list(setting: str, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        plan_recipe(setting)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("engine.pipeline_parallel=2",), "has one process"),
        (('engine.backend="vllm"', "engine.pipeline_parallel=3", "resources.decode.gpus_per_worker=4"), "3 stages"),
        (
            ('engine.backend="vllm"', "resources.decode.gpus_per_worker=4"),
            "num_heads = 2 cannot be divided among the 4",
        ),
    ],
)
def test_gpus_of_an_engine_that_cannot_be_divided_are_refused(settings: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        plan_recipe(*settings)


LARGE = (
    "rollout.mode=sync",
    "model.num_params=8000000000",
    "resources.train.num_workers=4",
    "train.sharding=full",
    "rollout.max_running=512",
    "domains.lake.max_turns=40",
    "domains.lake.usual_prompt_tokens=500",
    "domains.lake.usual_reply_tokens=60",
)


def on_gpus(*settings: str) -> Plan:
    return plan_recipe(*LARGE, *settings, site="perlmutter")


def workers(found: Plan) -> tuple[int, int]:
    return found.role("prefill").num_workers, found.role("decode").num_workers


def test_the_planner_chooses_the_number_of_workers_with_the_reason() -> None:
    found = on_gpus()
    prefill, decode = workers(found)
    assert prefill >= 1
    assert decode >= 8  # max_batch is 64
    assert [f"decode has {decode} workers" in found.sizes[0], f"prefill has {prefill} workers" in found.sizes[1]] == [
        True,
        True,
    ]


def test_longer_prompts_want_more_prefill_and_more_episodes_more_decode() -> None:
    prefill, decode = workers(on_gpus())
    assert workers(on_gpus("domains.lake.usual_prompt_tokens=1000"))[0] > prefill
    assert workers(on_gpus("rollout.max_running=1024"))[1] == 2 * decode


def test_numbers_of_workers_in_the_recipe_are_kept() -> None:
    assert workers(on_gpus("resources.prefill.num_workers=3", "resources.decode.num_workers=5")) == (3, 5)
    found = on_gpus("resources.decode.num_workers=2")
    assert workers(found)[1] == 2
    assert len(found.sizes) == 1


def test_a_model_of_unknown_size_gets_one_worker_of_each() -> None:
    assert workers(plan_recipe()) == (1, 1)
    assert plan_recipe().sizes == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (('engine.sim.gpu="h20"',), 'choose backend = "sim"'),
        (('engine.backend="sim"', 'engine.sim.gpu="h99"'), "is not in the catalogue"),
        (('engine.backend="sim"', 'engine.sim.gpu=["h20", "h99"]'), "'h99' is not in the catalogue"),
    ],
)
def test_a_simulated_engine_with_conflicting_settings_is_refused(settings: tuple[str, ...], message: str) -> None:
    assert message in refuse_plan(*settings)


@pytest.mark.parametrize(
    ("unit", "settings", "complaint"),
    [
        ("turn", (), 'which sees only their sum: set train.advantage = "trloo" or "gae"'),
        ("token", ("train.advantage=trloo",), 'set train.advantage = "gae"'),
        ("token", ("train.advantage=gae", "train.reward_scale=domain"), 'set train.reward_scale = "none"'),
        ("turn", ("domains.lake.reward=hpcrl.envs.base:env_reward", "train.advantage=gae"), "with the default reward"),
    ],
)
def test_rewards_that_the_advantage_cannot_use_are_refused(
    unit: str, settings: tuple[str, ...], complaint: str
) -> None:
    assert complaint in refuse_plan(f"domains.lake.reward_unit={unit}", *settings)


@pytest.mark.parametrize(("unit", "advantage"), [("turn", "trloo"), ("turn", "gae"), ("token", "gae")])
def test_rewards_that_the_advantage_uses_are_planned(unit: str, advantage: str) -> None:
    assert plan_recipe(f"domains.lake.reward_unit={unit}", f"train.advantage={advantage}")


def test_more_steps_than_the_node_of_the_driver_bears_are_warned_of() -> None:
    wide = ("resources.env.num_workers=200", "resources.env.cpus_per_worker=120", "rollout.max_running=4000")
    (warning,) = [line for line in plan_recipe(*wide, site="perlmutter").warnings if "sruns" in line]
    assert "started by 402 sruns" in warning
    assert warning.endswith('set site.steps_per = "role"')
    joined = plan_recipe(*wide, "site.steps_per=role", site="perlmutter")
    assert not [line for line in joined.warnings if "sruns" in line]


def test_a_node_that_the_weights_alone_fill_is_not_helped_by_less_memory_for_its_workers(
    tmp_path: Path,
) -> None:
    sized = "model.num_params=8000000000", "resources.decode.mem_gib_per_worker=60", "job.walltime_min=20"
    message = refuse_plan(*sized, "resources.train.mem_gib_per_worker=300", site="local")
    assert "a decode node needs" in message
    assert message.endswith("choose a partition whose nodes have more memory")


def test_a_rank_of_the_trainer_with_several_gpus_is_refused_with_the_number_of_ranks() -> None:
    message = refuse_plan("resources.train.gpus_per_worker=4", site="leonardo")
    assert "a rank uses one GPU: set it to 1, and resources.train.num_workers = 4" in message


def test_a_site_with_tls_sends_nothing_unencrypted_from_node_to_node() -> None:
    assert "set site.mpi.couriers = false" in refuse_plan("site.network.tls=true")
    by_files = ("site.network.tls=true", "site.mpi.couriers=false")
    assert not [text for text in plan_recipe(*by_files).warnings if "tls" in text]
    large = plan_recipe(*by_files, "resources.train.num_workers=8")
    (left,) = [text for text in large.warnings if "tls" in text]
    assert left == "network.tls does not encrypt what the processes of train send from node to node"
    assert 'inference.kv_connector = "files"' in refuse_plan(*by_files, 'engine.backend="vllm"')
    assert not [text for text in plan_recipe("site.network.tls=true", site="local").warnings if "tls" in text]


SMALL_GPU_PARTITIONS = (
    *("site.het_jobs=no", "resources.train.num_workers=4", "resources.decode.num_workers=2"),
    *("site.partitions.prefill.max_nodes=1", "site.partitions.decode.max_nodes=1"),
    "site.partitions.train.max_nodes=1",
)


def test_separate_jobs_come_before_turns_on_shared_gpus() -> None:
    made = plan_recipe(*SMALL_GPU_PARTITIONS)
    assert (made.layout, made.has_gpu_shifts) == ("multi-job", False)


def test_pools_of_separate_jobs_are_not_those_of_one_partition() -> None:
    made = plan_recipe(*SMALL_GPU_PARTITIONS)
    assert not any("one partition has one kind of GPU" in line for line in made.sizes)


def test_a_small_site_is_refused_with_what_does_not_fit_on_shared_nodes_either() -> None:
    few = ("site.partitions.booster.max_nodes=1", "site.partitions.dcgp.max_nodes=1")
    message = refuse_plan(*few, "resources.train.num_workers=16", site="leonardo")
    assert "train: booster allows 1 nodes, and 16 workers need 4" in message


def test_separate_jobs_all_have_the_licences_and_flags_of_every_job() -> None:
    flags = ('site.licenses=["scratch:1"]', 'site.job_flags=["--wckey=x"]', "resources.prefill.num_workers=1")
    apart, together = (plan_recipe(*flags, f"job.layout={layout}") for layout in ("multi-job", "hetjob"))
    wanted = {"--licenses=scratch:1", "--wckey=x"}
    assert [wanted <= set(part.slurm_flags) for part in apart.components] == [True] * 4
    assert [wanted <= set(part.slurm_flags) for part in together.components] == [True, False, False, False]


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--partition=x", "slurm_partition"),
        ("-p x", "slurm_partition"),
        ("--nodes=9", "resources.ROLE.num_workers"),
        ("-N9", "resources.ROLE.num_workers"),
        ("--wckey=x --ntasks 9", "resources.ROLE.num_workers"),
        ("--mem-per-cpu=1G", "resources.ROLE.mem_gib_per_worker"),
        ("--time=1", "job.walltime_min"),
        ("--export=NONE", "exports"),
        ("--output=x", "campaigns_dir"),
        ("-x n1", "exclude"),
    ],
)
@pytest.mark.parametrize("further", ["partitions.env.extra_flags", "job_flags"])
def test_a_further_flag_that_is_made_of_another_key_is_refused_with_that_key(flag: str, key: str, further: str) -> None:
    message = refuse_plan(f"site.{further}=['{flag}']")
    assert f"{further.rpartition('.')[2]} with {flag!r}, which hpcrl sets from {key}:" in message


def test_requests_for_gpus_besides_those_of_a_component_are_refused() -> None:
    for flag, key in (("--gres=gpu:9", "gres_type"), ("-G 9", "gpus_per_node")):
        assert f"partitions.train of site 'lab' has extra_flags with {flag!r}, which hpcrl sets from {key}" in (
            refuse_plan(f"site.partitions.train.extra_flags=['{flag}']")
        )


def test_further_flags_that_hpcrl_does_not_set_there_are_kept() -> None:
    further = ["--gpu-bind=none", "--wckey=x", "--nice -5", "--gres=lscratch:9", "--reservation=course", "--exclusive"]
    made = plan_recipe(f"site.partitions.env.extra_flags={further}", "site.job_flags=['-L scratch']")
    assert made.components[0].slurm_flags[-7:] == [*further, "-L scratch"]


def make_preemptible(*labels: str) -> list[str]:
    return [f"site.partitions.{label}.preemptible=true" for label in labels]


@pytest.mark.parametrize("layout", ["auto", "hetstep", "colocated", "multi-job"])
def test_a_site_with_only_preemptible_partitions_is_refused_with_the_reason(layout: str) -> None:
    message = refuse_plan(*make_preemptible("booster", "dcgp"), f"job.layout={layout}", site="leonardo")
    assert "all partitions of site 'leonardo' are preemptible (booster, dcgp)" in message
    assert "set preemptible = false in one" in message


def test_nodes_that_are_all_preemptible_are_named_as_the_reason_of_a_fallback() -> None:
    cpu, gpu = (
        plan_recipe(*make_preemptible(label), "job.layout=hetjob", site="leonardo").fallbacks
        for label in ("dcgp", "booster")
    )
    assert any(line.endswith("site leonardo has no CPU nodes outside preemptible partitions") for line in cpu)
    assert any(line.endswith("site leonardo has no GPUs outside preemptible partitions") for line in gpu)


def test_engines_on_a_gpu_without_bfloat16_are_warned_of() -> None:
    settings = ("engine.backend=vllm", "train.publish_dtype=bfloat16")
    old, new = (
        plan_recipe(*settings, *(f"site.partitions.{label}.gpu={gpu}" for label in ("prefill", "decode", "train")))
        for gpu in ("v100-32", "a100-80")
    )
    assert any("v100-32 has no bfloat16" in line for line in old.warnings)
    assert not any("bfloat16" in line for line in new.warnings)


def test_a_trainer_in_bf16_on_a_gpu_without_it_is_warned_of() -> None:
    old, auto, new = (
        [
            line
            for line in plan_recipe(
                *(f"site.partitions.{label}.gpu={gpu}" for label in ("prefill", "decode", "train")),
                f"train.precision={precision}",
            ).warnings
            if line.startswith("train.precision")
        ]
        for gpu, precision in (("v100-32", "bf16"), ("v100-32", "auto"), ("a100-80", "bf16"))
    )
    assert old == [
        'train.precision = "bf16", and v100-32 has no bfloat16, which its GPUs emulate slowly: set '
        'train.precision = "auto", which is fp32 there'
    ]
    assert not [*auto, *new]
