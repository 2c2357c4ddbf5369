"""Copies of tensors into a slot: the bits of torch's own rounding, and checksums of what is stored."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.weights.checksum import hash_bytes
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.stores.store import _copy_rounded, copy_tensors, iterate_bytes, view_tensors

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from(["float32", "bfloat16", "float16"]), st.booleans(), st.integers(0, 2**31))
def test_copies_have_the_bits_of_torchs_rounding(
    shapes: list[tuple[int, ...]], dtype: str, transposed: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    tensors = {str(number): torch.randn(shape) * 3 for number, shape in enumerate(shapes)}
    if transposed:
        tensors = {name: tensor.transpose(0, -1) if tensor.ndim else tensor for name, tensor in tensors.items()}
    layout = TensorLayout.pack((name, dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    slot = memoryview(bytearray(layout.nbytes))
    sums = copy_tensors(tensors, slot, layout)
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    for name, tensor in view_tensors(slot, layout).items():
        assert torch.equal(tensor, expected[name])
    data = [bytes(each) for each in iterate_bytes(tensors, layout)]
    stored = [bytes(slot[place.offset : place.offset + place.nbytes]) for place in layout.tensors]
    assert data == stored
    assert sums == [hash_bytes(each) for each in stored]


def test_a_large_tensor_is_copied_chunk_by_chunk_to_its_last_value() -> None:
    source = torch.randn(300_001)
    layout = TensorLayout.pack([("a", "bfloat16", (300_001,))])
    slot = memoryview(bytearray(layout.nbytes))
    [checksum] = copy_tensors({"a": source}, slot, layout)
    assert torch.equal(view_tensors(slot, layout)["a"], source.bfloat16())
    assert checksum == hash_bytes(slot[: 2 * 300_001])


@pytest.mark.parametrize("part_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("shape", [(), (0, 3), (7, 5), (301,)])
def test_what_a_gpu_rounds_in_parts_is_whole(
    shape: tuple[int, ...], part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.weights.stores.store.ROUNDED_PART_BYTES", part_bytes)
    source, target = torch.randn(shape), torch.zeros(shape, dtype=torch.bfloat16)
    _copy_rounded(source, target)
    assert torch.equal(target, source.bfloat16())
