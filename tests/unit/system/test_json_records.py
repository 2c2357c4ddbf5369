"""Everything that is wrong with a JSON text is one error."""

import msgspec
import pytest

from hpcrl.system.json_numbers import load_json
from hpcrl.system.json_records import decode_record

DEEP = b"[" * 100_000


class Point(msgspec.Struct):
    x: int


def test_a_value_is_decoded_as_its_type():
    assert decode_record(b'{"x": 3}', Point) == Point(3)
    assert decode_record('{"x": 3}') == {"x": 3}


@pytest.mark.parametrize(
    ("data", "kind", "reason"),
    [
        (DEEP, list, "nested too deep"),
        (b'"\xff"', str, "(?i)utf-8"),
        (b'{"x": "a"}', Point, "Expected `int`"),
        (b"{", Point, "truncated"),
    ],
)
def test_each_fault_is_a_decode_error(data, kind, reason):
    with pytest.raises(msgspec.DecodeError, match=reason):
        decode_record(data, kind)


def test_json_of_any_origin_that_is_nested_too_deep_is_a_value_error():
    with pytest.raises(ValueError, match="nested too deep"):
        load_json(DEEP)
