"""Where the locale is C, output is ASCII."""

import pytest

from hpcrl.system.output_encoding import is_ascii_only


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"LC_ALL": "C"}, True),
        ({"LC_ALL": "POSIX", "LANG": "de_DE.UTF-8"}, True),
        ({"LC_ALL": "C.UTF-8"}, False),
        ({"LC_ALL": "", "LC_CTYPE": "C", "LANG": "de_DE.UTF-8"}, True),
        ({"LC_CTYPE": "de_DE.UTF-8", "LANG": "C"}, False),
        ({"LANG": "C"}, True),
        ({"LC_CTYPE": "C.UTF-8", "LANG": "C"}, True),
        ({"LC_CTYPE": "C.UTF-8"}, False),
        ({"LC_ALL": "C", "PYTHONUTF8": "1"}, False),
        ({"LC_ALL": "C", "PYTHONIOENCODING": "utf-8"}, False),
    ],
)
def test_the_first_locale_that_is_set_decides(environment: dict[str, str], expected: bool) -> None:
    assert is_ascii_only(environment) is expected
