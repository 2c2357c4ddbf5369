"""The wheel trains in an environment that has only what it asks for, far from the repository."""

from pathlib import Path

import pytest

from tests.support.campaigns import SMALL
from tests.support.wheels import ROOT, build_wheel, install_wheel, run_installed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_an_installed_wheel_trains_the_quickstart(tmp_path: Path) -> None:
    directory = tmp_path / "empty"
    directory.mkdir()
    program = install_wheel(build_wheel(tmp_path), tmp_path / "installed") / "hpcrl"
    done = run_installed(program, "submit", "quickstart", "--site", "local", "--watch", *SMALL, cwd=directory)
    assert "campaign quickstart-1 is done" in done
    assert str(ROOT) not in done
    assert "Done after 4 of 4 steps" in run_installed(program, "report", "quickstart-1", cwd=directory)
