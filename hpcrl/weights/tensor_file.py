"""Write a safetensors file tensor by tensor, so that at most one has to be in memory."""

import itertools
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hpcrl.system.files import sync_file
from hpcrl.weights.checksum import hash_bytes
from hpcrl.weights.layout import TensorLayout

DTYPE_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "uint16": "U16",
    "float32": "F32",
    "int32": "I32",
    "uint32": "U32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""safetensors' names for torch's types."""
_LENGTH = struct.Struct("<Q")
HEADER_ALIGNMENT = 8


def write_tensors(layout: TensorLayout, tensors: Iterable[memoryview], path: Path) -> dict[str, str]:
    """Write all tensors of a layout, given in its order, to a durable, private file; return their checksums."""
    header = _encode_header(layout)
    checksums = {}
    with path.open("xb") as file:
        path.chmod(0o600)
        file.write(_LENGTH.pack(len(header)) + header)
        for tensor, data in zip(layout.tensors, tensors, strict=True):
            checksums[tensor.name] = hash_bytes(data).hex()
            file.write(data)
    sync_file(path)
    return checksums


def _encode_header(layout: TensorLayout) -> bytes:
    """Encode types, shapes and offsets, padded so that the data start at a multiple of 8 bytes."""
    ends = list(itertools.accumulate((tensor.nbytes for tensor in layout.tensors), initial=0))
    entries = {
        tensor.name: {"dtype": DTYPE_CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": (start, end)}
        for tensor, (start, end) in zip(layout.tensors, itertools.pairwise(ends), strict=True)
    }
    header = msgspec.json.encode(entries)
    return header + b" " * (-len(header) % HEADER_ALIGNMENT)
