"""What goes over a link: a version in full, or only the values that differ from the version before it, bit for bit.

    encode    the differences of two versions; None if that is not smaller than the whole
    apply     turn the base into the new version, in place
    sample    how large a delta would be, from a few pieces
    choose    full or delta, from what the link and the last delta were measured to be

Values are compared as integers of their width, so NaN payloads and -0.0 travel unchanged. A delta is a header and,
for each piece of a tensor, the gaps between changed values (a byte each; 255: go on by 255) and then the new bits.
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from hpcrl.errors import WeightsError
from hpcrl.weights.layout import ITEM_SIZES, Layout

CodecName = Literal["full", "delta"]
PIECE_VALUES = 1 << 20
"""Compared at a time: what is needed besides the two versions stays small."""
NUM_SAMPLES = 8
MAX_GAP = 255
_LENGTH = struct.Struct("<Q")


Size = Annotated[int, msgspec.Meta(ge=0)]


class Header(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a delta is of."""

    base: int
    version: int
    layout: str
    """Digest of the layout that both versions have."""
    pieces: list[tuple[Size, Size]]
    """For each piece: bytes of its gaps, number of its changed values."""


class Choice(NamedTuple):
    """A codec, and why."""

    codec: CodecName
    reason: str


class _Piece(NamedTuple):
    """Bytes of one tensor that are compared at a time."""

    start: int
    stop: int
    item: int

    def values(self, data: Any) -> Any:
        """As unsigned integers of the tensor's width, which no comparison changes."""
        return data[self.start : self.stop].view(f"<u{self.item}")


def encode(base_data: memoryview, data: memoryview, layout: Layout, *, base: int, version: int) -> bytes | None:
    """What turns `base_data` (version `base`) into `data`; None if it is not smaller than all of `data`."""
    old, new = (np.frombuffer(slot, np.uint8) for slot in (base_data, data))
    sizes, parts, total = [], [], 0
    for piece in _pieces(layout):
        gaps, changed = _differences(piece, old, new)
        sizes.append((len(gaps), len(changed)))
        parts += [gaps, changed.view(np.uint8)]
        total += gaps.nbytes + changed.nbytes
        if total >= layout.nbytes:
            return None
    header = msgspec.msgpack.encode(Header(base=base, version=version, layout=layout.digest(), pieces=sizes))
    if _LENGTH.size + len(header) + total >= layout.nbytes:
        return None
    return b"".join([_LENGTH.pack(len(header)), header, *parts])


def read_header(delta: bytes | memoryview) -> Header:
    """What a delta is of; WeightsError if it is damaged."""
    view = memoryview(delta)
    try:
        (length,) = _LENGTH.unpack_from(view)
        return msgspec.msgpack.decode(view[_LENGTH.size : _LENGTH.size + length], type=Header)
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"a delta of the weights is damaged ({error}): send the version in full") from None


def apply(delta: bytes | memoryview, slot: memoryview, layout: Layout, *, base: int) -> None:
    """Turn `slot`, which holds version `base`, into the delta's version.

    WeightsError if the delta has another base or is damaged; the slot is then to be filled anew. Whether the result
    is right bit for bit, the checksums of the version say.
    """
    header = read_header(delta)
    if header.base != base or header.layout != layout.digest():
        raise WeightsError(
            f"the delta is from version {header.base} to {header.version}, and here is version {base}"
            f"{'' if header.layout == layout.digest() else ' of another layout'}: send the version in full"
        )
    rest = np.frombuffer(delta, np.uint8)[_LENGTH.size + _LENGTH.unpack_from(delta)[0] :]
    pieces = list(_pieces(layout))
    wanted = sum(gaps + num * piece.item for (gaps, num), piece in zip(header.pieces, pieces, strict=False))
    if len(header.pieces) != len(pieces) or wanted != len(rest):
        raise WeightsError(f"the delta to version {header.version} is cut short or too long: send it in full")
    target = np.frombuffer(slot, np.uint8)
    for (num_gaps, num), piece in zip(header.pieces, pieces, strict=True):
        at = _positions_of(rest[:num_gaps])
        values = piece.values(target)
        if len(at) != num or (num and at[-1] >= len(values)):
            raise WeightsError(f"the delta to version {header.version} is damaged: send the version in full")
        values[at] = rest[num_gaps : num_gaps + num * piece.item].view(values.dtype)
        rest = rest[num_gaps + num * piece.item :]


def sample(base_data: memoryview, data: memoryview, layout: Layout) -> tuple[float, int]:
    """The share of its bytes that a delta would have, from a few pieces of the version; and the bytes of those."""
    old, new = (np.frombuffer(slot, np.uint8) for slot in (base_data, data))
    pieces = list(_pieces(layout))
    looked_at = coded = 0
    for piece in pieces[:: -(-len(pieces) // NUM_SAMPLES)]:
        gaps, changed = _differences(piece, old, new)
        coded += gaps.nbytes + changed.nbytes
        looked_at += piece.stop - piece.start
    return coded / max(looked_at, 1), looked_at


def choose(*, full_nbytes: int, delta_nbytes: int | None, delta_s: float, link_nbytes_per_s: float) -> Choice:
    """Which is there sooner? `delta_s`: what encoding and applying the last delta took, in all."""
    if delta_nbytes is None:
        return Choice("full", "a delta would not be smaller")
    full_s = full_nbytes / link_nbytes_per_s
    with_delta_s = delta_nbytes / link_nbytes_per_s + delta_s
    codec: CodecName = "delta" if with_delta_s < full_s else "full"
    return Choice(
        codec,
        f"the link does {link_nbytes_per_s / 1e9:.3g} GB/s: {full_nbytes / 2**20:.1f} MiB in full take {full_s:.3g} s, "
        f"a delta of {delta_nbytes / 2**20:.1f} MiB takes {with_delta_s:.3g} s with its coding",
    )


def _pieces(layout: Layout) -> Iterator[_Piece]:
    for tensor in layout.tensors:
        item = ITEM_SIZES[tensor.dtype]
        for start in range(0, tensor.nbytes, PIECE_VALUES * item):
            stop = min(start + PIECE_VALUES * item, tensor.nbytes)
            yield _Piece(start=tensor.offset + start, stop=tensor.offset + stop, item=item)


def _differences(piece: _Piece, old: Any, new: Any) -> tuple[Any, Any]:
    """Gaps between the values that differ, and their new bits."""
    old_values, new_values = piece.values(old), piece.values(new)
    at = np.flatnonzero(old_values != new_values)
    return _gaps_of(at), new_values[at]


def _gaps_of(at: Any) -> Any:
    """Rising positions as bytes: how many values lie between one and the next, in digits of base 255."""
    gaps = np.diff(at, prepend=-1) - 1
    repeats, last = np.divmod(gaps, MAX_GAP)
    ends = np.cumsum(repeats + 1) - 1
    coded = np.full(int(ends[-1]) + 1 if len(at) else 0, MAX_GAP, np.uint8)
    coded[ends] = last
    return coded


def _positions_of(coded: Any) -> Any:
    """The inverse of `_gaps_of`."""
    reached = np.cumsum(coded, dtype=np.int64)[coded < MAX_GAP]
    return reached + np.arange(len(reached))
