"""The rows of an agent program's episode: every generated token is trained once, as the engine generated it."""

import itertools
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.learn.batch import compute_row_lengths, count_row_tokens
from hpcrl.rollout.agents.episode_record import build_record, measure_engines_s
from hpcrl.spool.record import attach_columns, pack_trajectory, parse_facts, sum_phase_times
from hpcrl.spool.routed_experts import find_known_tokens
from hpcrl.spool.rows import count_by_fate, expand_row, list_placed_turns, list_row_turns
from hpcrl.spool.token_fates import measure_trained_share
from hpcrl.traj.verify import record_error
from tests.support.conversations import FACTS, answer, call_trees
from tests.support.reported_experts import choose_by_prefix, report_experts


def generated(turns):
    return Counter(
        values
        for turn in turns
        for values in zip(turn.completion.token_ids, turn.completion.logprobs, turn.completion.versions, strict=True)
    )


def in_the_loss(rows):
    columns = [(row.token_ids, row.logprobs, row.versions) for row in rows]
    masks = [row.loss_mask for row in rows]
    return Counter(
        values
        for row, mask in zip(columns, masks, strict=True)
        for values in zip(*(column[mask].tolist() for column in row), strict=True)
    )


def with_logprobs(turn, *, logprobs, has_form, num_free=0):
    """Return the turn with other log-probabilities, as an answer whose form was or was not required after free text."""
    completion = msgspec.structs.replace(turn.completion, logprobs=logprobs)
    free = [place < num_free for place in range(len(logprobs))]
    return replace(turn, completion=completion, find_free=(lambda: free) if has_form else None)


def store(turns, *, choice):
    """Return the record as a reader gets it, and its rows."""
    packed = pack_trajectory(build_record(turns, FACTS, reward=1.0, choice=choice))
    record = attach_columns(parse_facts(packed.facts), packed.columns)
    return record, [expand_row(record, number) for number in range(max(len(record.rows), 1))]


@given(call_trees())
def test_every_generated_token_is_in_the_loss_once(turns):
    record, rows = store(turns, choice="all")
    assert in_the_loss(rows) == generated(turn for turn in turns if turn.is_trained)
    fates = count_by_fate(record)
    assert fates["trained"] == sum(int(row.loss_mask.sum()) for row in rows)
    assert fates["sampling"] == sum(len(turn.completion.token_ids) for turn in turns if not turn.is_trained)


@given(call_trees(), st.sampled_from(["all", "longest", "last"]))
def test_every_row_is_what_the_engine_saw_and_answered(turns, choice):
    record, rows = store(turns, choice=choice)
    continued = {turn.prompt.parent for turn in turns}
    leaves = sorted(turn.token_ids() for turn in turns if turn not in continued)
    assert sorted(row.token_ids.tolist() for row in rows) == (leaves or [[]])
    for row, placed in zip(rows, list_placed_turns(record), strict=True):
        for number, start, end in placed:
            assert row.token_ids[:start].tolist() == turns[number].prompt.token_ids()
            assert row.token_ids[start:end].tolist() == turns[number].completion.token_ids
    assert sorted(itertools.chain(*list_row_turns(record))) == list(range(len(turns)))


@given(call_trees(), st.sets(st.integers(0, 7)))
def test_every_row_has_the_experts_of_its_tokens_but_of_those_that_no_later_turn_read(turns, silent):
    """An engine may report none with some turns, as where a stream ended early; the next turn then asks for them."""
    renewed, reports = {}, {}
    for turn in turns:
        prompt = replace(turn.prompt, parent=renewed.get(turn.prompt.parent))
        spans = [] if turn.number in silent else report_experts(turn.token_ids(), prompt.num_read)
        renewed[turn] = replace(turn, prompt=prompt, completion=msgspec.structs.replace(turn.completion, experts=spans))
        reports[turn.number] = [span.end for span in spans]
    record, rows = store(list(renewed.values()), choice="all")
    if not any(reports.values()):
        assert record.experts is None
        return
    for row, placed in zip(rows, list_placed_turns(record), strict=True):
        num_known = max((end for number, _, _ in placed for end in reports[number]), default=0)
        known = find_known_tokens(row.experts)
        assert known[:num_known].all()
        np.testing.assert_array_equal(row.experts[known], choose_by_prefix(row.token_ids)[known])
        if not silent:
            assert known.sum() >= len(row) - 1


@given(call_trees(), st.sampled_from(["longest", "last"]))
def test_one_conversation_is_one_row_whatever_else_was_generated(turns, choice):
    _, rows = store(turns, choice=choice)
    assert not any(row.loss_mask.any() for row in rows[1:])
    if turns:
        paths = [turn.path() for turn in turns]
        assert in_the_loss(rows) in [generated(turn for turn in path if turn.is_trained) for path in paths]


def test_a_history_rendered_again_for_each_turn_is_stored_once():
    """The thoughts (7) leave the history: each prompt is the one before, the answer (8) and a new question (9)."""
    turns, prompt = [], [5] * 200
    for number in range(50):
        turns.append(answer(number, None, list(prompt), [7] * 20 + [8]))
        prompt += [8] + [9] * 3
    record, rows = store(turns, choice="all")
    assert len(record) == 200 + 50 * 21 + 49 * 4
    assert [row.loss_mask.sum() for row in rows] == [21] * 50


def test_conversations_side_by_side_share_their_beginnings_too():
    main, sub = [1] * 100, [2] * 100
    turns = [answer(number, None, [*(sub if number % 2 else main), number], [9]) for number in range(20)]
    record, _ = store(turns, choice="all")
    assert len(record) == 2 * 100 + 20 * 2


@pytest.mark.parametrize(("choice", "rewards"), [("all", [0, 0, 1]), ("longest", [0, 1, 0]), ("last", [0, 0, 1])])
def test_the_reward_is_that_of_the_last_turn_that_is_trained(choice, rewards):
    turns = [answer(0, None, [1], [2, 2]), answer(1, None, [1], [3] * 3), answer(2, None, [1], [4])]
    assert [turn.reward for turn in build_record(turns, FACTS, reward=1.0, choice=choice).turns] == rewards


def test_a_step_lasts_until_the_next_request():
    first = answer(0, None, [1], [2], started_at=11.0, generate_s=1.0)
    aside = answer(1, None, [5], [6], started_at=12.5, generate_s=1.0)
    last = answer(2, first, [3], [4], started_at=15.0, generate_s=1.0)
    record = build_record([first, aside, last], FACTS, reward=1.0, choice="all")
    assert [turn.step_s for turn in record.turns] == [0.5, 1.5, 4.0]
    assert record.reset_s == 1.0


def test_calls_at_the_same_time_and_the_step_after_them_count_once():
    """Seven calls of two seconds each, then six seconds without a call."""
    turns = [answer(number, None, [1], [2], started_at=12.0, generate_s=2.0) for number in range(7)]
    record = build_record(turns, FACTS, reward=1.0, choice="all")
    assert [turn.generate_s for turn in record.turns] == [2.0] * 7
    assert sum_phase_times(record) == {"generate": 2.0, "step": 6.0, "reset": 2.0}
    assert measure_engines_s(turns) == 2.0


@given(st.lists(st.tuples(st.integers(10, 20), st.integers(0, 10), st.booleans()), min_size=1, max_size=8))
def test_the_times_of_an_episode_add_up_to_the_time_that_it_took(calls):
    turns = []
    for number, (started_at, seconds, continues) in enumerate(calls):
        parent = turns[-1] if turns and continues else None
        generate_s = float(min(seconds, 20 - started_at))
        turns.append(answer(number, parent, [1], [2], started_at=float(started_at), generate_s=generate_s))
    record = build_record(turns, FACTS, reward=1.0, choice="all")
    assert sum(sum_phase_times(record).values()) == 10
    assert all(0 <= turn.overlap_s <= turn.generate_s and turn.step_s >= 0 for turn in record.turns)


def test_versions_are_those_of_what_is_trained():
    turns = [answer(2, None, [1], [2] * 9), answer(0, None, [1], [3])]
    assert build_record(turns, FACTS, reward=1.0, choice="all").start_version == 0
    assert build_record(turns, FACTS, reward=1.0, choice="longest").start_version == 2


def test_tokens_that_the_required_form_decided_are_not_trained_and_are_counted():
    turn = with_logprobs(answer(0, None, [7], [1, 2, 3]), logprobs=[0.0, -0.5, 0.0], has_form=True)
    record, (row,) = store([turn], choice="all")
    assert row.loss_mask.tolist() == [False, False, True, False]
    assert record.turns[0].num_forced == 2
    assert count_by_fate(record) == Counter(trained=1, forced=2)
    assert measure_trained_share(count_by_fate(record)) == 1.0
    assert record_error(record, is_scored=False) is None
    assert (compute_row_lengths(record), count_row_tokens(record)) == ([2], [1])


def test_a_certain_token_of_a_free_part_before_the_form_is_trained():
    turn = with_logprobs(answer(0, None, [7], [1, 2, 3]), logprobs=[0.0, -0.5, 0.0], has_form=True, num_free=2)
    record, (row,) = store([turn], choice="all")
    assert row.loss_mask.tolist() == [False, True, True, False]
    assert count_by_fate(record) == Counter(trained=2, forced=1)


def test_a_certain_token_of_a_free_answer_is_trained():
    turn = with_logprobs(answer(0, None, [7], [1, 2]), logprobs=[0.0, -0.5], has_form=False)
    record, (row,) = store([turn], choice="all")
    assert row.loss_mask.tolist() == [False, True, True]
    assert record.turns[0].num_forced == 0


@given(call_trees(), st.randoms(use_true_random=False))
def test_rows_are_measured_as_they_are_made_whatever_was_forced(turns, random):
    replaced = {}
    for turn in turns:  # a parent comes before those that continue it
        logprobs = [random.choice([0.0, -1.0]) for _ in turn.completion.token_ids]
        parent = replaced.get(turn.prompt.parent)
        turn_again = replace(turn, prompt=replace(turn.prompt, parent=parent))
        replaced[turn] = with_logprobs(turn_again, logprobs=logprobs, has_form=random.random() < 0.7)
    record, rows = store(list(replaced.values()), choice="all")
    made = [np.flatnonzero(row.loss_mask[1:]) for row in rows]
    assert count_row_tokens(record) == [len(positions) for positions in made]
    assert compute_row_lengths(record) == [int(positions[-1]) + 1 if len(positions) else 0 for positions in made]
    assert record_error(record, is_scored=False) is None
