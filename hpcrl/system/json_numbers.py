"""Numbers that JSON can represent.

finite_or_none    the number, or None
"""

import math


def finite_or_none(value: float | None) -> float | None:
    """Return a number that JSON can represent; None for the others."""
    return float(value) if value is not None and math.isfinite(value) else None
