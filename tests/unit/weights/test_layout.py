"""Layouts of tensors, and the shards that a trainer's ranks hold."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import WeightsError
from hpcrl.testing.shards import split_tensor
from hpcrl.weights.layout import (
    ALIGNMENT,
    ITEM_SIZES,
    TensorLayout,
    TensorShard,
    check_cover,
    check_shard,
    make_whole_shard,
)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
LAYOUTS = st.lists(st.tuples(st.sampled_from(sorted(ITEM_SIZES)), SHAPES), max_size=6).map(
    lambda tensors: TensorLayout.pack((f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors))
)


@given(LAYOUTS)
def test_a_layout_survives_json(layout: TensorLayout) -> None:
    again = TensorLayout.from_json(layout.to_json())
    assert again == layout
    assert again.digest() == layout.digest()


@given(LAYOUTS)
def test_tensors_are_aligned_and_do_not_overlap(layout: TensorLayout) -> None:
    reached = 0
    for tensor in layout.tensors:
        assert tensor.offset % ALIGNMENT == 0
        assert tensor.offset >= reached
        reached = tensor.offset + tensor.nbytes
    assert reached <= layout.nbytes


def test_a_layout_of_tensors_has_their_types_and_sizes() -> None:
    tensors = {"a": torch.zeros(2, 3).bfloat16(), "b": torch.zeros(())}
    layout = TensorLayout.from_tensors(tensors)
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in layout.tensors] == [
        ("a", "bfloat16", (2, 3), 12),
        ("b", "float32", (), 4),
    ]


def test_every_type_in_the_table_has_torch_s_size() -> None:
    seen = {name: torch.empty(1, dtype=getattr(torch, name)).element_size() for name in ITEM_SIZES}
    assert seen == ITEM_SIZES


def test_a_type_without_a_place_is_refused_by_the_tensor_s_name() -> None:
    with pytest.raises(WeightsError, match=r"tensor 'odd' is complex64"):
        TensorLayout.from_tensors({"odd": torch.zeros(2, dtype=torch.complex64)})


def test_a_layout_whose_places_were_changed_is_refused() -> None:
    layout = TensorLayout.pack([("a", "float32", (4,)), ("b", "float32", (4,))])
    moved = msgspec.structs.replace(layout.tensors[1], offset=0)
    bad = msgspec.json.encode(msgspec.structs.replace(layout, tensors=(layout.tensors[0], moved)))
    for data in (bad, b'{"tensors": []}', b"garbage"):
        with pytest.raises(WeightsError, match="layout of the weights is damaged"):
            TensorLayout.from_json(data)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ([("a", "float32", (4,))], "the sender lacks tensor 'b'"),
        ([("a", "float32", (4,)), ("b", "float32", (2,)), ("c", "int8", ())], "the sender holds tensor 'c'"),
        ([("a", "float32", (4,)), ("b", "float32", (1, 2))], r"'b' is float32 \[1, 2\]"),
        ([("a", "bfloat16", (4,)), ("b", "float32", (2,))], "'a' is bfloat16"),
        ([("b", "float32", (2,)), ("a", "float32", (4,))], "a different order"),
    ],
)
def test_layouts_that_differ_name_the_tensor(tensors: list[tuple[str, str, tuple[int, ...]]], complaint: str) -> None:
    wanted = TensorLayout.pack([("a", "float32", (4,)), ("b", "float32", (2,))])
    with pytest.raises(WeightsError, match=complaint):
        TensorLayout.pack(tensors).check_same(wanted, own_name="the sender", other_name="the window")


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[TensorShard]]:
    """Split a tensor in two, then one of the shards again, and so on, along any axis."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    pieces = [TensorShard(name="t", start=(0,) * len(shape), shape=shape)]
    for _ in range(draw(st.integers(0, 5))):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        edge = draw(st.integers(0, piece.shape[axis]))
        for low, size in ((0, edge), (edge, piece.shape[axis] - edge)):
            start = tuple(at + low * (i == axis) for i, at in enumerate(piece.start))
            pieces.append(
                TensorShard(name="t", start=start, shape=(*piece.shape[:axis], size, *piece.shape[axis + 1 :]))
            )
    return shape, draw(st.permutations(pieces))


@given(cuts())
def test_however_a_tensor_is_cut_its_pieces_cover_it(cut: tuple[tuple[int, ...], list[TensorShard]]) -> None:
    shape, shards = cut
    check_cover(TensorLayout.pack([("t", "int8", shape)]), [shards])


@st.composite
def shards_of_a_tensor(draw: st.DrawFn) -> tuple[tuple[int, ...], list[TensorShard]]:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    shards = []
    for _ in range(draw(st.integers(0, 5))):
        start = tuple(draw(st.integers(0, size)) for size in shape)
        size = tuple(draw(st.integers(0, whole - first)) for whole, first in zip(shape, start, strict=True))
        shards.append(TensorShard(name="t", start=start, shape=size))
    return shape, shards


@given(shards_of_a_tensor())
def test_shards_cover_a_tensor_just_when_every_value_is_in_one(
    drawn: tuple[tuple[int, ...], list[TensorShard]],
) -> None:
    shape, shards = drawn
    count = torch.zeros(shape, dtype=torch.int32)
    for shard in shards:
        count[shard.index] += 1
    layout = TensorLayout.pack([("t", "int8", shape)])
    if (count == 1).all():
        check_cover(layout, [shards])
    else:
        with pytest.raises(WeightsError, match="'t'"):
            check_cover(layout, [shards])


def test_a_tensor_is_split_as_evenly_as_can_be() -> None:
    [tensor] = TensorLayout.pack([("t", "int8", (2, 7))]).tensors
    assert [(shard.start, shard.shape) for shard in split_tensor(tensor, axis=1, num_shards=3)] == [
        ((0, 0), (2, 3)),
        ((0, 3), (2, 2)),
        ((0, 5), (2, 2)),
    ]


MODEL = TensorLayout.pack([("q", "bfloat16", (8, 6)), ("o", "bfloat16", (6, 8)), ("norm", "float32", (6,))])


QUERY, OUT, NORM = MODEL.tensors


def held_by_two() -> list[list[TensorShard]]:
    """Return the shards of a tensor-parallel trainer's ranks; the first writes what is replicated."""
    columns, rows = split_tensor(QUERY, axis=0, num_shards=2), split_tensor(OUT, axis=1, num_shards=2)
    return [[columns[0], rows[0], make_whole_shard(NORM)], [columns[1], rows[1]]]


def test_tensor_parallel_shards_cover_a_model() -> None:
    check_cover(MODEL, held_by_two())


def test_a_scalar_is_one_shard() -> None:
    layout = TensorLayout.pack([("s", "float32", ())])
    scalar = make_whole_shard(layout.tensors[0])
    check_cover(layout, [[scalar]])
    with pytest.raises(WeightsError, match="rank 0 and rank 1 both hold"):
        check_cover(layout, [[scalar], [scalar]])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda held: held[0].pop(), "'norm': 6 of its 6 values are held by no rank"),
        (lambda held: held[1].pop(), "'o': 24 of its 48 values are held by no rank"),
        (lambda held: held[1].append(held[0][0]), "'q': rank 0 and rank 1 both hold"),
        (lambda held: held[0].append(TensorShard(name="q", start=(7, 0), shape=(2, 6))), "must be within the tensor"),
        (
            lambda held: held[1].append(TensorShard(name="k", start=(0,), shape=(2,))),
            "'k', which the layout does not have",
        ),
    ],
)
def test_a_cover_that_is_not_one_names_the_tensor(change: Callable[[Any], object], complaint: str) -> None:
    held = held_by_two()
    change(held)
    with pytest.raises(WeightsError, match=complaint):
        check_cover(MODEL, held)


@pytest.mark.parametrize(
    ("dtype", "shape", "complaint"),
    [
        ("float16", (4, 6), r"float16 \[4, 6\] was given"),
        ("float64", (4, 6), r"float64 \[4, 6\] was given"),
        ("bfloat16", (4, 5), r"bfloat16 \[4, 5\] was given"),
        ("float32", (4, 5), r"float32 \[4, 5\] was given"),
    ],
)
def test_values_of_another_shape_or_type_are_refused(dtype: str, shape: tuple[int, ...], complaint: str) -> None:
    shard = split_tensor(QUERY, axis=0, num_shards=2)[1]
    with pytest.raises(WeightsError, match=r"'q': a shard of bfloat16 \[4, 6\] at \[4, 0\].*" + complaint):
        check_shard(shard, MODEL.tensors_by_name(), dtype=dtype, shape=shape)


def test_values_in_float32_may_be_rounded_to_fewer_bits_and_never_the_other_way() -> None:
    slots = TensorLayout.pack([("rounded", "float16", (2,)), ("exact", "float32", (2,))]).tensors_by_name()
    check_shard(make_whole_shard(slots["rounded"]), slots, dtype="float32", shape=(2,))
    with pytest.raises(WeightsError, match=r"'exact': a shard of float32 \[2\] at \[0\] is expected, but float16"):
        check_shard(make_whole_shard(slots["exact"]), slots, dtype="float16", shape=(2,))
