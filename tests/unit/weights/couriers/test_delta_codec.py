"""The delta codec: every bit arrives, and a delta that does not fit is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hpcrl.errors import WeightsError
from hpcrl.weights.couriers import delta_codec
from hpcrl.weights.layout import TensorLayout

BITS = {"bfloat16": np.uint16, "float32": np.uint32, "int64": np.uint64, "uint8": np.uint8}
DTYPES = st.sampled_from(sorted(BITS))
NAN, OTHER_NAN, MINUS_ZERO, ZERO = 0x7FC0, 0x7FC1, 0x8000, 0x0000


def layout_of(num: int, dtype: str = "bfloat16") -> TensorLayout:
    return TensorLayout.pack([("before", "float32", (3,)), ("weight", dtype, (num,)), ("empty", dtype, (0, 4))])


def slot_of(layout: TensorLayout, values: np.ndarray) -> bytearray:
    slot = bytearray(layout.nbytes)
    place = layout.tensors_by_name()["weight"]
    slot[place.offset : place.offset + place.nbytes] = values.tobytes()
    return slot


def through_the_wire(old: bytearray, new: bytearray, layout: TensorLayout) -> bytearray | None:
    delta = delta_codec.encode_delta(memoryview(old), memoryview(new), layout, base=3, version=4)
    if delta is None:
        return None
    got = bytearray(old)
    delta_codec.apply_delta(delta, memoryview(got), layout, base=3)
    return got


@settings(max_examples=200, deadline=None)
@given(st.data(), DTYPES, st.integers(1, 3000))
def test_every_bit_pattern_arrives(data: st.DataObject, dtype: str, num: int) -> None:
    layout, bits = layout_of(num, dtype), BITS[dtype]
    old = data.draw(arrays(bits, num, fill=st.integers(0, 3)))
    new = old.copy()
    changed = data.draw(st.lists(st.integers(0, num - 1), max_size=num // 8, unique=True))
    new[changed] = data.draw(arrays(bits, len(changed)))
    got = through_the_wire(slot_of(layout, old), slot_of(layout, new), layout)
    assert got is None or got == slot_of(layout, new)


def test_nan_payloads_and_the_sign_of_zero_arrive() -> None:
    layout = layout_of(4000)
    old = np.zeros(4000, np.uint16)
    new = old.copy()
    old[:4], new[:4] = (NAN, OTHER_NAN, ZERO, MINUS_ZERO), (OTHER_NAN, NAN, MINUS_ZERO, ZERO)
    got = through_the_wire(slot_of(layout, old), slot_of(layout, new), layout)
    assert got == slot_of(layout, new)


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 509, 510, 511, 100_000])
def test_gaps_of_every_length_arrive(gap: int) -> None:
    num = 3 * gap + 50_000
    layout = layout_of(num)
    old = np.zeros(num, np.uint16)
    new = old.copy()
    new[[0, gap, 2 * gap, num - 1]] = 7
    assert through_the_wire(slot_of(layout, old), slot_of(layout, new), layout) == slot_of(layout, new)


def test_chunks_of_a_large_tensor_meet_without_a_gap() -> None:
    num = delta_codec.MAX_CHUNK_VALUES + 5
    layout = layout_of(num)
    old = np.zeros(num, np.uint16)
    new = old.copy()
    new[delta_codec.MAX_CHUNK_VALUES - 1 : delta_codec.MAX_CHUNK_VALUES + 2] = 9
    assert through_the_wire(slot_of(layout, old), slot_of(layout, new), layout) == slot_of(layout, new)


def test_no_change_is_a_small_delta() -> None:
    layout = layout_of(100_000)
    slot = slot_of(layout, np.zeros(100_000, np.uint16))
    delta = delta_codec.encode_delta(memoryview(slot), memoryview(slot), layout, base=1, version=2)
    assert delta is not None
    assert len(delta) < 200


def test_a_change_of_everything_is_sent_in_full() -> None:
    layout = layout_of(1000)
    old, new = (slot_of(layout, np.full(1000, value, np.uint16)) for value in (1, 2))
    assert delta_codec.encode_delta(memoryview(old), memoryview(new), layout, base=1, version=2) is None


def one_delta() -> tuple[bytes, bytearray, TensorLayout]:
    layout = layout_of(1000)
    old = slot_of(layout, np.zeros(1000, np.uint16))
    new = bytearray(old)
    new[100] = new[900] = 1
    delta = delta_codec.encode_delta(memoryview(old), memoryview(new), layout, base=3, version=4)
    assert delta is not None
    return delta, old, layout


def test_a_delta_of_another_base_is_refused_with_both_versions() -> None:
    delta, old, layout = one_delta()
    with pytest.raises(WeightsError, match="from version 3 to 4, and the slot holds version 2: send"):
        delta_codec.apply_delta(delta, memoryview(old), layout, base=2)


def test_a_delta_of_another_layout_is_refused() -> None:
    delta, _, _ = one_delta()
    other = layout_of(1001)
    with pytest.raises(WeightsError, match="another layout"):
        delta_codec.apply_delta(delta, memoryview(bytearray(other.nbytes)), other, base=3)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_delta_is_an_error_or_writes_within_the_slot(data: st.DataObject) -> None:
    delta, old, layout = one_delta()
    damaged = bytearray(delta)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for broken in (bytes(damaged), cut):
        slot = bytearray(old)
        try:
            delta_codec.apply_delta(broken, memoryview(slot), layout, base=3)
        except WeightsError:
            continue
        place = layout.tensors_by_name()["weight"]
        assert slot[: place.offset] == old[: place.offset]
        assert slot[place.offset + place.nbytes :] == old[place.offset + place.nbytes :]


@pytest.mark.parametrize(("link", "codec_name"), [(1e8, "delta"), (1e11, "full")])
def test_the_faster_codec_for_the_link_is_chosen_with_a_reason(link: float, codec_name: str) -> None:
    choice = delta_codec.choose_codec(full_nbytes=1 << 30, delta_nbytes=1 << 24, delta_s=0.5, link_nbytes_per_s=link)
    assert choice.codec == codec_name
    assert f"{link / 1e9:.3g} GB/s" in choice.reason


def test_without_a_smaller_delta_versions_are_sent_in_full() -> None:
    assert (
        delta_codec.choose_codec(full_nbytes=10, delta_nbytes=None, delta_s=0.0, link_nbytes_per_s=1.0).codec == "full"
    )
