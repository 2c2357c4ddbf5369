"""The trainer of the train role: the models that it holds beside the policy."""

from collections import deque

import msgspec
import pytest

from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import CheckpointSaved, FaultReported, StepFinished, TrainingResumed
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_progress import read_train_progress
from hpcrl.errors import LostCheckpointsError, NodeResultError, TrainError
from hpcrl.hardware.degrees import ParallelDegrees
from hpcrl.learn.pipeline import check_trajectories
from hpcrl.roles import train
from hpcrl.roles.train import TIME_FACTOR, DrainTimes, TrainingLoop, _make_rank_environment, _make_trainer
from hpcrl.spool.outcome import is_too_old
from hpcrl.system.files import make_private_dir
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.megatron import skip_without_megatron
from tests.support.plans import make_recipe, plan_recipe
from tests.support.workers import make_worker_context


def make_context(tmp_path, model_dir, *settings):
    """Make the context of a rank of a campaign on this machine."""
    campaign = CampaignDir(tmp_path)
    make_private_dir(campaign.events)
    campaign.model.symlink_to(model_dir)
    return make_worker_context(campaign, "train", make_recipe(*settings))


@pytest.mark.parametrize("trainer", ["torch", "megatron"])
@pytest.mark.parametrize(
    ("settings", "models"),
    [
        (("judge.grader.tiny={}", "teacher.judge=grader"), set()),
        (('teacher.path="{model}"',), {"reference"}),
        ((), {"reference"}),
    ],
)
def test_a_rank_holds_a_reference_unless_a_judge_is_the_teacher(tmp_path, tiny_model_dir, trainer, settings, models):
    if trainer == "megatron":
        skip_without_megatron()
    given = [setting.replace("{model}", str(tiny_model_dir)) for setting in settings]
    context = make_context(tmp_path, tiny_model_dir, "train.kl=k2", f"train.trainer={trainer}", *given)
    made = _make_trainer(context, SINGLE_RANK)
    assert set(made._fixed_models) == models
    assert made.has_scored_reference == (not models)


def test_the_ranks_of_a_campaign_on_one_machine_meet_on_its_loopback_interface(tmp_path, tiny_model_dir, monkeypatch):
    """The host's name may have an address that other machines reach."""
    for library in ("GLOO", "NCCL"):
        monkeypatch.setenv(f"{library}_SOCKET_IFNAME", "")
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME")  # what the ranks set is removed again
    environment = _make_rank_environment(make_context(tmp_path, tiny_model_dir))
    assert (environment["MASTER_ADDR"], environment["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")


@pytest.mark.parametrize(("num_tokens", "is_needed"), [(2048, False), (32768, True)])
def test_a_rank_recomputes_layers_as_the_plan_has_found(tmp_path, tiny_model_dir, num_tokens, is_needed):
    large = ("model.num_params=8_000_000_000", "train.sharding=full", "train.precision=bf16")
    ranks = ("resources.train.num_workers=16", f"train.tokens_per_micro_batch={num_tokens}")
    found = plan_recipe(*large, *ranks, site="perlmutter").train_memory
    context = make_context(tmp_path, tiny_model_dir)
    context.plan = msgspec.structs.replace(context.plan, train_memory=found)
    assert context.recipe.train.recompute == "auto"
    assert _make_trainer(context, SINGLE_RANK)._train.recompute == is_needed


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_rank_shards_its_model_as_the_plan_has_chosen(tmp_path, tiny_model_dir, sharding):
    context = make_context(tmp_path, tiny_model_dir)
    context.plan = msgspec.structs.replace(context.plan, train_sharding=sharding)
    assert context.recipe.train.sharding == "auto"
    assert _make_trainer(context, SINGLE_RANK)._train.sharding == sharding


@pytest.mark.parametrize("trainer", ["torch", "megatron"])
def test_ranks_divide_the_model_as_the_plan_has_chosen(tmp_path, tiny_model_dir, trainer):
    if trainer == "megatron":
        skip_without_megatron()
    context = make_context(tmp_path, tiny_model_dir, f"train.trainer={trainer}")
    context.plan = msgspec.structs.replace(context.plan, train_degrees=ParallelDegrees(context=2))
    with pytest.raises(TrainError, match=r"train\.context_parallel = 2"):
        _make_trainer(context, SINGLE_RANK)


def test_a_checkpoint_that_was_removed_is_reported_and_one_that_is_damaged_is_not(tmp_path, tiny_model_dir):
    context = make_context(tmp_path, tiny_model_dir)
    for step in (4, 8):
        context.events.emit(CheckpointSaved(step=step))
    directory = context.campaign.checkpoints
    make_private_dir(directory / "000001-step-000004")
    train._report_missing_checkpoint(context, step=4)
    train._report_missing_checkpoint(context, step=0)
    make_private_dir(directory / "000002-step-000008")  # damaged
    train._report_missing_checkpoint(context, step=4)
    faults = [event.detail for event in EventReader(tmp_path / "events").poll() if isinstance(event, FaultReported)]
    missing = f"the checkpoint of step 8 is not in {directory} any more: training "
    assert faults == [f"{missing}continues from step 4", f"{missing}starts from step 0"]


@pytest.mark.parametrize(("num_lost", "version"), [(0, 0), (1, 2), (2, 4), (9, 13)])
def test_what_lost_steps_generated_is_as_old_as_it_is_steps_away(tmp_path, tiny_model_dir, num_lost, version):
    """The first version after a fault: of step 0 again, and too old for all that more than `max_lag` steps changed."""
    context = make_context(tmp_path, tiny_model_dir, "rollout.max_lag=3")
    make_private_dir(context.campaign.weights)
    trainer = _make_trainer(context, SINGLE_RANK)
    killed = TrainingLoop.start_or_resume(context, trainer)
    for number in range(1, num_lost + 1):
        killed.step = killed.version = number
        killed.publish()
    killed.publisher.close()
    started = TrainingLoop.start_or_resume(context, trainer)
    started.publisher.close()
    assert started.version == version
    assert is_too_old(num_lost, newest=version, max_lag=3) == (num_lost > 3)
    resumed = [each for each in EventReader(tmp_path / "events").poll() if isinstance(each, TrainingResumed)]
    assert len(resumed) == bool(num_lost)


def test_a_node_with_a_result_that_cannot_be_used_ends_the_campaign(tmp_path, tiny_model_dir, monkeypatch):
    def return_something_else(context, world):
        check_trajectories(None, [], "filter")

    monkeypatch.setattr(train, "_run_rank", return_something_else)
    context = make_context(tmp_path, tiny_model_dir)
    context.campaign.recipe.write_bytes(msgspec.json.encode(context.recipe))
    with pytest.raises(NodeResultError, match="returned None"):
        train.run(context)
    assert "train.pipeline.filter returned None" in read_train_progress(context.campaign.train_progress).failure


def test_a_campaign_whose_checkpoints_are_all_damaged_ends_without_another_start(tmp_path, tiny_model_dir, monkeypatch):
    def find_damage(context, world):
        raise LostCheckpointsError("every checkpoint is damaged")

    monkeypatch.setattr(train, "_run_rank", find_damage)
    context = make_context(tmp_path, tiny_model_dir)
    context.campaign.recipe.write_bytes(msgspec.json.encode(context.recipe))
    with pytest.raises(LostCheckpointsError):
        train.run(context)
    assert read_train_progress(context.campaign.train_progress).failure == "every checkpoint is damaged"


@pytest.mark.parametrize(
    ("age_s", "left_s", "is_too_late"),
    [(0.0, 34.0, False), (0.0, 32.0, True), (15.0, 19.0, False), (15.0, 17.0, True), (500.0, 12.0, False)],
)
def test_a_step_is_abandoned_if_its_rest_and_a_checkpoint_do_not_fit(age_s, left_s, is_too_late):
    times = DrainTimes()
    times.steps.extend((8.0, 20.0, 9.0))
    times.saves.extend((10.0, 1.0))
    assert times.is_too_late(step_age_s=age_s, left_s=left_s) == is_too_late


@pytest.mark.parametrize(
    ("save_age_s", "left_s", "is_too_late"),
    [(None, 50.0, False), (0.0, 98.0, True), (0.0, 102.0, False), (40.0, 58.0, True), (40.0, 62.0, False)],
)
def test_a_checkpoint_that_is_being_written_takes_its_time_first(save_age_s, left_s, is_too_late):
    times = DrainTimes(saves=deque([50.0 / TIME_FACTOR]))
    assert times.is_too_late(step_age_s=0.0, left_s=left_s, save_age_s=save_age_s) == is_too_late


def test_a_trainer_knows_the_times_of_the_jobs_before_it(tmp_path):
    campaign = CampaignDir(tmp_path)
    make_private_dir(campaign.events)
    log = EventLog.open(campaign, "train", 0, job=0, role="train")
    for step in range(1, 2000):  # more than is read of it
        log.emit(StepFinished(step=step, step_s=10.0, times={"publish": 2.0}))
    log.emit(CheckpointSaved(step=1999, wall_s=60.0))
    times = DrainTimes.read_earlier(campaign)
    assert (max(times.steps), list(times.saves)) == (12.0, [60.0])
    assert times.is_too_late(step_age_s=0.0, left_s=72.0)
    assert DrainTimes.read_earlier(CampaignDir(tmp_path / "new")) == DrainTimes()


def test_a_step_is_not_abandoned_before_any_was_measured():
    assert not DrainTimes().is_too_late(step_age_s=50.0, left_s=1.0)
    assert not DrainTimes().is_too_late(step_age_s=0.0, left_s=float("inf"))


def test_a_checkpoint_that_was_not_measured_takes_the_time_of_its_size():
    times = DrainTimes(assumed_save_s=50.0 / TIME_FACTOR)
    assert times.is_too_late(step_age_s=0.0, left_s=49.0)
    times.saves.append(1.0)
    assert not times.is_too_late(step_age_s=0.0, left_s=49.0)
