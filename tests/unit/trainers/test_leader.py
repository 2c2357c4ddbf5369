"""Ranks read their own rows from the spool, by the shares that rank 0 sends."""

import msgspec
import pytest

from hpcrl.errors import TrainError
from hpcrl.learn.distribute import ShareItem, distribute_step, load_share_rows
from hpcrl.spool.segment import write_segment
from hpcrl.trainers.leader import RankOrder, fetch_trajectories
from tests.support.learners import CONTEXT, batch, settings


@pytest.fixture
def spooled(tmp_path):
    """Write a step's trajectories into two segments; return them with the segment of each."""
    episodes = batch()
    where = {}
    for number, part in enumerate((episodes[::2], episodes[1::2])):
        name = f"000-env-0-{number:08d}-{len(part)}-0123abcd.h5"
        write_segment(tmp_path / name, part)
        where |= {episode.id: name for episode in part}
    return episodes, tmp_path, where


def dealt(episodes, where, *, num_ranks=2, **changed):
    train = settings(**changed)
    order = distribute_step(
        episodes,
        train=train,
        num_ranks=num_ranks,
        seed=0,
        step=1,
        max_length=CONTEXT,
        segment_of=lambda episode: where[episode.id],
    )
    return train, order


@pytest.mark.parametrize("num_minibatches", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_the_ranks_together_have_every_row_once(spooled, num_ranks, num_minibatches):
    episodes, spool, where = spooled
    train, made = dealt(episodes, where, num_ranks=num_ranks, num_minibatches=num_minibatches)
    received = msgspec.json.decode(msgspec.json.encode(RankOrder(do="learn", shares=made.shares)), type=RankOrder)
    seen = []
    for share in received.shares:
        assert len(share) == num_minibatches
        parts = load_share_rows(share, fetch=lambda items: fetch_trajectories(items, spool=spool), train=train)
        seen += [row.targets.tolist() for part in parts for row in part]
    expected = [episode.token_ids[1:][episode.loss_mask[1:]].tolist() for episode in episodes]
    assert sorted(seen) == sorted(expected)


def test_an_order_takes_less_than_200_bytes_per_trajectory(spooled):
    episodes, _, where = spooled
    _, made = dealt(episodes, where)
    assert len(msgspec.json.encode(RankOrder(do="learn", shares=made.shares))) < 200 * len(episodes)


def test_overlong_episodes_are_in_no_share_if_the_recipe_filters_them(spooled):
    episodes, _, where = spooled
    lengths = [int(episode.loss_mask.sum()) for episode in episodes]
    budget = sorted(lengths)[6]
    _, kept = dealt(episodes, where)
    _, filtered = dealt(episodes, where, overlong="filter", response_budget={"math": budget})
    ids = {item.id for share in filtered.shares for part in share for item in part}
    assert ids == {episode.id for episode, length in zip(episodes, lengths, strict=True) if length < budget}
    assert sum(len(part) for share in kept.shares for part in share) == len(episodes)


def test_a_reward_that_is_not_a_number_skips_the_step_on_all_ranks(spooled):
    episodes, _, where = spooled
    _, made = dealt([msgspec.structs.replace(episodes[0], reward=float("nan")), *episodes[1:]], where)
    assert made.skipped == "a reward is not finite"
    assert made.shares == [[], []]


def test_a_missing_trajectory_is_an_error_with_its_id(spooled):
    _, spool, where = spooled
    lost = ShareItem(id="math/77/0", credit=[0.0], segment=next(iter(where.values())))
    with pytest.raises(TrainError, match=r"'math/77/0' .* is not where rank 0 found it"):
        fetch_trajectories([lost], spool=spool)
