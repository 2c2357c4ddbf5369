"""Training on episodes of several conversations: a row for each, every token once, rewards as of the whole episode."""

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given

from hpcrl.learn.advantage import compute_advantages, compute_turn_rewards
from hpcrl.learn.batch import (
    compute_row_lengths,
    count_row_tokens,
    divide_rewards,
    make_chosen_rows,
    make_micro_batches,
)
from hpcrl.learn.distribute import distribute_step, load_share_rows
from hpcrl.rollout.agents.episode_record import build_record
from hpcrl.testing.learning import make_rows
from hpcrl.trainers.torch import TorchTrainer
from tests.support.conversations import FACTS, answer, call_trees
from tests.support.learners import CONTEXT, make_model, settings


def episode(*turns, index=0, reward=1.0, group="math/0", choice="all"):
    facts = msgspec.structs.replace(FACTS, id=f"{group}/{index}", group=group, domain="math")
    record = build_record(list(turns), facts, reward=reward, choice=choice)
    return msgspec.structs.replace(record, reward=reward)


def forked(**changed):
    """Return an episode of three turns: one, a separate sub-agent, and one that continues the first."""
    first = answer(0, None, [5, 6], [7, 8])
    aside = answer(1, None, [9], [10, 11, 12])
    last = answer(2, first, [13], [14])
    return episode(first, aside, last, **changed)


def plain(index, *, length=4, reward=0.0):
    return episode(answer(0, None, [1] * 3, [2] * length), index=index, reward=reward)


def rows_of_step(trajectories, *, num_ranks=1, max_length=CONTEXT, **changed):
    """Return the training rows of each rank, and the distributed step."""
    train = settings(**changed)
    dealt = distribute_step(trajectories, train=train, num_ranks=num_ranks, seed=0, step=1, max_length=max_length)
    by_id = {one.id: one for one in trajectories}
    rows = [
        [
            row
            for part in load_share_rows(share, fetch=lambda items: [by_id[i.id] for i in items], train=train)
            for row in part
        ]
        for share in dealt.shares
    ]
    return rows, dealt


@given(call_trees())
def test_every_token_is_trained_once_and_from_what_the_model_saw(turns):
    record = episode(*turns)
    rows, _ = make_rows([record], credits=[[float(turn.number) for turn in turns] or [0.0]], max_length=10**6)
    trained = Counter()
    for row in rows:
        for position, (target, logprob, credit) in zip(
            np.flatnonzero(row.mask), zip(row.targets, row.behaviour, row.credit, strict=True), strict=True
        ):
            trained[tuple(row.inputs[: position + 1].tolist()), int(target), float(logprob), float(credit)] += 1
    expected = Counter()
    for turn in turns:
        prompt, generated = turn.prompt.token_ids(), turn.completion.token_ids
        for position, (token, logprob) in enumerate(zip(generated, turn.completion.logprobs, strict=True)):
            before = (*prompt, *generated[:position])
            if turn.is_trained and before:  # nothing predicts the first token of a text
                expected[before, token, logprob, float(turn.number)] += 1
    assert trained == expected


@given(call_trees())
def test_lengths_and_tokens_of_rows_are_known_before_they_are_made(turns):
    record = episode(*turns)
    lengths = []
    for number in range(max(len(record.rows), 1)):
        (row,) = make_chosen_rows(record, [(number, [0.0] * (len(turns) or 1))], place_credit=lambda c, t: c[t])
        lengths.append((len(row), len(row.targets)))
    assert list(zip(compute_row_lengths(record), count_row_tokens(record), strict=True)) == lengths


def test_the_advantage_of_an_episode_is_that_of_all_its_rows():
    ((*rows,),), _ = rows_of_step([forked(), plain(1), plain(2), plain(3)], advantage="dr-grpo")
    credits = {tuple(row.targets.tolist()): set(row.credit.tolist()) for row in rows}
    assert credits[7, 8, 14] == credits[10, 11, 12] == {0.75}
    assert credits[2, 2, 2, 2] == {-0.25}


def test_ranks_share_the_rows_of_one_episode():
    turns = [answer(number, None, [number + 3], [1] * 10) for number in range(4)]
    ranks, dealt = rows_of_step([episode(*turns), plain(1, length=1)], num_ranks=2)
    assert [len(rows) for rows in ranks] in ([3, 2], [2, 3])
    assert sorted(row.inputs[0] for rows in ranks for row in rows if len(row) > 9) == [3, 4, 5, 6]
    assert {(item.id, item.row) for share in dealt.shares for part in share for item in part} == {
        *(("math/0/0", number) for number in range(4)),
        ("math/0/1", 0),
    }


def test_a_row_that_does_not_fit_is_left_out_and_the_episode_is_not():
    ((*rows,),), dealt = rows_of_step([forked(), plain(1)], max_length=4, advantage="dr-grpo")
    assert sorted(tuple(row.targets.tolist()) for row in rows) == [(10, 11, 12)]
    assert (dealt.num_too_long, dealt.too_long_tokens) == (2, {"math": 3 + 4})


def test_a_sequence_is_a_row():
    rows, _ = make_rows([forked()], credits=[[0.0] * 3], max_length=99)
    (batch,) = make_micro_batches(rows, tokens_per_micro_batch=99)
    assert batch.num_sequences == 2


@pytest.mark.parametrize("choice", ["longest", "last"])
def test_one_conversation_is_one_row(choice):
    ((*rows,),), dealt = rows_of_step([forked(choice=choice), plain(1)], advantage="dr-grpo")
    assert sorted(tuple(row.targets.tolist()) for row in rows) == [(2, 2, 2, 2), (7, 8, 14)]
    assert dealt.num_too_long == 0


def test_a_critic_sees_the_rewards_of_the_whole_episode_in_each_row():
    record = forked(reward=3.0)
    assert compute_turn_rewards(record).tolist() == [0.0, 0.0, 3.0]
    aside, main = divide_rewards(record, np.array([1.0, 2.0, 4.0]))
    assert aside.tolist() == [2.0 + 4.0], "what came after it is its return"
    assert main.tolist() == [1.0 + 2.0, 4.0], "the sub-agent answered between the two turns"


def test_turns_are_compared_in_the_order_of_their_answers():
    better, worse = forked(reward=1.0), forked(index=1, reward=0.0)
    advantages = compute_advantages([better, worse], advantage="trloo", gamma=0.5)
    assert [each.tolist() for each in advantages] == [[0.25, 0.5, 1.0], [-0.25, -0.5, -1.0]]


def test_the_score_belongs_to_the_last_turn_that_is_trained():
    record = msgspec.structs.replace(forked(choice="longest"), reward=2.0)
    masked = [msgspec.structs.replace(turn, masked="choice" if turn.row else "") for turn in record.turns]
    assert compute_turn_rewards(msgspec.structs.replace(record, turns=masked)).tolist() == [0.0, 0.0, 2.0]


def test_a_step_reports_episodes_and_rows(tmp_path):
    trainer = TorchTrainer(make_model(tmp_path / "m"), settings(learning_rate=1e-3), seed=3)
    metrics = trainer.train_step([forked(), plain(1), plain(2)], step=1, version=1)
    assert metrics.skipped is None
    assert (metrics.num_trajectories, metrics.num_groups, metrics.num_rows) == (3, 1, 4)
    assert metrics.num_tokens == 6 + 4 + 4
    assert metrics.reward_mean == pytest.approx(1 / 3)
