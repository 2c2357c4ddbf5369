"""The delta codec: only the values that differ, bit for bit, from the version before are sent.

    encode_delta                    encode the differences of two versions; None if that is not smaller than the whole
    read_delta_header, DeltaHeader  the description of a delta
    apply_delta                     turn the base into the new version, in place
    sample_delta_share              estimate the size of a delta from a few chunks
    choose_codec, CodecChoice       full or delta, by the measured speeds of the link and the last delta
    CodecName                       full, delta

Values are compared as integers of their width, so NaN payloads and -0.0 are kept. A delta is a header and, for each
chunk of a tensor, the gaps between changed values (a byte each; 255: skip 255 values) and then the new bits.
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from hpcrl.errors import WeightsError
from hpcrl.weights.layout import ITEM_SIZES, TensorLayout

CodecName = Literal["full", "delta"]
MAX_CHUNK_VALUES = 1 << 20
"""Values compared at a time, which keeps the extra memory small."""
NUM_SAMPLES = 8
MAX_GAP = 255
_LENGTH = struct.Struct("<Q")


Size = Annotated[int, msgspec.Meta(ge=0)]


class DeltaHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The description of a delta."""

    base: int
    version: int
    layout: str
    """Digest of the layout of both versions."""
    sizes: list[tuple[Size, Size]]
    """The bytes of the gaps of each chunk, and the number of its changed values."""


class CodecChoice(NamedTuple):
    """A codec, and the reason for it."""

    codec: CodecName
    reason: str


class _TensorChunk(NamedTuple):
    """The bytes of one tensor that are compared at a time."""

    start: int
    stop: int
    item: int

    def values(self, data: Any) -> Any:
        """Return the values as unsigned integers of the tensor's width, which are compared bit for bit."""
        return data[self.start : self.stop].view(f"<u{self.item}")


def encode_delta(
    base_data: memoryview, data: memoryview, layout: TensorLayout, *, base: int, version: int
) -> bytes | None:
    """Encode what turns `base_data` (version `base`) into `data`; None if it is not smaller than `data`."""
    old, new = (np.frombuffer(slot, np.uint8) for slot in (base_data, data))
    sizes, encoded, total = [], [], 0
    for chunk in _iterate_chunks(layout):
        gaps, changed = _find_differences(chunk, old, new)
        sizes.append((len(gaps), len(changed)))
        encoded += [gaps, changed.view(np.uint8)]
        total += gaps.nbytes + changed.nbytes
        if total >= layout.nbytes:
            return None
    header = msgspec.msgpack.encode(DeltaHeader(base=base, version=version, layout=layout.digest(), sizes=sizes))
    if _LENGTH.size + len(header) + total >= layout.nbytes:
        return None
    return b"".join([_LENGTH.pack(len(header)), header, *encoded])


def read_delta_header(delta: bytes | memoryview) -> DeltaHeader:
    """Decode the header of a delta; WeightsError if it is damaged."""
    view = memoryview(delta)
    try:
        (length,) = _LENGTH.unpack_from(view)
        return msgspec.msgpack.decode(view[_LENGTH.size : _LENGTH.size + length], type=DeltaHeader)
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"a delta of the weights is damaged ({error}): send the version in full") from None


def apply_delta(delta: bytes | memoryview, slot: memoryview, layout: TensorLayout, *, base: int) -> None:
    """Turn `slot`, which holds version `base`, into the delta's version.

    WeightsError if the delta has another base or is damaged; the slot must then be filled again. Compare the result
    with the version's checksums: they are not checked here.
    """
    header = read_delta_header(delta)
    if header.base != base or header.layout != layout.digest():
        raise WeightsError(
            f"the delta is from version {header.base} to {header.version}, and the slot holds version {base}"
            f"{'' if header.layout == layout.digest() else ' with another layout'}: send the version in full"
        )
    rest = np.frombuffer(delta, np.uint8)[_LENGTH.size + _LENGTH.unpack_from(delta)[0] :]
    chunks = list(_iterate_chunks(layout))
    expected_nbytes = sum(gaps + num * chunk.item for (gaps, num), chunk in zip(header.sizes, chunks, strict=False))
    if len(header.sizes) != len(chunks) or expected_nbytes != len(rest):
        raise WeightsError(f"the delta to version {header.version} is cut short or too long: send it in full")
    target = np.frombuffer(slot, np.uint8)
    for (num_gaps, num), chunk in zip(header.sizes, chunks, strict=True):
        positions = _decode_positions(rest[:num_gaps])
        values = chunk.values(target)
        if len(positions) != num or (num and positions[-1] >= len(values)):
            raise WeightsError(f"the delta to version {header.version} is damaged: send the version in full")
        values[positions] = rest[num_gaps : num_gaps + num * chunk.item].view(values.dtype)
        rest = rest[num_gaps + num * chunk.item :]


def sample_delta_share(base_data: memoryview, data: memoryview, layout: TensorLayout) -> tuple[float, int]:
    """Return the share of a version's bytes that a delta would have, by a few sampled chunks, and their bytes."""
    old, new = (np.frombuffer(slot, np.uint8) for slot in (base_data, data))
    chunks = list(_iterate_chunks(layout))
    sampled_nbytes = coded = 0
    for chunk in chunks[:: -(-len(chunks) // NUM_SAMPLES)]:
        gaps, changed = _find_differences(chunk, old, new)
        coded += gaps.nbytes + changed.nbytes
        sampled_nbytes += chunk.stop - chunk.start
    return coded / max(sampled_nbytes, 1), sampled_nbytes


def choose_codec(
    *, full_nbytes: int, delta_nbytes: int | None, delta_s: float, link_nbytes_per_s: float
) -> CodecChoice:
    """Choose the codec that is faster; `delta_s` is the total time to encode and apply the last delta."""
    if delta_nbytes is None:
        return CodecChoice("full", "a delta would not be smaller")
    full_s = full_nbytes / link_nbytes_per_s
    with_delta_s = delta_nbytes / link_nbytes_per_s + delta_s
    codec: CodecName = "delta" if with_delta_s < full_s else "full"
    return CodecChoice(
        codec,
        f"the link has {link_nbytes_per_s / 1e9:.3g} GB/s: {full_nbytes / 2**20:.1f} MiB in full take {full_s:.3g} s, "
        f"a delta of {delta_nbytes / 2**20:.1f} MiB takes {with_delta_s:.3g} s with its coding",
    )


def _iterate_chunks(layout: TensorLayout) -> Iterator[_TensorChunk]:
    for tensor in layout.tensors:
        item = ITEM_SIZES[tensor.dtype]
        for start in range(0, tensor.nbytes, MAX_CHUNK_VALUES * item):
            stop = min(start + MAX_CHUNK_VALUES * item, tensor.nbytes)
            yield _TensorChunk(start=tensor.offset + start, stop=tensor.offset + stop, item=item)


def _find_differences(chunk: _TensorChunk, old: Any, new: Any) -> tuple[Any, Any]:
    """Find the gaps between the values that differ, and their new bits."""
    old_values, new_values = chunk.values(old), chunk.values(new)
    positions = np.flatnonzero(old_values != new_values)
    return _encode_gaps(positions), new_values[positions]


def _encode_gaps(positions: Any) -> Any:
    """Encode rising positions as bytes: the number of values between one and the next, in digits of base 255."""
    gaps = np.diff(positions, prepend=-1) - 1
    repeats, last = np.divmod(gaps, MAX_GAP)
    ends = np.cumsum(repeats + 1) - 1
    coded = np.full(int(ends[-1]) + 1 if len(positions) else 0, MAX_GAP, np.uint8)
    coded[ends] = last
    return coded


def _decode_positions(coded: Any) -> Any:
    """Decode what `_encode_gaps` encoded."""
    reached = np.cumsum(coded, dtype=np.int64)[coded < MAX_GAP]
    return reached + np.arange(len(reached))
