"""The consumed set, compared with a plain set of groups."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.learn.consumed import ConsumedTrajectories

groups = st.tuples(st.sampled_from(["math", "math/hard", "taxi"]), st.integers(0, 30))


@settings(deadline=None)
@given(st.lists(st.tuples(groups, st.integers(0, 9))))
def test_the_consumed_set_is_a_set_of_groups_before_and_after_a_round_trip(episodes):
    consumed, expected = ConsumedTrajectories(), set()
    for (domain, number), index in episodes:
        consumed.add(f"{domain}/{number}/{index}")
        expected.add((domain, number))
    for known in (consumed, ConsumedTrajectories.decode(consumed.encode())):
        for domain in ("math", "math/hard", "taxi"):
            assert {n for n in range(32) if f"{domain}/{n}/0" in known} == {n for d, n in expected if d == domain}


def test_equal_sets_have_equal_bytes_whatever_the_order():
    forward, backward = ConsumedTrajectories(), ConsumedTrajectories()
    ids = [f"math/{number}/0" for number in (1, 2, 3, 7, 8)] + ["loose", "another"]
    forward.update(ids)
    backward.update(reversed(ids))
    assert forward.encode() == backward.encode()


def test_a_million_trajectories_without_gaps_take_less_than_a_hundred_bytes():
    consumed = ConsumedTrajectories()
    for number in range(125_000):
        consumed.add(f"math/{number}/7")
    assert len(consumed.encode()) < 100


@pytest.mark.parametrize("odd", ["", "loose", "math/x/0", "math/007/0", "math/1", "a/-1/0", "math/1/0\n"])
def test_an_id_of_another_form_is_kept_exactly(odd):
    consumed = ConsumedTrajectories()
    consumed.update([odd, "math/7/0"])
    known = ConsumedTrajectories.decode(consumed.encode())
    assert odd in known
    assert f"{odd}0" not in known
