"""The choice of groups, the shift by one token, and padding."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.learn.batch import (
    compute_row_lengths,
    count_row_tokens,
    credit_last_token,
    empty_micro_batch,
    make_chosen_rows,
    make_micro_batches,
    make_packed_batches,
    pad_to_length,
    spread_credit,
)
from hpcrl.learn.group_choice import choose_groups
from hpcrl.spool.record import EpisodeTurn
from hpcrl.testing.learning import make_rows
from tests.support.trajectories import make_trajectory


def trajectory(group="math/0", index=0, *, tokens=(1, 2, 3, 4), generated=(False, False, True, True), **changed):
    """Make a short trajectory whose token t has log-prob -t/10."""
    columns = {"token_ids": tokens, "logprobs": -np.arange(len(tokens)) / 10, "loss_mask": generated}
    return make_trajectory(f"{group}/{index}", **{**columns, "turns": [], "reward": 1.0, **changed})


def group(name, *, size=4, **changed):
    return [trajectory(name, index, **changed) for index in range(size)]


def choose(available, **changed):
    wanted = {"groups_per_step": 1, "group_size": 4, "version": 0, "max_lag": 1, "consumed": set()}
    return choose_groups(available, **{**wanted, **changed})


def ids(trajectories):
    return [trajectory.id for trajectory in trajectories]


def test_nothing_is_chosen_until_there_are_enough_complete_groups():
    available = group("math/0") + group("math/1", size=3)
    choice = choose(available, groups_per_step=2)
    assert (choice.chosen, choice.stale, choice.flat) == ([], [], [])
    assert sorted(ids(choice.rest)) == sorted(ids(available))


def test_the_oldest_complete_group_is_chosen_and_the_others_wait():
    young, old, partial = group("math/0", created=9.0), group("math/1", created=5.0), group("math/2", size=3)
    choice = choose(young + old + partial)
    assert ids(choice.chosen) == ids(old)
    assert set(ids(choice.rest)) == set(ids(young + partial))


def test_a_group_started_on_older_weights_comes_before_one_that_ended_earlier():
    behind, ahead = group("math/0", created=9.0), group("math/1", created=5.0, start_version=1)
    assert ids(choose(ahead + behind, version=1).chosen) == ids(behind)


@pytest.mark.parametrize(("version", "is_stale"), [(3, False), (4, False), (5, True)])
def test_a_trajectory_is_stale_when_it_started_more_than_max_lag_versions_ago(version, is_stale):
    choice = choose(group("math/0", start_version=3), version=version, max_lag=1)
    assert (len(choice.stale), len(choice.chosen)) == ((4, 0) if is_stale else (0, 4))


def test_consumed_trajectories_are_never_seen_again():
    old = group("math/0")
    assert choose(old, consumed=set(ids(old))) == ([], [], [], [])


def test_the_late_twin_of_an_episode_does_not_fill_its_group():
    available = [*group("math/0", size=3), trajectory("math/0", 2, created=7.0)]
    choice = choose(available)
    assert choice.chosen == []
    assert len(choice.rest) == 3


def uneven(name, **changed):
    """Make a group of which the first episode alone is rewarded."""
    return [trajectory(name, index, reward=float(index == 0), **changed) for index in range(4)]


def is_flat_reward(members):
    return len({one.reward for one in members}) == 1


def test_flat_groups_are_dropped_and_others_take_their_place():
    available = [*group("math/0"), *uneven("math/1", created=1.0), *group("math/2", created=2.0), *uneven("math/3")]
    choice = choose(available, groups_per_step=2, is_flat_group=is_flat_reward)
    assert set(ids(choice.chosen)) == {f"math/{number}/{index}" for number in (1, 3) for index in range(4)}
    assert set(ids(choice.flat)) == {f"math/{number}/{index}" for number in (0, 2) for index in range(4)}
    assert choice.rest == []


def test_a_step_waits_for_the_groups_that_replace_flat_ones():
    choice = choose([*group("math/0"), *uneven("math/1")], groups_per_step=2, is_flat_group=is_flat_reward)
    assert choice.chosen == []
    assert set(ids(choice.rest)) == set(ids(uneven("math/1")))


def test_a_group_that_is_not_whole_is_not_flat_yet():
    choice = choose(group("math/0", size=3), is_flat_group=is_flat_reward)
    assert choice.flat == []
    assert len(choice.rest) == 3


def test_episodes_beyond_the_group_size_are_stale_and_the_first_ones_are_kept():
    six = [trajectory("math/0", index, created=float(-index)) for index in range(6)]
    choice = choose(six)
    assert ids(choice.chosen) == [f"math/0/{index}" for index in (5, 4, 3, 2)]
    assert ids(choice.stale) == [f"math/0/{index}" for index in (1, 0)]


@pytest.mark.parametrize("changed", [{"status": "env-fault"}, {"status": "aborted-stale"}, {"reward": float("nan")}])
def test_a_group_with_an_episode_that_cannot_be_trained_on_is_dropped(changed):
    bad = trajectory("math/0", 3, **changed)
    choice = choose([*group("math/0", size=3), bad, *group("math/1")])
    assert set(ids(choice.stale)) == {f"math/0/{index}" for index in range(4)}
    assert set(ids(choice.chosen)) == {f"math/1/{index}" for index in range(4)}


def test_later_members_of_a_lost_group_are_dropped_too():
    first = choose([trajectory("math/0", 3, status="env-fault"), trajectory("math/0", 0)])
    assert first.stale == []
    later = choose([*first.rest, trajectory("math/0", 1), trajectory("math/0", 2)])
    assert (len(later.stale), later.rest) == (4, [])


def test_a_trajectory_that_is_too_old_does_not_wait_for_the_rest_of_its_group():
    old = trajectory("math/0", 3, status="env-fault", start_version=0)
    assert choose([old], version=2, max_lag=1).stale == [old]


def test_an_unscored_episode_waits():
    unscored = trajectory("math/0", 3, reward=None)
    choice = choose([*group("math/0", size=3), unscored])
    assert (choice.chosen, choice.stale) == ([], [])
    assert unscored in choice.rest


@settings(deadline=None)
@given(st.data())
def test_every_trajectory_ends_in_one_list_whatever_the_order(data):
    episodes = data.draw(
        st.lists(
            st.builds(
                trajectory,
                st.sampled_from([f"math/{number}" for number in range(4)]),
                st.integers(0, 5),
                start_version=st.integers(0, 3),
                created=st.sampled_from([0.0, 1.0, 2.0]),
                reward=st.sampled_from([None, 0.0, 1.0]),
            ),
            max_size=40,
            unique_by=lambda episode: episode.id,
        )
    )
    consumed = {episode.id for episode in episodes if episode.id.endswith("/5")}
    first, second = (
        choose(order, groups_per_step=2, group_size=2, version=3, max_lag=2, consumed=consumed)
        for order in (episodes, random.Random(1).sample(episodes, len(episodes)))
    )
    assert [ids(part) for part in first] == [ids(part) for part in second]
    assert sorted(ids([*first.chosen, *first.stale, *first.rest])) == sorted(
        {episode.id for episode in episodes} - consumed
    )
    assert len(first.chosen) in (0, 4)


def test_each_position_predicts_the_next_token():
    rows, _ = make_rows([trajectory(tokens=(5, 6, 7, 8), generated=(0, 1, 0, 1))], credits=[[2.5]], max_length=9)
    (row,) = rows
    assert row.inputs.tolist() == [5, 6, 7]
    assert row.mask.tolist() == [True, False, True]
    assert row.targets.tolist() == [6, 8]
    np.testing.assert_allclose(row.behaviour, [-0.1, -0.3])
    assert row.credit.tolist() == [2.5, 2.5]


def test_tokens_after_the_last_model_token_are_cut():
    rows, _ = make_rows([trajectory(tokens=(5, 6, 7, 8), generated=(0, 1, 0, 0))], credits=[[1.0]], max_length=9)
    assert rows[0].inputs.tolist() == [5]


def test_a_trajectory_without_model_tokens_has_no_row():
    without_model_tokens = [
        trajectory(generated=(0, 0, 0, 0)),
        trajectory(generated=(1, 0, 0, 0)),
        trajectory(tokens=(), generated=()),
    ]
    assert make_rows(without_model_tokens, credits=[[1.0]] * 3, max_length=9) == ([], 0)


def test_trajectories_longer_than_the_context_are_left_out_and_counted():
    rows, num_too_long = make_rows([trajectory(), trajectory()], credits=[[1.0], [1.0]], max_length=2)
    assert (rows, num_too_long) == ([], 2)


def random_trajectories(seed, *, count=30):
    rng = np.random.default_rng(seed)
    for index in range(count):
        length = int(rng.integers(2, 40))
        tokens, generated = rng.integers(0, 50, length), rng.random(length) < 0.5
        yield trajectory(
            "math/0", index, tokens=tokens, generated=generated, logprobs=-rng.random(length).astype(np.float32)
        )


@pytest.mark.parametrize("bound", [1, 50, 128, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_hold_every_model_token_once_within_the_bound(seed, bound):
    episodes = list(random_trajectories(seed))
    rows, _ = make_rows(episodes, credits=[[index] for index in range(len(episodes))], max_length=99)
    batches = make_micro_batches(rows, tokens_per_micro_batch=bound)
    seen = []
    for batch in batches:
        assert batch.num_padded_tokens <= bound or len(batch.inputs_BT) == 1
        assert batch.num_tokens == batch.mask_BT.sum()
        columns = (batch.targets_N, batch.behaviour_N, batch.advantages_N)
        seen += zip(*(column.tolist() for column in columns), strict=True)
    expected = [
        (int(episode.token_ids[t]), float(episode.logprobs[t]), float(advantage))
        for advantage, episode in enumerate(episodes)
        for t in range(1, len(episode))
        if episode.loss_mask[t]
    ]
    assert sorted(seen) == sorted(expected)


def test_each_model_token_follows_its_own_past():
    episodes = list(random_trajectories(7))
    rows, _ = make_rows(episodes, credits=[[0.0]] * len(episodes), max_length=99)
    pasts = {(*episode.token_ids[:t].tolist(),) for episode in episodes for t in np.flatnonzero(episode.loss_mask) if t}
    for batch in make_micro_batches(rows, tokens_per_micro_batch=200):
        for row, position in batch.mask_BT.nonzero().tolist():
            assert (*batch.inputs_BT[row, : position + 1].tolist(),) in pasts


def shapes(lengths, *, bound):
    episodes = [trajectory(tokens=[1] * (n + 1), generated=[0] + [1] * n) for n in lengths]
    rows, _ = make_rows(episodes, credits=[[0.0]] * len(lengths), max_length=99)
    return [tuple(batch.inputs_BT.shape) for batch in make_micro_batches(rows, tokens_per_micro_batch=bound)]


def test_rows_of_similar_length_share_a_micro_batch():
    assert shapes([30, 3, 29, 4, 31, 2], bound=93) == [(3, 31), (3, 4)]


def test_a_well_filled_micro_batch_refuses_a_row_that_needs_much_padding():
    assert shapes([20, 20, 16, 10], bound=400) == [(3, 20), (1, 10)]


def test_a_small_micro_batch_accepts_any_row():
    assert shapes([20, 2, 1], bound=400) == [(3, 20)]


def test_no_rows_give_no_micro_batches():
    assert make_micro_batches([], tokens_per_micro_batch=10) == []


def two_turns():
    """Return a trajectory with model tokens 1 and 2 in the first turn and 4 in the second."""
    turns = [EpisodeTurn(start=1, end=3), EpisodeTurn(start=4, end=5)]
    return trajectory(tokens=(5, 6, 7, 8, 9), generated=(0, 1, 1, 0, 1), turns=turns)


def test_every_token_of_a_turn_gets_the_credit_of_the_turn():
    (row,), _ = make_rows([two_turns()], credits=[[2.0, -1.0]], max_length=9)
    assert row.credit.tolist() == [2.0, 2.0, -1.0]


def test_a_reward_is_placed_at_the_last_token_of_its_turn():
    (row,), _ = make_rows([two_turns()], credits=[[2.0, -1.0]], max_length=9, place_credit=credit_last_token)
    assert row.credit.tolist() == [0.0, 2.0, -1.0]


def test_the_reward_of_a_turn_without_tokens_is_not_lost():
    turns = [EpisodeTurn(start=1, end=2), EpisodeTurn(start=3, end=3), EpisodeTurn(start=3, end=3)]
    episode = trajectory(tokens=(5, 6, 7), generated=(0, 1, 0), turns=turns)
    (row,), _ = make_rows([episode], credits=[[1.0, 2.0, 4.0]], max_length=9, place_credit=credit_last_token)
    assert row.credit.tolist() == [7.0]


WITHOUT_MODEL_TOKENS = trajectory(generated=(0, 0, 0, 0))
EMPTY = trajectory(tokens=(), generated=())


@pytest.mark.parametrize("episode", [two_turns(), trajectory(), WITHOUT_MODEL_TOKENS, EMPTY])
def test_length_and_tokens_are_known_before_the_row_is_made(episode):
    rows, _ = make_rows([episode], credits=[[1.0] * max(len(episode.turns), 1)], max_length=9)
    assert sum(compute_row_lengths(episode)) == sum(map(len, rows))
    assert sum(count_row_tokens(episode)) == sum(len(row.targets) for row in rows)


def test_each_token_has_the_index_of_its_row():
    episodes = list(random_trajectories(3))
    rows, _ = make_rows(episodes, credits=[[0.0]] * len(episodes), max_length=99)
    for batch in make_micro_batches(rows, tokens_per_micro_batch=200):
        assert batch.rows_N.tolist() == batch.mask_BT.nonzero()[:, 0].tolist()
        assert batch.num_sequences == len(batch.inputs_BT)


def test_an_empty_micro_batch_has_no_model_tokens():
    batch = empty_micro_batch()
    assert (batch.num_tokens, batch.num_sequences, batch.num_padded_tokens) == (0, 0, 1)


def make_expert_rows(*, dtype):
    """Make rows of three lengths; the second has no experts, and token t of the others the experts t and t + 1."""
    rows = []
    for length in (11, 10, 9):
        numbers = np.arange(length)[:, None, None] + np.array([[[0, 1], [1, 0]]])
        experts = None if length == 10 else numbers.astype(dtype)
        one = trajectory(tokens=tuple(range(length)), generated=(False, *[True] * (length - 1)), experts=experts)
        rows += make_chosen_rows(one, [(0, [1.0])], place_credit=spread_credit)
    return rows


@pytest.mark.parametrize(("dtype", "kind", "none"), [(np.uint8, "uint8", 255), (np.uint16, "int16", -1)])
def test_experts_are_those_of_the_input_tokens_and_padding_has_no_choice(dtype, kind, none):
    rows = make_expert_rows(dtype=dtype)
    (padded,) = make_micro_batches(rows, tokens_per_micro_batch=30)
    (packed,) = make_packed_batches(rows, tokens_per_micro_batch=30)
    grown = pad_to_length(padded, length=13)
    assert grown.inputs_BT.shape == grown.mask_BT.shape == (3, 13)
    for micro, ends in ((padded, (10, 9, 8)), (grown, (10, 9, 8)), (packed, (27,))):
        experts_BTLK = micro.experts_BTLK
        assert str(experts_BTLK.dtype) == f"torch.{kind}"
        assert experts_BTLK.shape == (*micro.inputs_BT.shape, 2, 2)
        first_BT, second_BT = experts_BTLK[..., 0, 0], experts_BTLK[..., 0, 1]
        for row, end in enumerate(ends):
            known_T = first_BT[row] != none
            assert not known_T[end:].any()
            assert (first_BT[row][known_T] == micro.inputs_BT[row][known_T]).all()
            assert (second_BT[row][known_T] == micro.inputs_BT[row][known_T] + 1).all()
        assert int((first_BT != none).sum()) == 10 + 8
        assert (experts_BTLK[experts_BTLK[..., 0, 0] == none] == none).all()


def test_micro_batches_without_experts_have_none_and_others_keep_them_in_host_memory():
    (bare,) = make_micro_batches(make_expert_rows(dtype=np.uint8)[1:2], tokens_per_micro_batch=30)
    assert bare.experts_BTLK is None
    assert pad_to_length(bare, length=12).experts_BTLK is None
    assert empty_micro_batch().experts_BTLK is None
    (micro,) = make_micro_batches(make_expert_rows(dtype=np.uint8), tokens_per_micro_batch=30)
    moved = micro.to("meta")
    assert moved.inputs_BT.device.type == "meta"
    assert moved.experts_BTLK is micro.experts_BTLK
