"""The figures of episode lengths, from counts that can be added up."""

from collections import Counter
from itertools import pairwise

import pytest

from hpcrl.spool.episode_lengths import add_length, summarize_lengths


def summarize(lengths):
    counts = {}
    for length in lengths:
        add_length(counts, length)
    return summarize_lengths(counts)


@pytest.mark.parametrize("length", [0, 1, 6, 7, 8, 520, 1023, 100_000])
def test_equal_lengths_are_their_own_mean_and_quantiles(length):
    summary = summarize([length] * 100)
    assert (summary.num, summary.mean, summary.p50, summary.p90) == (100, length, length, length)


def test_quantiles_of_short_lengths_are_exact():
    summary = summarize([6] * 85 + [7] * 15)
    assert (summary.p50, summary.p90) == (6, 7)


@pytest.mark.parametrize("growth", [1.0, 1.5, 3.0])
def test_quantiles_are_within_a_tenth_of_the_true_ones_and_not_beyond_the_longest(growth):
    lengths = [round(growth * place) for place in range(100, 1101)]
    summary = summarize(lengths)
    assert summary.p50 == pytest.approx(lengths[500], rel=0.1)
    assert summary.p90 == pytest.approx(lengths[900], rel=0.1)
    assert summary.p90 <= lengths[-1]


def test_longer_episodes_never_have_a_lower_quantile():
    quantiles = [summarize([length]).p50 for length in range(5000)]
    assert all(low < high for low, high in pairwise(quantiles))


def test_counts_of_two_workers_add_up():
    parts = [{}, {}]
    for part, length in zip(parts, (500, 510), strict=True):
        add_length(part, length)
    assert summarize_lengths(Counter(parts[0]) + Counter(parts[1])) == summarize([500, 510])


def test_counts_by_powers_of_two_of_older_campaigns_are_read_with_newer_ones():
    counts = {"9": 3, "10": 1, "tokens": 3 * 300 + 700}
    assert summarize_lengths(counts).p50 == 384
    add_length(counts, 900)
    summary = summarize_lengths(counts)
    assert (summary.num, summary.mean, summary.p50, summary.p90) == (5, 500, 384, 900)


def test_no_episodes_have_no_figures():
    assert summarize([]) is None
