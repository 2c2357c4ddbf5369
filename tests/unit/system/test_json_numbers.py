"""JSON of any origin has no number that cannot be computed with."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.system.json_numbers import MAX_MAGNITUDE, load_json


@pytest.mark.parametrize(
    "text", ["1e99", "12345e98", "123E+98", "-1e400", "Infinity", "NaN", 99 * "9" + "0", 5000 * "9"]
)
def test_a_number_that_is_too_large_is_none(text: str) -> None:
    (value,) = load_json(f"[{text}]".encode())
    assert math.isnan(value)


@given(st.integers(-(10**320), 10**320), st.integers(0, 320))
def test_every_number_is_below_the_limit_or_none(mantissa: int, exponent: int) -> None:
    for text in (f"{mantissa}e{exponent}", f"{mantissa}.5E+{exponent}", str(mantissa)):
        (value,) = load_json(f'["a0e1", {text}]'.encode())[1:]
        assert math.isnan(value) if abs(float(text)) >= MAX_MAGNITUDE else float(value) == float(text)
