"""Small broken Git repositories, repaired by an agent in a sandbox and judged by their own tests."""

import shutil

import pytest

from hpcrl.envs.examples.repositories import BUGS, PACKAGE, run_judge, write_repository
from hpcrl.models.chat_layout import load_chat_template
from tests.support.programs import needs_bubblewrap, play

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
RUN_ONE_COMMAND = """
answer = ask("repair")["choices"][0]["message"]["content"]
import subprocess
done = subprocess.run(answer, shell=True, capture_output=True, text=True)
print(done.stdout, done.stderr, file=sys.stderr)
print(1)
"""
CHEATS = {
    "an exit before the tests": "import os\nos._exit(0)\n",
    "tests of its own": None,
    "a loop without end": "while True: pass\n",
}


@pytest.fixture
def template(tiny_model_dir):
    return load_chat_template(tiny_model_dir)


@pytest.mark.parametrize("number", range(len(BUGS)))
def test_the_tests_of_each_repository_fail_until_its_bug_is_repaired(tmp_path, number):
    row = write_repository(tmp_path, number)
    repository, file = tmp_path / row["name"], BUGS[number].file
    assert run_judge(repository, row) == 0.0
    (repository / row["package"] / file).write_text(PACKAGE[file])
    assert run_judge(repository, row) == 1.0


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_cheat_passes_the_judge(tmp_path, cheat, monkeypatch):
    monkeypatch.setattr("hpcrl.envs.examples.repositories.TEST_TIMEOUT_S", 0.5)
    row = write_repository(tmp_path, 0)
    repository = tmp_path / row["name"]
    for test in (repository / "tests").iterdir():
        test.write_text("def test_all():\n    pass\n")
    if CHEATS[cheat] is not None:
        (repository / row["package"] / "text.py").write_text(CHEATS[cheat])
    assert run_judge(repository, row) == 0.0


@needs_bubblewrap
@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("sed -i 's/in intervals:/in intervals*1:/' */intervals.py", 0.0),
        ("sed -i 's/in intervals:/in sorted(intervals):/' */intervals.py && git commit -qam x", 1.0),
    ],
)
def test_an_agent_repairs_a_repository_in_a_sandbox(template, tmp_path, command, reward):
    number = next(number for number, bug in enumerate(BUGS) if bug.right == "sorted(intervals)")
    row = write_repository(tmp_path, number)
    git = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a"}
    trajectory = play(
        template,
        RUN_ONE_COMMAND,
        word=f"{command}<eos>",
        limits={"max_new_tokens": 200, "context_length": 400},
        sandbox="bubblewrap",
        directory=f"{tmp_path}/{{name}}",
        task=row,
        environment=git,
        judge_fields=["tests"],
        judge=["python", "-m", "hpcrl.envs.examples.repositories", "--judge"],
    )
    assert (trajectory.status, trajectory.extra) == ("done", {})
    assert trajectory.turns[-1].reward == reward
