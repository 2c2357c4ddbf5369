"""The record of an episode keeps its values exactly, and refuses bad ones before anything is acknowledged."""

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import SpoolError
from hpcrl.spool.record import EpisodeTurn, attach_columns, pack_trajectory, parse_facts
from tests.support.trajectories import make_trajectory


def trajectory(num_tokens=4, **changed):
    turns = [EpisodeTurn(start=1, end=num_tokens, reward=0.5)]
    return make_trajectory("math/0/1", num_tokens, **{"turns": turns, "start_version": 2, "end_version": 3, **changed})


def stored_facts(record):
    return parse_facts(pack_trajectory(record).facts)


FLOATS = st.floats()
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    text=TEXT,
    seed=st.integers(),
    number=FLOATS,
    reward=st.none() | FLOATS,
    parts=st.dictionaries(TEXT, FLOATS, max_size=3),
)
def test_facts_come_back_as_they_were(text, seed, number, reward, parts):
    turns = [
        EpisodeTurn(start=0, end=1, reward=number, step_s=number),
        EpisodeTurn(start=1, end=4, remote_prefill=True),
    ]
    record = trajectory(id=text, seed=seed, reset_s=number, reward=reward, reward_parts=parts, turns=turns)
    facts = stored_facts(record)
    assert (facts.id, facts.seed, repr(facts.reset_s), repr(facts.reward)) == (text, seed, repr(number), repr(reward))
    assert repr(facts.reward_parts) == repr(parts)
    assert repr(facts.turns) == repr(turns)


def test_a_nan_reward_differs_from_no_reward():
    assert math.isnan(stored_facts(trajectory(reward=math.nan)).reward)
    assert stored_facts(trajectory(reward=None)).reward is None


def test_text_that_looks_like_a_number_stays_text():
    assert stored_facts(trajectory(id="nan", domain="null", reward=math.inf)).id == "nan"


def test_numbers_of_numpy_are_numbers():
    facts = stored_facts(trajectory(reward=np.float64(0.25), reward_parts={"a": np.float32(0.5)}, seed=np.int64(3)))
    assert (facts.reward, facts.reward_parts, facts.seed) == (0.25, {"a": 0.5}, 3)


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(SpoolError, match=r"'math/0/1' has columns of unequal length.*'logprobs': 3"):
        pack_trajectory(msgspec.structs.replace(trajectory(), logprobs=np.zeros(3, np.float32)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", np.zeros(4, np.int64)),
        ("token_ids", np.zeros(4, ">i4")),
        ("logprobs", [0.0] * 4),
        ("versions", np.zeros((4, 1), np.int32)),
        ("loss_mask", np.zeros(4, np.uint8)),
    ],
)
def test_a_column_of_another_kind_is_refused(name, value):
    with pytest.raises(SpoolError, match=f"'math/0/1': {name} is .*make it with np.asarray"):
        pack_trajectory(msgspec.structs.replace(trajectory(), **{name: value}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"reward": "high"},
        {"status": "lost"},
        {"group": "\ud800"},
        {"created": None},
        {"turns": None},
        {"reward": 10**400},
        {"extra": {"loss": math.nan}},
        {"extra": {"model": object()}},
        {"turns": [EpisodeTurn(start=0, end=1, extra={"x": {1, 2}})]},
    ],
    ids=["text", "status", "surrogate", "no time", "no turns", "too large", "nan", "object", "set in a turn"],
)
def test_facts_that_could_not_be_read_back_are_refused(wrong):
    with pytest.raises(SpoolError, match="trajectory 'math/0/1' cannot be stored"):
        pack_trajectory(trajectory(**wrong))


def test_a_slice_with_gaps_is_stored_as_its_values():
    packed = pack_trajectory(trajectory(token_ids=np.arange(8, dtype=np.int32)[::2]))
    assert packed.columns["token_ids"].tobytes() == np.array([0, 2, 4, 6], np.int32).tobytes()


def test_facts_of_a_newer_schema_are_kept_and_written_back():
    row = json.loads(pack_trajectory(trajectory()).facts)
    row["tool_calls"] = {"python": 3}
    row["turns"][0]["queue_s"] = 0.25
    facts = parse_facts(json.dumps(row).encode())
    assert facts.extra == {"tool_calls": {"python": 3}}
    assert facts.turns[0].extra == {"queue_s": 0.25}
    assert json.loads(pack_trajectory(attach_columns(facts, pack_trajectory(trajectory()).columns)).facts) == row


def test_a_fact_that_is_missing_is_refused():
    row = json.loads(pack_trajectory(trajectory()).facts)
    del row["group"]
    with pytest.raises(Exception, match="group"):
        parse_facts(json.dumps(row).encode())
