"""Numbers that JSON can represent, and that can be computed with.

finite_or_none    the number, or None
load_json         parse JSON of any origin, without numbers that are too large
MAX_MAGNITUDE     the limit: sums and squares of such numbers are finite
"""

import json
import math
import re
from typing import Any

MAX_MAGNITUDE = 1e99
_TOO_LARGE = re.compile(rb"\d{99}|\d[eE]\+?\d{2}|Infinity")
"""A pattern that every JSON text with a number that is too large has, and few others."""
_MANY_DIGITS = 99 * b"0"
_SHAPES = bytes.maketrans(b"123456789E", b"000000000e")
"""Makes all digits the same: a text without an exponent and without 99 of them has no number that is too large."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def finite_or_none(value: float | None) -> float | None:
    """Return a number that JSON can represent and that can be computed with; None for the others."""
    return float(value) if value is not None and abs(value) < MAX_MAGNITUDE else None


def load_json(data: bytes) -> Any:
    """Parse JSON; infinite numbers, and those of which sums or squares may be infinite, are NaN.

    Text that cannot be encoded (half a surrogate pair) or is nested too deep is a ValueError, like what is not JSON.
    """
    try:
        if not _has_too_large(data):
            value = json.loads(data)
        else:
            value = json.loads(data, parse_float=_read_float, parse_int=_read_int, parse_constant=lambda _: math.nan)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if _SURROGATE.search(data) is not None:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _has_too_large(data: bytes) -> bool:
    """Return whether the pattern is found; it is slow, and few texts have what it needs."""
    shapes = data.translate(_SHAPES)
    may_have = b"0e" in shapes or _MANY_DIGITS in shapes or b"Infinity" in data
    return may_have and _TOO_LARGE.search(data) is not None


def _read_float(text: str) -> float:
    value = float(text)
    return value if abs(value) < MAX_MAGNITUDE else math.nan


def _read_int(text: str) -> float:
    try:
        value = int(text)
    except ValueError:  # more digits than Python converts
        return math.nan
    return value if abs(value) < MAX_MAGNITUDE else math.nan
