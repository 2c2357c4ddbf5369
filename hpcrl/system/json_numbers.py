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
_TOO_LARGE = re.compile(rb"\d{99}|\d[eE]\+?(?:99|\d{3})|Infinity")
"""A pattern that every JSON text with a number that is too large has, and few others."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def finite_or_none(value: float | None) -> float | None:
    """Return a number that JSON can represent and that can be computed with; None for the others."""
    return float(value) if value is not None and abs(value) < MAX_MAGNITUDE else None


def load_json(data: bytes) -> Any:
    """Parse JSON; infinite numbers, and those of which sums or squares may be infinite, are NaN.

    Text that cannot be encoded (half a surrogate pair) is a ValueError, like everything that is not JSON.
    """
    if _TOO_LARGE.search(data) is None:
        value = json.loads(data)
    else:
        value = json.loads(data, parse_float=_read_float, parse_int=_read_int, parse_constant=lambda _: math.nan)
    if _SURROGATE.search(data) is not None:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _read_float(text: str) -> float:
    value = float(text)
    return value if abs(value) < MAX_MAGNITUDE else math.nan


def _read_int(text: str) -> float:
    value = int(text)
    return value if abs(value) < MAX_MAGNITUDE else math.nan
