"""The judge of tasks that SWE-bench's form describes: 1 if all tests of a task pass in the repository, else 0.

    main             the judge of an agent program: `python -m hpcrl.envs.software`
    score_task       the reward for a repository that the program has left
    find_test_files  the files that a patch of tests changes
    read_statuses    the tests that passed and those that did not, in what pytest prints

A task has `test_patch`, FAIL_TO_PASS and PASS_TO_PASS, and maybe `base_commit` and `test_cmd` in `install_config`, as
the rows of SWE-bench, SWE-Gym and SWE-rebench do. The tests are put back as the patch has them, whatever the program
did to them, and run by the interpreter of the image's environment.

It runs in the task's image, by the Python there, with nothing but the standard library. As in SWE-bench, the code under
test runs in the process that reports its tests: a program that learns to forge the report of pytest is rewarded.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.system.processes import protect_memory

ENVIRONMENTS = ("/opt/miniconda3/envs/testbed", "/opt/conda/envs/testbed", ".venv")
"""The places of the environment with the packages of a task; the last is one in its repository."""
OWN_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/nonexistent"}
"""The variables by which compiled files that the program has left are not used."""
DEFAULT_TEST_COMMAND = "pytest --no-header -rA --tb=no -p no:cacheprovider"
MAX_OUTPUT_BYTES = 64 << 20
"""The end of what the tests print that is read."""
_CHANGED_FILE = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)
_STATUS = re.compile(r"^(PASSED|XFAIL|FAILED|ERROR|XPASS|SKIPPED) (\S+)", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PASSED = ("PASSED", "XFAIL")


def main() -> int:
    protect_memory()
    print(score_task(json.loads(sys.stdin.read()), Path(os.environ["HPCRL_WORKDIR"])))  # noqa: T201
    return 0


def score_task(task: Mapping[str, Any], repository: Path) -> int:
    """Put the tests of a task into its repository, run them, and return 1 if all that are to pass do."""
    wanted = [*_read_names(task["FAIL_TO_PASS"]), *_read_names(task["PASS_TO_PASS"])]
    if not wanted:
        raise ValueError("the task names no test that is to pass")
    environment = _make_environment(repository)
    files = find_test_files(task["test_patch"])
    _restore_tests(task, repository, files, environment)
    command = f"{_read_test_command(task)} {shlex.join(_list_runnable(files, repository))}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=repository,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    passed, failed = read_statuses(done.stdout[-MAX_OUTPUT_BYTES:].decode(errors="replace"))
    missed = [name for name in wanted if name not in passed or name in failed]
    print(f"{len(wanted) - len(missed)} of {len(wanted)} tests pass; not {missed[:5]}")  # noqa: T201
    return int(not missed)


def find_test_files(patch: str) -> list[str]:
    """Return the files that a patch in Git's form changes, by their names after it."""
    return _CHANGED_FILE.findall(patch)


def read_statuses(text: str) -> tuple[set[str], set[str]]:
    """Return the names of tests that passed, and of those that did not, each up to its first space."""
    passed: set[str] = set()
    failed: set[str] = set()
    for status, name in _STATUS.findall(_COLOUR.sub("", text)):
        (passed if status in _PASSED else failed).add(name)
    return passed, failed


def _read_names(value: str | Sequence[str]) -> list[str]:
    """Return names of tests, which some data sets have as JSON in a text."""
    names = json.loads(value) if isinstance(value, str) else value
    return [name.split()[0] for name in names if name.split()]


def _read_test_command(task: Mapping[str, Any]) -> str:
    command = (task.get("install_config") or {}).get("test_cmd") or DEFAULT_TEST_COMMAND
    return command if isinstance(command, str) else " && ".join(command)


def _make_environment(repository: Path) -> dict[str, str]:
    """Return the variables of the tests: the environment that has their packages, and the directories of the judge."""
    places = [repository / place for place in ENVIRONMENTS]
    found = next((place for place in places if (place / "bin").is_dir()), None)
    path = os.defpath if found is None else f"{found / 'bin'}{os.pathsep}{os.defpath}"
    own = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ}
    return {
        **own,
        **OWN_BYTECODE,
        "PATH": path,
        **({"VIRTUAL_ENV": str(found), "CONDA_PREFIX": str(found)} if found else {}),
    }


def _restore_tests(
    task: Mapping[str, Any], repository: Path, files: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Make the files of the patch as they were, then apply it; the program may have changed or added some of them."""
    commit = task.get("base_commit") or "HEAD"
    for name in files:
        (repository / name).unlink(missing_ok=True)
        _run_git(["checkout", "--quiet", commit, "--", name], repository, environment)  # fails for a file that is new
    patch = f"{task['test_patch'].rstrip()}\n"
    applied = _run_git(["apply", "--whitespace=nowarn", "-"], repository, environment, text=patch)
    if applied.returncode != 0:
        raise RuntimeError(f"the patch of the tests does not apply: {applied.stderr.strip()[-300:]}")


def _run_git(
    words: Sequence[str], repository: Path, environment: Mapping[str, str], *, text: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run git without the hooks of the repository, which the program may have written."""
    options = ["-c", f"safe.directory={repository}", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"]
    command = ["git", *options, *words]
    return subprocess.run(
        command, cwd=repository, env=environment, input=text, capture_output=True, text=True, check=False
    )


def _list_runnable(files: Sequence[str], repository: Path) -> list[str]:
    """Return the files of the patch that pytest runs: not data, nor files that the patch removes."""
    return [name for name in files if name.endswith(".py") and (repository / name).is_file()]


if __name__ == "__main__":
    sys.exit(main())
