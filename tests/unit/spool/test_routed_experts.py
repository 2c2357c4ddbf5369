"""Experts of tokens: reported, joined to a column, and stored with a trajectory or not at all."""

import h5py  # noqa: TID251
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import EngineAnswerError, SpoolError
from hpcrl.spool import record as record_module
from hpcrl.spool import segment as segment_module
from hpcrl.spool.record import pack_trajectory
from hpcrl.spool.routed_experts import (
    ExpertSpan,
    choose_expert_dtype,
    cut_spans,
    find_known_tokens,
    find_span_end,
    join_experts,
    make_span,
    place_span,
    read_span,
)
from hpcrl.spool.rows import expand_row
from hpcrl.spool.segment import read_segment, write_packed, write_segment
from tests.support.trajectories import dump_exactly, make_odd_trajectory


def make_experts(num_tokens, *, dtype=np.uint8, seed=0, num_experts=200):
    """Make the experts of a model with 3 layers of which a token uses 2."""
    return np.random.default_rng(seed).integers(0, num_experts, (num_tokens, 3, 2)).astype(dtype)


def make_record(name, num_tokens, **changed):
    return make_odd_trajectory(name, num_tokens, experts=make_experts(num_tokens, seed=num_tokens), **changed)


@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from([np.uint8, np.uint16]))
def test_a_span_is_read_as_it_was_made_also_in_json_and_msgpack(start, num, dtype):
    experts = make_experts(num, dtype=dtype)
    span = make_span(start, experts)
    for codec in (msgspec.json, msgspec.msgpack):
        again = codec.decode(codec.encode(span), type=ExpertSpan)
        assert (again, again.end) == (span, start + num)
        assert not num or read_span(again).dtype == dtype
        np.testing.assert_array_equal(read_span(again), experts)


@pytest.mark.parametrize("changed", [{"shape": (2, 3, 1)}, {"start": -1}, {"data": b"x" * 7}, {"shape": (-2, -3, 2)}])
def test_a_span_that_cannot_be_is_refused(changed):
    with pytest.raises(EngineAnswerError, match="reported experts of shape"):
        read_span(msgspec.structs.replace(make_span(0, make_experts(4)), **changed))
    with pytest.raises(EngineAnswerError, match="reported the experts of 4 tokens, and read at most 3"):
        place_span(make_span(0, make_experts(4)), range(3))


def test_the_largest_number_of_a_type_stands_for_no_choice():
    assert [choose_expert_dtype(num).name for num in (2, 255, 256, 1000)] == ["uint8", "uint8", "uint16", "uint16"]
    experts = np.array([[[0, 254]], [[255, 255]]], np.uint8)
    assert find_known_tokens(experts).tolist() == [True, False]
    assert find_known_tokens(experts.astype(np.uint16)).tolist() == [True, True]
    assert find_known_tokens(experts[:0]).tolist() == []


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 25))
def test_spans_are_cut_at_their_end(lengths, num):
    experts, spans, start = make_experts(sum(lengths)), [], 0
    for length in lengths:
        spans.append(make_span(start, experts[start : start + length]))
        start += length
    kept = cut_spans(spans, num)
    column = join_experts(start, [place_span(span, range(start)) for span in kept])
    num_kept = max(start - num, 0)
    assert (find_span_end(kept, 0) == num_kept) or not num_kept
    assert column is None or find_known_tokens(column).tolist() == [at < num_kept for at in range(start)]


def test_the_first_report_of_a_token_counts_and_others_have_no_choice():
    first, later = make_experts(3, seed=1), make_experts(4, seed=2)
    column = join_experts(6, [(np.array([1, 2, 3]), first), (np.array([0, 1, 2, 3]), later)])
    np.testing.assert_array_equal(column[:4], [later[0], *first])
    assert (column[4:] == 0xFF).all()
    assert join_experts(6, []) is None
    with pytest.raises(SpoolError, match="all must have the same model"):
        join_experts(6, [(np.array([1, 2, 3]), first), (np.array([0]), later[:1].astype(np.uint16))])


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_segment_keeps_the_experts_and_trajectories_without_any_have_no_choice(tmp_path, compression, dtype):
    given = [
        make_odd_trajectory("math/0/0", 7),
        make_odd_trajectory("math/0/1", 5, experts=make_experts(5, dtype=dtype, num_experts=np.iinfo(dtype).max)),
        make_odd_trajectory("math/0/2", 0, experts=make_experts(0, dtype=dtype)),
    ]
    write_segment(tmp_path / "a.h5", given, compression=compression)
    write_packed(tmp_path / "b.h5", [read_segment(tmp_path / "a.h5").pack_row(number) for number in range(3)])
    for path in (tmp_path / "a.h5", tmp_path / "b.h5"):
        found = read_segment(path)
        assert dump_exactly(found) == dump_exactly(given)
        np.testing.assert_array_equal(found[1].experts, given[1].experts)
        assert found[0].experts.shape == (7, 3, 2)
        assert not find_known_tokens(found[0].experts).any()
        assert found[2].experts.shape == (0, 3, 2)
        assert {one.experts.dtype for one in found} == {np.dtype(dtype)}
    with h5py.File(tmp_path / "b.h5") as file:
        assert file["experts"].shape == (12 * 3 * 2 * np.dtype(dtype).itemsize,)


def test_nothing_is_stored_where_no_engine_reported_any(tmp_path):
    write_segment(tmp_path / "a.h5", [make_odd_trajectory()])
    assert b'"experts"' not in (tmp_path / "a.h5").read_bytes()[:2048]
    with h5py.File(tmp_path / "a.h5") as file:
        assert "experts" not in file
    assert read_segment(tmp_path / "a.h5")[0].experts is None


def test_a_segment_of_the_schema_before_is_read(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(segment_module, "SCHEMA_MAJOR", 3)
        write_segment(tmp_path / "a.h5", [make_odd_trajectory()])
    assert record_module.SCHEMA_MAJOR == 4
    assert dump_exactly(read_segment(tmp_path / "a.h5")) == dump_exactly([make_odd_trajectory()])


def test_compression_makes_experts_smaller_if_few_are_chosen(tmp_path):
    """Numbers below 128 have 7 bits."""
    experts = np.random.default_rng(0).integers(0, 128, (4000, 12, 8)).astype(np.uint8)
    for compression in ("none", "zstd"):
        write_segment(
            tmp_path / compression, [make_odd_trajectory(num_tokens=4000, experts=experts)], compression=compression
        )
    plain, packed = ((tmp_path / name).stat().st_size for name in ("none", "zstd"))
    assert packed < 0.93 * plain


@pytest.mark.parametrize(
    ("experts", "problem"),
    [
        (make_experts(6)[:, 0], r"experts is uint8 \(6, 2\), not an array of tokens, layers and places"),
        (make_experts(6).astype(np.int64), r"experts is int64 \(6, 3, 2\)"),
        (make_experts(5), "columns of unequal length"),
        ([1, 2], "experts is list"),
    ],
)
def test_a_column_that_could_not_be_read_is_refused(experts, problem):
    with pytest.raises(SpoolError, match=problem):
        pack_trajectory(make_odd_trajectory(experts=experts))


def test_the_experts_of_two_models_are_not_put_in_one_segment(tmp_path):
    given = [make_record("math/0/0", 4), make_odd_trajectory("math/0/1", 4, experts=make_experts(4)[:, :2])]
    with pytest.raises(SpoolError, match="experts of several models"):
        write_segment(tmp_path / "a.h5", given)


def test_a_damaged_column_is_found(tmp_path):
    path = tmp_path / "a.h5"
    write_segment(path, [make_record("math/0/0", 40)])
    data = bytearray(path.read_bytes())
    place = bytes(data).index(make_experts(40, seed=40).tobytes())
    data[place + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(SpoolError, match="experts does not match its checksum"):
        read_segment(path)


def test_a_row_has_the_experts_of_its_tokens():
    one = make_record("math/0/0", 9)
    assert expand_row(one, 0).experts is one.experts
    assert expand_row(make_odd_trajectory(), 0).experts is None
