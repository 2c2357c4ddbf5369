"""The trainer's queue: which trajectories are settled, and which segments leave the spools after which checkpoint."""

from types import SimpleNamespace

import msgspec
import pytest

from hpcrl.campaign_dir.events import FaultReported, SegmentsRetired
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir
from hpcrl.campaign_dir.train_progress import read_train_progress
from hpcrl.config.recipe import SpoolConfig
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.roles.train import TrainingLoop
from hpcrl.roles.train_queue import TrainQueue, find_reward_patience
from hpcrl.rollout.flow_control import HoldWatch, HoldWriter
from hpcrl.spool import retention
from hpcrl.spool.listing import announce_changes, count_trajectories, list_segments
from hpcrl.spool.writer import DiskSpoolWriter, derive_segment
from hpcrl.system.files import make_private_dir, read_json
from tests.support.plans import make_recipe
from tests.support.trajectories import make_trajectory

GROUP = 4


class Events(list):
    def emit(self, event):
        self.append(event)

    def of(self, kind):
        return [event for event in self if isinstance(event, kind)]


@pytest.fixture
def context(tmp_path, monkeypatch):
    monkeypatch.setattr(retention, "MAX_MERGED_SEGMENTS", 1)
    campaign = CampaignDir(tmp_path / "campaign")
    for name in SPOOLS:
        make_private_dir(campaign.spool(name))
    recipe = make_recipe(f"rollout.group_size={GROUP}", "rollout.max_lag=1", "train.groups_per_step=1")
    recipe = msgspec.structs.replace(recipe, spool=SpoolConfig(retire_after_s=0.0))
    return SimpleNamespace(campaign=campaign, job=campaign.job(0), recipe=recipe, events=Events())


def play(context, group, *, rewards=(1.0,) * GROUP, **changed):
    """Play, seal and score a group; return the name of its segment."""
    return score(context, seal(context, group, **changed), rewards=rewards)


def seal(context, group, *, version=0, num=GROUP, num_tokens=1):
    """Play and seal a group; return the name of its segment."""
    writer = DiskSpoolWriter(context.campaign.spool("rollouts"), producer=f"000-env-{group}")
    for index in range(num):
        writer.append(make_trajectory(f"lake/{group}/{index}", num_tokens, version=version))
    writer.flush()
    (name,) = [
        name for name in list_segments(context.campaign.spool("rollouts")) if name.startswith(f"000-env-{group}-")
    ]
    return name


def score(context, name, *, rewards=(1.0,) * GROUP):
    source, target = context.campaign.spool("rollouts") / name, context.campaign.spool("scored")
    derive_segment(
        source, target, lambda one: msgspec.structs.replace(one, reward=rewards[int(one.id.rpartition("/")[2])])
    )
    return name


def train(context, queue, consumed, *, version=0):
    """Make one step on all that is available."""
    choice = queue.choose(version=version)
    consumed.update(one.id for one in choice.chosen)
    queue.mark_trained(version=1)
    return choice


def save(context, number, *, queue):
    """Make a checkpoint that covers everything so far; only the newest is kept."""
    queue.note_settled()
    make_private_dir(context.campaign.checkpoints)
    for old in context.campaign.checkpoints.iterdir():
        old.rmdir()
    path = context.campaign.checkpoints / f"{number:06d}-step-{number:06d}"
    path.mkdir()
    return path


def settled(context):
    return read_json(context.campaign.settled)["num"]


def test_a_batch_is_settled_when_its_step_is_made(context):
    consumed = ConsumedTrajectories()
    queue = TrainQueue(context, consumed=consumed)
    play(context, 0)
    assert len(queue.choose(version=0).chosen) == GROUP
    assert settled(context) == 0
    queue.mark_trained(version=1)
    assert settled(context) == GROUP


def test_the_settled_count_comes_with_its_version(context):
    consumed = ConsumedTrajectories()
    queue = TrainQueue(context, consumed=consumed)
    play(context, 0)
    train(context, queue, consumed)
    assert read_json(context.campaign.settled) == {"num": GROUP, "version": 1, "workers": {"env-0": GROUP}}


def test_a_step_waits_while_its_version_would_make_episodes_too_old_and_its_batch_stays(context):
    queue = TrainQueue(context, consumed=ConsumedTrajectories())
    make_private_dir(context.campaign.env_workers)
    hold_writer = HoldWriter(context.campaign.hold(0))
    hold_writer.write(0, now=0.0)
    play(context, 0)
    choice = queue.choose(version=0)
    assert choice.chosen == []
    assert len(choice.rest) == GROUP
    assert settled(context) == 0
    hold_writer.write(1, now=0.0)
    assert len(queue.choose(version=0).chosen) == GROUP


def test_a_step_trains_first_on_what_was_sealed_when_its_hold_ended(context, monkeypatch):
    queue = TrainQueue(context, consumed=ConsumedTrajectories())
    play(context, 0, version=1)

    def seal_and_end_hold(*_, **__):
        if count_trajectories(list_segments(context.campaign.spool("scored"))) == GROUP:
            play(context, 1, version=0)
        return True

    monkeypatch.setattr(HoldWatch, "may_publish", seal_and_end_hold)
    assert {one.group for one in queue.choose(version=1).chosen} == {"lake/1"}


def test_a_step_waits_for_the_rewards_of_older_groups_that_would_be_too_old_after_it(context):
    queue = TrainQueue(context, consumed=ConsumedTrajectories())
    play(context, 0, version=1)
    name = seal(context, 1, version=0)
    choice = queue.choose(version=1)
    assert choice.chosen == []
    assert len(choice.rest) == GROUP
    score(context, name)
    queue.expect_change()
    assert {one.group for one in queue.choose(version=1).chosen} == {"lake/1"}


@pytest.mark.parametrize(("scored", "unscored"), [(0, 0), (1, 1), (2, 0)])
def test_a_step_does_not_wait_for_rewards_where_that_would_save_no_group(context, scored, unscored):
    queue = TrainQueue(context, consumed=ConsumedTrajectories())
    play(context, 0, version=scored)
    seal(context, 1, version=unscored)
    assert {one.group for one in queue.choose(version=max(1, scored)).chosen} == {"lake/0"}


@pytest.mark.parametrize(("timeout_s", "patience_s"), [(40, 40.0), (3600, 300.0)])
def test_a_step_waits_for_rewards_as_long_as_one_may_take_unless_the_job_would_stall(timeout_s, patience_s):
    recipe = make_recipe(f"domains.lake.reward_timeout_s={timeout_s}", "job.stall_timeout_min=10")
    assert find_reward_patience(recipe) == patience_s


def test_a_step_does_not_wait_for_rewards_of_what_was_trained_on(context):
    consumed = ConsumedTrajectories()
    consumed.update(f"lake/1/{index}" for index in range(GROUP))
    queue = TrainQueue(context, consumed=consumed)
    play(context, 0, version=1)
    seal(context, 1, version=0)
    assert len(queue.choose(version=1).chosen) == GROUP


def test_trajectories_gathered_during_a_step_are_chosen_as_if_read_after_it(context):
    play(context, 0)
    gathered, plain = (TrainQueue(context, consumed=ConsumedTrajectories()) for _ in range(2))
    gathered.gather()
    play(context, 1)
    guess = gathered.preview_choice(0)
    assert [one.id for one in guess] == [f"lake/0/{index}" for index in range(GROUP)]
    for _ in range(2):
        mine, theirs = (queue.choose(version=0) for queue in (gathered, plain))
        assert [one.id for one in mine.chosen] == [one.id for one in theirs.chosen]
    assert [one.id for one in mine.chosen] == [f"lake/1/{index}" for index in range(GROUP)]


def test_gathered_and_previewed_trajectories_are_not_settled(context):
    queue = TrainQueue(context, consumed=ConsumedTrajectories())
    play(context, 0)
    queue.gather()
    assert len(queue.preview_choice(0)) == GROUP
    assert queue.preview_choice(99) == []
    queue.mark_trained(version=0)
    assert settled(context) == 0
    assert queue._reader.finished_segments(queue._waiting) == []  # no checkpoint takes it for done


def test_waiting_trajectories_are_not_settled_and_stale_ones_are(context):
    queue = TrainQueue(context, consumed=ConsumedTrajectories())
    play(context, 0, num=GROUP - 1)
    queue.choose(version=0)
    assert settled(context) == 0
    assert len(queue.choose(version=99).stale) == GROUP - 1
    assert settled(context) == GROUP - 1


def test_a_restarted_trainer_counts_what_its_checkpoint_consumed(context):
    consumed = ConsumedTrajectories()
    consumed.add("lake/0/0")
    play(context, 0)
    play(context, 1, num=1)
    queue = TrainQueue(context, consumed=consumed)
    assert queue.choose(version=0).chosen == []
    assert settled(context) == GROUP


def test_used_segments_leave_the_spools_and_the_counts_stay_right(context):
    consumed = ConsumedTrajectories()
    queue = TrainQueue(context, consumed=consumed)
    play(context, 0)
    train(context, queue, consumed)
    play(context, 1, num=1)
    train(context, queue, consumed)
    queue.mark_covered(save(context, 1, queue=queue))
    queue.retire(version=1)
    queue.close()
    assert count_trajectories(list_segments(context.campaign.spool("archive"))) == GROUP
    assert (
        count_trajectories(list_segments(context.campaign.spool("rollouts")))
        == count_trajectories(list_segments(context.campaign.spool("scored")))
        == 1
    )
    assert settled(context) == 0
    (retired,) = context.events.of(SegmentsRetired)
    assert retired.num == GROUP


def test_all_segments_that_one_checkpoint_makes_due_are_retired(context):
    consumed = ConsumedTrajectories()
    queue = TrainQueue(context, consumed=consumed)
    for group in range(5):
        play(context, group)
    while train(context, queue, consumed).chosen:
        pass
    queue.mark_covered(save(context, 1, queue=queue))
    queue.retire(version=1)
    queue._retiring.join()
    assert count_trajectories(list_segments(context.campaign.spool("archive"))) == 5 * GROUP
    assert list_segments(context.campaign.spool("scored")) == []


def test_no_segment_leaves_while_an_older_checkpoint_is_kept(context):
    consumed = ConsumedTrajectories()
    queue = TrainQueue(context, consumed=consumed)
    save(context, 1, queue=queue)
    play(context, 0)
    train(context, queue, consumed)
    newest = context.campaign.checkpoints / "000002-step-000002"
    newest.mkdir()
    queue.mark_covered(newest)
    queue.retire(version=1)
    queue.close()
    assert count_trajectories(list_segments(context.campaign.spool("scored"))) == GROUP


def test_a_retirement_that_fails_is_reported_and_training_continues(context, monkeypatch):
    consumed = ConsumedTrajectories()
    queue = TrainQueue(context, consumed=consumed)
    play(context, 0)
    train(context, queue, consumed)
    queue.mark_covered(save(context, 1, queue=queue))
    context.campaign.spool("archive").rmdir()
    context.campaign.spool("archive").write_text("in the way")
    queue.retire(version=1)
    queue.close()
    (fault,) = context.events.of(FaultReported)
    assert "could not be retired" in fault.detail
    assert count_trajectories(list_segments(context.campaign.spool("rollouts"))) == GROUP


def test_a_damaged_segment_is_scored_again_and_not_a_third_time(context):
    queue = TrainQueue(context, consumed=ConsumedTrajectories())
    name = play(context, 0)
    place = context.campaign.spool("scored") / name
    for _ in range(2):
        place.write_bytes(b"rot")
        announce_changes(place.parent, added=[name])
        assert queue.choose(version=0).chosen == []
        if (context.campaign.spool("rollouts") / name).exists():
            score(context, name)
    assert list_segments(context.campaign.spool("rollouts")) == []
    assert (context.campaign.spool("rollouts") / "quarantine" / name).exists()
    assert len(context.events.of(FaultReported)) == 3


def test_flat_groups_are_settled_so_that_others_are_admitted_and_the_step_waits(context):
    train_config = msgspec.structs.replace(context.recipe.train, flat_groups="drop")
    context.recipe = msgspec.structs.replace(context.recipe, train=train_config)
    queue = TrainQueue(context, consumed=ConsumedTrajectories())
    for number in range(7):
        play(context, number)
        choice = queue.choose(version=0)
        assert (len(choice.flat), choice.chosen, choice.rest) == (GROUP, [], [])
        assert settled(context) == (number + 1) * GROUP
    play(context, 7, rewards=(0.0, 1.0, 1.0, 1.0))
    assert [one.group for one in queue.choose(version=0).chosen] == ["lake/7"] * GROUP


def test_a_group_that_the_filter_leaves_nothing_of_is_dropped_like_a_flat_one(context):
    change = {"flat_groups": "drop", "overlong": "filter", "response_budget": {"lake": 1}}
    context.recipe = msgspec.structs.replace(
        context.recipe, train=msgspec.structs.replace(context.recipe.train, **change)
    )
    play(context, 0, num_tokens=2, rewards=(0.0, 1.0, 1.0, 1.0))
    choice = TrainQueue(context, consumed=ConsumedTrajectories()).choose(version=0)
    assert (len(choice.flat), choice.chosen) == (GROUP, [])


def test_the_driver_reads_what_the_choice_of_groups_means_for_the_next_step(context):
    train_config = msgspec.structs.replace(context.recipe.train, flat_groups="drop", groups_per_step=2)
    context.recipe = msgspec.structs.replace(context.recipe, train=train_config)
    consumed = ConsumedTrajectories()
    queue = TrainQueue(context, consumed=consumed)
    fixed = {
        "trainer": None,
        "leader": None,
        "publisher": None,
        "num_params": 0,
        "saved_step": -1,
        "skipped_rows": None,
    }
    loop = TrainingLoop(context=context, train_queue=queue, consumed=consumed, step=0, version=9, **fixed)
    seen = []
    for number, (version, rewards) in enumerate([(9, (1.0,) * GROUP), (0, (1.0,) * GROUP), (9, (0.0, 1.0, 1.0, 1.0))]):
        play(context, number, version=version, rewards=rewards)
        assert not loop.try_step()
        progress = read_train_progress(context.campaign.train_progress)
        seen.append((progress.num_flat_groups, progress.num_lost_groups, progress.num_ready_groups))
    assert seen == [(1, 0, 0), (1, 1, 0), (1, 1, 1)]
