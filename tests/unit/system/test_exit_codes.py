"""The exit code of a supervisor after its child has ended."""

import pytest

from hpcrl.system.exit_codes import encode_exit_code


@pytest.mark.parametrize(("return_code", "exit_code"), [(0, 0), (3, 3), (-15, 143), (-9, 137)])
def test_a_signal_becomes_the_code_that_a_shell_gives_it(return_code: int, exit_code: int) -> None:
    assert encode_exit_code(return_code) == exit_code
