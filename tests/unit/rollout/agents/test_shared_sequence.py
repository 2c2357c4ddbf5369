"""Sequences that share their beginnings are what they were made of."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from hpcrl.rollout.agents.shared_sequence import SharedSequence, count_common

STEPS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.text("ab", max_size=9)), max_size=12)


def make_sequences(steps):
    """Make sequences, each of which starts with a part of one made before; return them with their texts."""
    made = [(SharedSequence("ab"), "ab")]
    for place, num, own in steps:
        base, text = made[place % len(made)]
        shared = num % (len(text) + 1)
        made.append((SharedSequence(own, base, shared), text[:shared] + own))
    return made


@given(STEPS)
def test_the_parts_are_the_whole(steps):
    for sequence, text in make_sequences(steps):
        assert "".join(sequence.list_parts()) == text
        assert len(sequence) == len(text)


@given(STEPS, st.text("ab", max_size=20))
def test_what_sequences_have_in_common_with_a_text_is_counted(steps, other):
    known = {}
    for sequence, text in make_sequences(steps):
        expected = next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), None)
        assert count_common(sequence, other, known) == (min(len(text), len(other)) if expected is None else expected)


def test_a_long_chain_of_ids_does_not_recurse():
    sequence = SharedSequence(array("i", [0]))
    for number in range(5000):
        sequence = sequence.extend(array("i", [number]))
    assert sum(map(len, sequence.list_parts())) == len(sequence) == 5001
    assert count_common(sequence, array("i", [0, 0, 1, 9]), {}) == 3
