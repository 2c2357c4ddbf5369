"""The commands of the pages about an environment, a reward and an agent of one's own, with the files that they show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.campaigns import SMALL
from tests.support.doc_blocks import TUTORIAL, find_blocks, find_files, list_commands

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
HOWTO = TUTORIAL.parent / "howto"


@pytest.mark.parametrize("page", ["own-environment", "own-reward", "own-agent"])
def test_the_commands_of_a_page_work_with_its_files(page: str, campaigns: Path, tmp_path: Path) -> None:
    campaigns.mkdir(parents=True, exist_ok=True)  # a trial makes none
    path = HOWTO / f"{page}.md"
    for name, text in find_files(path).items():
        (tmp_path / name).write_text(text)
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = os.environ | {"PATH": programs, "PYTHONPATH": str(tmp_path)}
    commands = [words for block in find_blocks(path, "sh") for words in list_commands(block.text)]
    done = {}
    for program, verb, *words in (words for words in commands if words[0] == "hpcrl"):
        small = SMALL if verb == "submit" else ()
        ran = subprocess.run(
            [program, verb, *words, *small], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        done[verb] = ran.stdout
    assert ": 3 episodes (" in done["try"]
    if "submit" in done:
        assert "in 4 steps" in done["submit"]
        assert len(list(campaigns.iterdir())) == 1
