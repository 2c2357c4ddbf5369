"""Rows of a record: what several conversations share is stored once, and each comes back as the model saw it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import SpoolError
from hpcrl.spool.record import ConversationRow, EpisodeTurn, attach_columns, pack_trajectory, parse_facts
from hpcrl.spool.rows import count_by_fate, expand_row, list_placed_turns, list_row_turns, list_spans
from hpcrl.spool.segment import read_segment
from tests.support.trajectories import make_trajectory

OLD_SEGMENTS = Path(__file__).parents[1] / "campaign_dir" / "old_campaign" / "spools" / "scored"


def trajectory(num_tokens=8, **changed):
    columns = {
        "turns": [],
        "token_ids": np.arange(num_tokens) + 100,
        "logprobs": -np.arange(num_tokens),
        "versions": np.arange(num_tokens),
    }
    return make_trajectory("math/0/1", num_tokens, **{**columns, **changed})


FORKED = {
    "rows": [ConversationRow(end=4), ConversationRow(end=6, parent=0, shares=3), ConversationRow(end=8)],
    "turns": [
        EpisodeTurn(start=1, end=2),
        EpisodeTurn(start=7, end=8, row=2, masked="choice"),
        EpisodeTurn(start=3, end=4),
        EpisodeTurn(start=4, end=6, row=1),
    ],
}


def test_rows_come_back_with_the_tokens_that_they_share():
    stored = pack_trajectory(trajectory(**FORKED))
    again = attach_columns(parse_facts(stored.facts), stored.columns)
    rows = [expand_row(again, number) for number in range(3)]
    assert [row.token_ids.tolist() for row in rows] == [
        [100, 101, 102, 103],
        [100, 101, 102, 104, 105],
        [106, 107],
    ]
    assert rows[1].loss_mask.tolist() == [False, False, False, True, True]
    assert rows[1].versions.tolist() == [0, 1, 2, 4, 5]
    assert rows[1].logprobs.tolist() == [0, -1, -2, -4, -5]


def test_each_turn_is_trained_in_one_row_and_shown_in_all_that_share_it():
    forked = trajectory(**FORKED)
    assert list_row_turns(forked) == [[0, 2], [3], [1]]
    assert list_placed_turns(forked) == [[(0, 1, 2), (2, 3, 4)], [(0, 1, 2), (3, 3, 5)], [(1, 1, 2)]]
    assert count_by_fate(forked) == {"trained": 4, "choice": 1}


def test_a_record_without_rows_is_one_row():
    plain = trajectory(turns=[EpisodeTurn(start=1, end=2), EpisodeTurn(start=5, end=8)])
    assert [span.num_tokens for span in list_spans(plain)] == [8]
    assert expand_row(plain, 0).token_ids is plain.token_ids
    assert list_row_turns(plain) == [[0, 1]]


def test_records_of_the_first_schema_are_one_row():
    (path,) = OLD_SEGMENTS.iterdir()
    assert b'"schema":[1,0]' in path.read_bytes()[:2048]
    for old in read_segment(path):
        assert expand_row(old, 0).token_ids.tolist() == old.token_ids.tolist()
        assert count_by_fate(old) == {"trained": np.count_nonzero(old.loss_mask)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": [ConversationRow(end=7)]},
        {"rows": [ConversationRow(end=9)]},
        {"rows": [ConversationRow(end=6), ConversationRow(end=5), ConversationRow(end=8)]},
        {"rows": [ConversationRow(end=4, parent=0), ConversationRow(end=8)]},
        {"rows": [ConversationRow(end=4), ConversationRow(end=8, parent=-2)]},
        {"rows": [ConversationRow(end=4), ConversationRow(end=8, parent=0, shares=5)]},
        {"rows": [ConversationRow(end=4), ConversationRow(end=8, shares=1)]},
        {"rows": FORKED["rows"], "turns": [EpisodeTurn(start=3, end=5)]},
        {"rows": FORKED["rows"], "turns": [EpisodeTurn(start=7, end=9, row=2)]},
        {"rows": FORKED["rows"], "turns": [EpisodeTurn(start=-1, end=2)]},
        {"rows": FORKED["rows"], "turns": [EpisodeTurn(start=7, end=8, row=3)]},
    ],
    ids=[
        "short",
        "long",
        "back",
        "itself",
        "negative",
        "too much",
        "no parent",
        "across",
        "outside",
        "before",
        "no row",
    ],
)
def test_rows_that_do_not_fit_the_columns_are_refused(wrong):
    with pytest.raises(SpoolError, match=r"'math/0/1': .*(row|columns)"):
        pack_trajectory(trajectory(**wrong))


@st.composite
def row_trees(draw):
    """Rows as lists of tokens, each the start of an earlier row and new tokens; and their record."""
    rows, whole, end = [], [], 0
    for number in range(draw(st.integers(1, 6))):
        parent = draw(st.integers(-1, number - 1))
        shares = draw(st.integers(0, len(whole[parent]))) if parent >= 0 else 0
        num_own = draw(st.integers(0, 4))
        before = whole[parent][:shares] if parent >= 0 else []
        whole.append(before + list(range(end, end + num_own)))
        end += num_own
        rows.append(ConversationRow(end=end, parent=parent, shares=shares))
    return whole, trajectory(end, rows=rows, token_ids=np.arange(end, dtype=np.int32))


@given(row_trees())
def test_every_row_is_the_start_of_its_parent_and_its_own_tokens(tree):
    whole, record = tree
    stored = pack_trajectory(record)
    again = attach_columns(parse_facts(stored.facts), stored.columns)
    expanded = [expand_row(again, number) for number in range(len(whole))]
    assert [row.token_ids.tolist() for row in expanded] == whole
    assert [span.num_tokens for span in list_spans(again)] == list(map(len, whole))
    trained = [token for row in expanded for token in row.token_ids[row.loss_mask].tolist()]
    assert sorted(trained) == list(range(len(record)))
