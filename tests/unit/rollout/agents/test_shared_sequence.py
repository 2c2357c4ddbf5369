"""Sequences that share their beginnings are what they were made of, and are found by what starts like them."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from hpcrl.rollout.agents.shared_sequence import IdListCache, RecentLists, SequenceIndex, SharedSequence, count_equal

STEPS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.text("ab", max_size=9)), max_size=12)
TEXTS = st.lists(st.text("ab", max_size=20), min_size=1, max_size=9)


def make_sequences(steps):
    """Make sequences, each of which starts with a part of one made before; return them with their texts."""
    made = [(SharedSequence("ab"), "ab")]
    for place, num, own in steps:
        base, text = made[place % len(made)]
        shared = num % (len(text) + 1)
        made.append((SharedSequence(own, base, shared), text[:shared] + own))
    return made


def count_plainly(one, other):
    expected = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(len(one), len(other)) if expected is None else expected


@given(STEPS)
def test_the_parts_are_the_whole(steps):
    for sequence, text in make_sequences(steps):
        assert "".join(sequence.list_parts()) == text
        assert len(sequence) == len(text)


@given(st.text("ab", max_size=20), st.text("ab", max_size=20))
def test_equal_items_at_the_start_are_counted(one, other):
    assert count_equal(one, other) == count_plainly(one, other)


@given(STEPS, TEXTS)
def test_an_index_finds_what_has_most_in_common_with_a_text(steps, others):
    """Lookups come in between, as the tree grows with them."""
    index, added = SequenceIndex(lambda value: value[0]), []
    for number, (sequence, text) in enumerate(make_sequences(steps)):
        index.add((sequence, text))
        added.append(text)
        other = others[number % len(others)]
        most = max(count_plainly(text, other) for text in added)
        num, found = index.find_common(other)
        assert num == most
        assert count_plainly(found[1], other) == most if most else found is None


@given(STEPS, TEXTS)
def test_an_index_finds_the_longest_and_last_sequence_that_a_text_starts_with(steps, others):
    index, added = SequenceIndex(lambda value: value[0]), []
    for number, (sequence, text) in enumerate(make_sequences(steps)):
        if not text:
            continue
        index.add((sequence, number))
        added.append((len(text), number, text))
        for other in (text, others[number % len(others)]):
            expected = max((one for one in added if other.startswith(one[2])), default=(0, None))
            found = index.find_start(other)
            assert (found and found[1]) == expected[1]


def test_an_index_of_a_thousand_sequences_compares_few_items(monkeypatch):
    from hpcrl.rollout.agents import shared_sequence

    num_compared = []
    plain = shared_sequence.count_equal
    monkeypatch.setattr(
        shared_sequence, "count_equal", lambda one, other: [num_compared.append(len(one)), plain(one, other)][1]
    )
    index = SequenceIndex(lambda number: SharedSequence(f"the same rules, and then question {number:03}"))
    for number in range(1000):
        index.add(number)
    index.find_common("")
    num_compared.clear()
    assert index.find_common("the same rules, and then question 777 <agent>") == (37, 777)
    assert sum(num_compared) <= 37


def test_a_long_chain_of_ids_does_not_recurse():
    sequences, index = [SharedSequence(array("i", [0]))], SequenceIndex(lambda number: sequences[number + 1])
    for number in range(5000):
        sequences.append(sequences[-1].extend(array("i", [number])))
        index.add(number)
    sequence = sequences[-1]
    assert sum(map(len, sequence.list_parts())) == len(sequence) == 5001
    assert index.find_start(array("i", [0, 0, 1, 9])) == 1


@given(STEPS, st.integers(0, 60))
def test_a_cache_of_lists_gives_the_ids_of_each_sequence(steps, max_ids):
    cache = IdListCache(max_ids=max_ids)
    made = [SharedSequence(array("i", [1, 2]))]
    for place, num, own in steps:
        base = made[place % len(made)]
        made.append(SharedSequence(array("i", list(own.encode())), base, num % (len(base) + 1)))
    for sequence in [*made, *made[::-1]]:
        ids = cache.read(sequence)
        assert ids == [one for part in sequence.list_parts() for one in part]
        assert cache.read(sequence) == ids
        assert cache._num_ids == sum(map(len, cache._lists.values())) <= max_ids


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=40))
def test_lists_that_grow_in_turn_are_each_found_again(turns):
    recent, lists = RecentLists(), {}
    for number, num_new in turns:
        before = lists.get(number, [number])
        if number in lists:
            found = recent.find([*before, *range(num_new)])
            assert found.items == found.value == before
        lists[number] = [*before, *range(num_new)]
        recent.add(lists[number], lists[number])
    assert len(list(recent)) == len(lists)


def test_the_last_list_is_kept_and_others_as_far_as_there_is_room():
    recent = RecentLists()
    for number, num_bytes in enumerate([4 << 20, 3 << 20, 2 << 20, 64 << 20, 1]):
        recent.add([number], None, num_bytes=num_bytes)
    assert [one.items for one in recent] == [[4]]
    for number in range(5, 20):
        recent.add([number], None, num_bytes=1)
    assert [one.items for one in recent] == [[number] for number in range(19, 11, -1)]
    assert recent.find([1, 2]).items == [19]
