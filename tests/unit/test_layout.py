"""Where tensors lie, and which bytes of them a trainer's rank holds."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import WeightsError
from hpcrl.weights.layout import ALIGNMENT, ITEM_SIZES, Layout, Shard, check_cover, runs

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
LAYOUTS = st.lists(st.tuples(st.sampled_from(sorted(ITEM_SIZES)), SHAPES), max_size=6).map(
    lambda tensors: Layout.pack((f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors))
)


@given(LAYOUTS)
def test_a_layout_survives_json(layout: Layout) -> None:
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.digest() == layout.digest()


@given(LAYOUTS)
def test_tensors_are_aligned_and_do_not_overlap(layout: Layout) -> None:
    reached = 0
    for tensor in layout.tensors:
        assert tensor.offset % ALIGNMENT == 0
        assert tensor.offset >= reached
        reached = tensor.offset + tensor.nbytes
    assert reached <= layout.nbytes


def test_a_layout_of_tensors_knows_their_types_and_sizes() -> None:
    tensors = {"a": torch.zeros(2, 3).bfloat16(), "b": torch.zeros(())}
    layout = Layout.of(tensors)
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in layout.tensors] == [
        ("a", "bfloat16", (2, 3), 12),
        ("b", "float32", (), 4),
    ]


def test_every_type_in_the_table_has_torch_s_size() -> None:
    seen = {name: torch.empty(1, dtype=getattr(torch, name)).element_size() for name in ITEM_SIZES}
    assert seen == ITEM_SIZES


def test_a_type_without_a_place_is_refused_by_the_tensor_s_name() -> None:
    with pytest.raises(WeightsError, match=r"tensor 'odd' is complex64"):
        Layout.of({"odd": torch.zeros(2, dtype=torch.complex64)})


def test_a_layout_whose_places_were_changed_is_refused() -> None:
    layout = Layout.pack([("a", "float32", (4,)), ("b", "float32", (4,))])
    moved = msgspec.structs.replace(layout.tensors[1], offset=0)
    bad = msgspec.json.encode(msgspec.structs.replace(layout, tensors=(layout.tensors[0], moved)))
    for data in (bad, b'{"tensors": []}', b"garbage"):
        with pytest.raises(WeightsError, match="layout of the weights is damaged"):
            Layout.from_json(data)


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
    wanted = Layout.pack([("a", "float32", (4,)), ("b", "float32", (2,))])
    with pytest.raises(WeightsError, match=complaint):
        Layout.pack(tensors).check_same(wanted, ours="the sender", theirs="the window")


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Shard]:
    shape = draw(SHAPES)
    start = tuple(draw(st.integers(0, size)) for size in shape)
    size = tuple(draw(st.integers(0, whole - first)) for whole, first in zip(shape, start, strict=True))
    return shape, Shard(name="t", start=start, shape=size)


@given(boxes())
def test_runs_are_the_bytes_of_the_box_in_order(box: tuple[tuple[int, ...], Shard]) -> None:
    shape, shard = box
    layout = Layout.pack([("first", "int8", (7,)), ("t", "int32", shape)])
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    window = torch.zeros(layout.nbytes, dtype=torch.uint8)
    place = layout.by_name()["t"]
    window[place.offset : place.offset + place.nbytes] = numbers.reshape(-1).view(torch.uint8)
    index = tuple(slice(first, first + size) for first, size in zip(shard.start, shard.shape, strict=True))
    wanted = numbers[index].contiguous().reshape(-1).view(torch.uint8).tolist()
    got = [byte for run in runs(layout, shard) for byte in window[run.offset : run.offset + run.nbytes].tolist()]
    assert got == wanted


def test_a_shard_of_whole_rows_is_one_run() -> None:
    layout = Layout.pack([("t", "bfloat16", (8, 4, 4))])
    assert len(list(runs(layout, Shard(name="t", start=(2, 0, 0), shape=(3, 4, 4))))) == 1


def split(name: str, shape: tuple[int, ...], axis: int, num: int) -> list[Shard]:
    size = shape[axis] // num
    return [
        Shard(
            name=name,
            start=tuple(rank * size if i == axis else 0 for i in range(len(shape))),
            shape=tuple(size if i == axis else whole for i, whole in enumerate(shape)),
        )
        for rank in range(num)
    ]


MODEL = Layout.pack([("q", "bfloat16", (8, 6)), ("o", "bfloat16", (6, 8)), ("norm", "float32", (6,))])


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_tensor_parallel_shards_cover_a_model(tensor_parallel: int) -> None:
    norm = [Shard(name="norm", start=(0,), shape=(6,))]
    check_cover(MODEL, split("q", (8, 6), 0, tensor_parallel) + split("o", (6, 8), 1, tensor_parallel) + norm)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda shards: shards.pop(), "'norm'.*held by no rank"),
        (lambda shards: shards.pop(3), "'o'.*held by no rank"),
        (lambda shards: shards.append(shards[0]), "'q'.*held by two ranks"),
        (lambda shards: shards.append(Shard(name="q", start=(7, 0), shape=(2, 6))), "has to lie within"),
        (lambda shards: shards.append(Shard(name="k", start=(0,), shape=(2,))), "'k', which the layout does not have"),
    ],
)
def test_a_cover_that_is_not_one_names_the_tensor(change: object, complaint: str) -> None:
    shards = [
        *split("q", (8, 6), 0, 2),
        *split("o", (6, 8), 1, 2),
        Shard(name="norm", start=(0,), shape=(6,)),
    ]
    change(shards)  # type: ignore[operator]
    with pytest.raises(WeightsError, match=complaint):
        check_cover(MODEL, shards)
