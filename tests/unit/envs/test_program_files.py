"""What a command needs and does not find, and which of it is known to be on nodes too."""

import os
import sys
from pathlib import Path

import pytest

from hpcrl.envs.agent import AgentProgram
from hpcrl.envs.program_files import ProblemJudge, ProgramProblem, find_command_problems

SYSTEM = ("/usr", "/bin", "/lib", "/lib64", sys.prefix, sys.base_prefix)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A directory with an agent that is run by the system's sh."""
    (tmp_path / "code").mkdir()
    return write_program(tmp_path / "code" / "agent", "#!/bin/sh").parent


def write_program(path: Path, first_line: str) -> Path:
    path.write_text(f"{first_line}\n")
    path.chmod(0o755)
    return path


def find(command: list[str], *shown: str, path: str | None = "/usr/bin:/bin", has_files: bool = False) -> list[str]:
    problems = find_command_problems(
        command,
        option="command",
        shown=(*SYSTEM, *shown),
        path=path,
        has_files=has_files,
        readable="readable",
        has_own_modules=False,
    )
    return [problem.text for problem in problems]


def test_programs_that_the_sandbox_shows_have_no_problem(code: Path) -> None:
    agent = str(code / "agent")
    assert find(["sh", "-c", "x"]) == []
    assert find(["python", "-m", "json.tool"]) == []
    assert find([agent], str(code)) == []
    assert find(["agent"], str(code), path=str(code)) == []
    assert find(["sh", agent], str(code)) == []
    assert find(["/episode/work/run"]) == []
    assert find(["sh", "/dev/stdin"]) == []


def test_a_program_that_is_nowhere_on_path_is_named_with_path() -> None:
    (text,) = find(["minni", "-x"])
    assert text.startswith("command = ['minni', ...]: no such program on PATH (/usr/bin:/bin): ")


@pytest.mark.parametrize("command", [["{code}/agent"], ["sh", "{code}/agent"]])
def test_a_file_that_the_sandbox_does_not_show_is_named(code: Path, command: list[str]) -> None:
    (text,) = find([part.format(code=code) for part in command])
    assert text.endswith(f"the sandbox does not show '{code}/agent': add it to readable")


def test_a_program_that_only_the_job_finds_on_path_is_named_with_its_place(code: Path) -> None:
    (text,) = find(["agent"], path=f"{code}:/usr/bin")
    assert f"is '{code}/agent': the sandbox does not show" in text


def test_a_link_out_of_what_the_sandbox_shows_is_named_with_its_target(code: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "agent").symlink_to(code / "agent")
    (text,) = find(["agent"], str(tmp_path / "bin"), path=str(tmp_path / "bin"))
    assert f"does not show '{tmp_path}/bin/agent' ({code}/agent)" in text
    assert find(["agent"], str(tmp_path / "bin"), str(code), path=str(tmp_path / "bin")) == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("#!/none/bin/python -I", "'/none/bin/python', which is not there"),
        ("#!{hidden}", "which the sandbox does not show"),
    ],
)
def test_the_interpreter_of_a_script_is_looked_for(code: Path, tmp_path: Path, line: str, why: str) -> None:
    hidden = write_program(tmp_path / "python", "#!/bin/sh")
    write_program(code / "agent", line.format(hidden=hidden))
    (text,) = find([str(code / "agent")], str(code))
    assert why in text


def test_a_file_that_is_not_executable_is_named(code: Path) -> None:
    (code / "agent").chmod(0o600)
    (text,) = find([str(code / "agent")], str(code))
    assert "not an executable file" in text


def test_a_relative_program_is_one_of_the_episodes_directory() -> None:
    assert find(["./run", "x"], has_files=True) == []
    assert find(["python", "run.py"], has_files=True) == []
    for command in (["./run"], ["python", "run.py"]):
        (text,) = find(command)
        assert "is neither beside the TOML file that sets it nor in the current directory" in text


def test_a_module_that_python_does_not_find_is_named() -> None:
    (text,) = find(["python", "-m", "no_such_agent.main"])
    assert f"-m no_such_agent.main: {sys.executable} finds no module 'no_such_agent'" in text


def test_a_variable_that_is_not_set_is_named_and_never_certain_on_a_node(code: Path) -> None:
    program = AgentProgram(command=["python", "-c", ""], readable=["$NO_SUCH_VARIABLE/code"])
    (problem,) = program.find_problems()
    assert problem.text.startswith("readable has '$NO_SUCH_VARIABLE/code': $NO_SUCH_VARIABLE is not set here")
    assert not ProblemJudge(campaigns="/").is_certain(problem)
    assert ProblemJudge(is_local=True).is_certain(problem)


def test_home_and_variables_are_expanded(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(code.parent))
    monkeypatch.setenv("CODE", str(code))
    program = AgentProgram(command=["~/code/agent"], readable=["$CODE"], judge=["sh", "$CODE/agent"], sandbox="none")
    assert list(program.find_problems()) == []


def test_a_path_is_missing_on_nodes_only_where_they_share_the_file_system(tmp_path: Path) -> None:
    missing = ProgramProblem(text="", places=(str(tmp_path / "none" / "agent"),))
    assert ProblemJudge(campaigns=str(tmp_path)).is_certain(missing)
    assert not ProblemJudge(campaigns="/proc").is_certain(missing)
    assert not ProblemJudge(campaigns="$SCRATCH/hpcrl").is_certain(missing)
    assert ProblemJudge(is_local=True).is_certain(missing)


def test_a_program_that_is_hidden_here_may_be_found_elsewhere_on_a_node(code: Path, tmp_path: Path) -> None:
    program = AgentProgram(command=["agent"], environment={"PATH": f"{code}:/proc"})
    (problem,) = [problem for problem in program.find_problems() if "does not show" in problem.text]
    assert not ProblemJudge(campaigns=str(tmp_path)).is_certain(problem)


def test_a_prologue_may_set_the_path_that_finds_a_program(tmp_path: Path) -> None:
    missing = ProgramProblem(text="", places=(str(tmp_path),), depends_on_variables=True)
    assert ProblemJudge(campaigns=str(tmp_path)).is_certain(missing)
    assert not ProblemJudge(campaigns=str(tmp_path), has_prologue=True).is_certain(missing)


def test_the_command_of_an_image_is_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "a.sif").write_text("")
    problems = AgentProgram(command=["minni"], image=str(tmp_path / "a.sif")).find_problems()
    assert not [problem.text for problem in problems if "minni" in problem.text]


def test_the_path_of_the_recipe_is_searched(code: Path) -> None:
    options = {"command": ["agent"], "readable": [str(code)]}
    assert any("no such program" in problem.text for problem in AgentProgram(**options).find_problems())
    path = f"{code}{os.pathsep}/usr/bin"
    assert list(AgentProgram(**options, environment={"PATH": path}, sandbox="none").find_problems()) == []
