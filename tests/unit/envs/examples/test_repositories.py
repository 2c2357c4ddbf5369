"""Small broken Git repositories, repaired by an agent in a sandbox and judged by their own tests."""

import shutil
from pathlib import Path

import pytest

from hpcrl.envs.examples import repositories
from hpcrl.envs.examples.repositories import BUGS, PACKAGE, TESTS, run_judge, write_repository
from tests.support.programs import needs_bubblewrap, play

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
RUN_ONE_COMMAND = """
answer = ask("repair")["choices"][0]["message"]["content"]
import subprocess
done = subprocess.run(answer, shell=True, capture_output=True, text=True)
print(done.stdout, done.stderr, file=sys.stderr)
print(1)
"""
NUM_TESTS = sum(text.count("\ndef test_") for text in TESTS.values())
FIRST_TESTS = TESTS["test_text.py"].count("\ndef test_")
FIND_PROOF = f"""
import os, sys
frame = sys._getframe()
while frame:
    if "proof" in frame.f_locals:
        os.write(1, (frame.f_locals["proof"] + " {NUM_TESTS}").encode())
        os._exit(0)
    frame = frame.f_back
"""
REPLACE_TESTS = f"""
import importlib, types
fake = types.ModuleType("fake")
fake.__dict__.update((f"test_{{number}}", lambda: None) for number in range({NUM_TESTS - FIRST_TESTS}))
fakes = iter([fake, *[types.ModuleType("none")] * 9])
importlib.import_module = lambda name: next(fakes)
"""
"""Imported by the first tests, which hold; the repository's bug is in a module of the last."""
EQUALS_ALL = "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
EQUAL_OBJECTS = f"{EQUALS_ALL}def words(*_): return Any()\nwrap = count_words = words\n"
EQUAL_LISTS = f"{EQUALS_ALL}class Much(Any, list): pass\ndef words(*_): return Much()\nwrap = count_words = words\n"
WRITE_ANSWERS = """
import json, os
for number in range(3, 20):
    for _ in range(20):
        try: os.write(number, b'{"value": true}\\n')
        except OSError: pass
"""
REPLACE_COMPARISON = "import builtins\nbuiltins.AssertionError = SystemExit\nbuiltins.len = lambda value: 0\n"
DEEP_LISTS = "def words(text):\n    deep = []\n    for _ in range(900): deep = [deep]\n    return deep\n"
CHEATS = {
    "an exit before the tests": ("text.py", "import os\nos._exit(0)\n"),
    "added tests": None,
    "a loop without end": ("text.py", "while True: pass\n"),
    "a secret from the frames": ("__init__.py", FIND_PROOF),
    "a module that is not a test": ("__init__.py", REPLACE_TESTS),
    "an object that equals all": ("text.py", EQUAL_OBJECTS),
    "a list that equals all": ("text.py", EQUAL_LISTS),
    "answers before the questions": ("__init__.py", WRITE_ANSWERS),
    "other builtins": ("__init__.py", REPLACE_COMPARISON),
    "an answer without end": ("text.py", "import os\nwhile True: os.write(3, b'x' * 65536)\n"),
    "deep lists": (
        "text.py",
        DEEP_LISTS,
    ),
}
FORGE = """
import ctypes, os
others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
libc = ctypes.CDLL(None)
for pid in others:
    seized = libc.ptrace(0x4206, int(pid), 0, 0) == 0
    for name in ["mem", *(f"fd/{number}" for number in range(20))]:
        try:
            with open(f"/proc/{pid}/{name}", "w") as file: file.write("1.0\\n")
        except (OSError, ValueError): pass
for number in range(20):
    try: os.write(number, b"1.0\\n")
    except OSError: pass
import pathlib
for place in [os.getcwd(), "/tmp", "/episode/home"]:
    for name in ["select", "encodings", "json", "signal", "traceback", "linecache"]:
        try: pathlib.Path(place, name + ".py").write_text("import os\\nos.write(1, b'1.0\\\\n')\\nos._exit(0)")
        except OSError: pass
"""
"""It seizes, writes to and prints in place of every process that it finds, and plants modules; only in a sandbox."""


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
    is_late = CHEATS[cheat] is not None and CHEATS[cheat][0] == "__init__.py"
    row = write_repository(tmp_path, len(BUGS) - 1 if is_late else 0)
    repository = tmp_path / row["name"]
    for test in (repository / "tests").iterdir():
        test.write_text("def test_all():\n    pass\n")
    if CHEATS[cheat] is not None:
        file, text = CHEATS[cheat]
        (repository / row["package"] / file).write_text(text)
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


@needs_bubblewrap
def test_code_that_attacks_its_judge_gets_nothing_for_it(template, tmp_path):
    row = write_repository(tmp_path, 0)
    code = (
        f"ask('a')\nimport pathlib\n(pathlib.Path({row['package']!r}) / '__init__.py').write_text({FORGE!r})\nprint(1)"
    )
    trajectory = play(
        template,
        code,
        sandbox="bubblewrap",
        directory=f"{tmp_path}/{{name}}",
        task=row,
        judge_fields=["tests"],
        judge=["python", "-m", "hpcrl.envs.examples.repositories", "--judge"],
    )
    assert (trajectory.status, trajectory.turns[-1].reward) == ("done", 0.0)


@needs_bubblewrap
def test_a_program_finds_neither_the_answers_nor_the_history_of_a_checkout(template):
    examples = Path(repositories.__file__).parent
    files = [examples / "repositories.py", *examples.glob("__pycache__/repositories.*")]
    places = [*map(str, files), str(examples.parents[2] / ".git" / "HEAD")]
    code = (
        f"ask('a')\nfound = 0\nfor place in {places!r}:\n"
        "    try: found += bool(open(place, 'rb').read())\n    except OSError: pass\n"
        f"print(float(found) + os.path.exists({str(examples / 'sums.py')!r}) / 2)"
    )
    assert play(template, code, sandbox="bubblewrap").turns[-1].reward == 0.5
