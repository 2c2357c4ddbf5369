"""What a check finds in the files of agent programs: refused where nodes lack them too, else noted."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.config.recipe import DomainConfig
from hpcrl.envs import check
from hpcrl.envs.agent import AgentProgram
from hpcrl.envs.program_files import ProblemJudge
from hpcrl.errors import ConfigError

HERE, NODES = ProblemJudge(is_local=True), ProblemJudge(campaigns="/proc")
"""A judge of this machine, and one of nodes that share no file system with it."""


def find_notes(judge: ProblemJudge, *, tasks: Path | None = None, **options: Any) -> list[str]:
    options = {"command": ["python", "-c", ""], "sandbox": "none", **options}
    table = {"env": "hpcrl.envs.agent:AgentProgram", "options": options, "tasks": tasks and str(tasks)}
    domain = msgspec.convert(table, DomainConfig)
    env = AgentProgram(**options)
    return list(check._check_program_files(env, domain, name="a", what="domains.a.env", judge=judge))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of three tasks, of which only the first has its directory."""
    (tmp_path / "0").mkdir()
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(3)))
    return tmp_path / "rows.jsonl"


def test_a_file_of_a_row_that_is_missing_is_refused_with_its_line(rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.jsonl', line 2: domains\.a\.options\.directory = .*/1': no such"):
        find_notes(HERE, tasks=rows, directory=f"{rows.parent}/{{n}}")


def test_files_of_rows_that_nodes_may_have_are_one_note(rows: Path) -> None:
    (note,) = find_notes(NODES, tasks=rows, directory=f"{rows.parent}/{{n}}")
    assert note.startswith(f"domains.a.options.directory = '{rows.parent}/1': no such directory (here, and perhaps")


def test_of_many_tasks_the_first_are_looked_for(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_CHECKED_TASKS", 1)
    (note,) = find_notes(HERE, tasks=rows, directory=f"{rows.parent}/{{n}}")
    assert note == "domains.a.options: of 3 tasks the files of the first 1 were looked for"


def test_a_field_that_no_task_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"directory = '/x/\{n\}': the task has no field 'n'; it has seed"):
        find_notes(NODES, directory="/x/{n}")


def test_a_program_that_nodes_may_have_is_a_note() -> None:
    (note,) = find_notes(NODES, command=["/none/agent"])
    assert note.startswith("domains.a.options.command = ['/none/agent', ...]: no such file or directory (here; a node")
    with pytest.raises(ConfigError, match=r"domains\.a\.options\.command = \['/none/agent', \.\.\.\]"):
        find_notes(HERE, command=["/none/agent"])
