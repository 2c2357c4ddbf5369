"""Small broken Git repositories with their tests: `python -m hpcrl.envs.examples.repositories DIRECTORY --count 60`.

    main               make the repositories and tasks.jsonl, which has a row for each
    write_repository   make one
    run_judge          score a repaired one: 1 if all of the original tests pass, else 0
    CodeProcess        the process in which the code that is tested runs, apart from its tests
    RemoteObject       a module or an object of that code, as its tests see it
    CallFailure        a call of that code has no value
    Bug, BUGS, PACKAGE, TESTS  what is broken, and the package before that
    TEST_TIMEOUT_S, MAX_ANSWER_BYTES  limits of the code

As the judge of an agent program, it is called as `... repositories --judge`; it finds the original tests in the task.
"""

import argparse
import builtins
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.system.processes import protect_memory

TEST_TIMEOUT_S = 60.0
"""The time limit of all tests together."""
MAX_ANSWER_BYTES = 1 << 20
_AUTHOR = ("-c", "user.name=hpcrl", "-c", "user.email=hpcrl@localhost")
PACKAGE = {
    "text.py": '''def words(text):
    """Return the words of a text in lower case."""
    return [word.strip(".,;!?").lower() for word in text.split()]


def count_words(text):
    """Return how often each word occurs."""
    counts = {}
    for word in words(text):
        counts[word] = counts.get(word, 0) + 1
    return counts


def wrap(text, width):
    """Break a text into lines of at most `width` characters."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line] if line else lines
''',
    "numbers.py": '''def mean(values):
    """Return the mean, 0 for none."""
    return sum(values) / len(values) if values else 0


def median(values):
    """Return the middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def primes(limit):
    """Return the primes below `limit`."""
    return [n for n in range(2, limit) if all(n % d for d in range(2, int(n**0.5) + 1))]


def clamp(value, low, high):
    """Return the value, or the bound that it exceeds."""
    return max(low, min(value, high))
''',
    "intervals.py": '''def overlap(first, second):
    """Return whether two half-open intervals have a point in common."""
    return first[0] < second[1] and second[0] < first[1]


def merge(intervals):
    """Join the intervals that touch or overlap."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
''',
    "store.py": '''class Store:
    """A mapping that forgets what was not used for the longest time."""

    def __init__(self, size):
        self.size = size
        self.items = {}

    def get(self, key, default=None):
        if key not in self.items:
            return default
        self.items[key] = self.items.pop(key)
        return self.items[key]

    def put(self, key, value):
        self.items.pop(key, None)
        self.items[key] = value
        if len(self.items) > self.size:
            del self.items[next(iter(self.items))]
''',
}
"""The modules of the package, by file name."""
TESTS = {
    "test_text.py": """from {package}.text import count_words, words, wrap


def test_words_have_no_marks_and_no_capitals():
    assert words("One, two. Three!") == ["one", "two", "three"]


def test_words_are_counted():
    assert count_words("a b A a.") == {{"a": 3, "b": 1}}


def test_lines_are_as_long_as_allowed():
    assert wrap("aa bb cc", 5) == ["aa bb", "cc"]
    assert wrap("aaaa", 2) == ["aaaa"]
    assert wrap("", 3) == []
""",
    "test_numbers.py": """from {package}.numbers import clamp, mean, median, primes


def test_mean():
    assert mean([1, 2, 6]) == 3
    assert mean([]) == 0


def test_median():
    assert median([5, 1, 3]) == 3
    assert median([4, 1, 3, 2]) == 2.5


def test_primes():
    assert primes(30) == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    assert primes(10) == [2, 3, 5, 7]
    assert primes(5) == [2, 3]


def test_clamp():
    assert [clamp(value, 1, 3) for value in (0, 2, 9)] == [1, 2, 3]
""",
    "test_intervals.py": """from {package}.intervals import merge, overlap


def test_intervals_that_touch_do_not_overlap():
    assert overlap((0, 2), (1, 3)) and overlap((1, 3), (0, 2))
    assert not overlap((0, 1), (1, 2)) and not overlap((1, 2), (0, 1))


def test_intervals_are_merged():
    assert merge([(3, 4), (0, 1), (1, 2)]) == [(0, 2), (3, 4)]
    assert merge([(0, 9), (1, 2)]) == [(0, 9)]
""",
    "test_store.py": """from {package}.store import Store


def test_what_was_not_used_is_forgotten():
    store = Store(2)
    store.put("a", 1)
    store.put("b", 2)
    assert store.get("a") == 1
    store.put("c", 3)
    assert (store.get("a"), store.get("b"), store.get("c")) == (1, None, 3)


def test_a_value_is_replaced():
    store = Store(2)
    store.put("a", 1)
    store.put("b", 2)
    store.put("a", 3)
    store.put("c", 4)
    assert (store.get("a"), store.get("b", 0)) == (3, 0)
""",
}
"""The tests of the package, by file name."""


class Bug(NamedTuple):
    """One line of the package, and what stands there in place of it."""

    file: str
    right: str
    wrong: str


BUGS = (
    Bug("text.py", "return [word.strip", "return [word.rstrip().lstrip"),
    Bug("text.py", ".lower() for", " for"),
    Bug("text.py", "counts.get(word, 0) + 1", "counts.get(word, 1) + 1"),
    Bug("text.py", "for word in words(text)", "for word in text.split()"),
    Bug("text.py", "len(line) + 1 + len(word) > width", "len(line) + 1 + len(word) >= width"),
    Bug("text.py", "return [*lines, line] if line else lines", "return lines"),
    Bug("text.py", "if line and len(line)", "if len(line)"),
    Bug("numbers.py", "/ len(values) if values else 0", "/ len(values)"),
    Bug("numbers.py", "ordered = sorted(values)", "ordered = list(values)"),
    Bug("numbers.py", "(ordered[half - 1] + ordered[half]) / 2", "(ordered[half - 1] + ordered[half]) // 2"),
    Bug("numbers.py", "ordered[half - 1] + ordered[half]", "ordered[half] + ordered[half]"),
    Bug("numbers.py", "int(n**0.5) + 1", "int(n**0.5)"),
    Bug("numbers.py", "range(2, limit)", "range(3, limit)"),
    Bug("numbers.py", "max(low, min(value, high))", "min(low, max(value, high))"),
    Bug("intervals.py", "first[0] < second[1] and", "first[0] <= second[1] and"),
    Bug("intervals.py", "second[0] < first[1]", "second[0] < first[0]"),
    Bug("intervals.py", "start <= merged", "start < merged"),
    Bug("intervals.py", "max(end, merged[-1][1])", "end"),
    Bug("intervals.py", "sorted(intervals)", "intervals"),
    Bug("store.py", "self.items[key] = self.items.pop(key)", "pass"),
    Bug("store.py", "        self.items.pop(key, None)\n", ""),
    Bug("store.py", "> self.size", ">= self.size"),
)
_ANSWER_CALLS = """
import json, os, sys

answers = os.fdopen(os.dup(1), "wb", 0)
requests = os.fdopen(os.dup(0), "rb")
null = os.open(os.devnull, os.O_RDWR)
for number in range(3):
    os.dup2(null, number)  # what the code prints is not an answer
objects = []

def encode(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", *map(encode, value)]
    if isinstance(value, dict):
        return ["dict", *([encode(key), encode(one)] for key, one in value.items())]
    objects.append(value)
    return ["object", len(objects) - 1]

def decode(value):
    if not isinstance(value, list):
        return value
    kind, *parts = value
    return decode_dict(parts) if kind == "dict" else (tuple if kind == "tuple" else list)(map(decode, parts))

def decode_dict(parts):
    return {decode(key): decode(one) for key, one in parts}

sys.path.insert(0, os.getcwd())
for line in requests:
    owner, name, values = json.loads(line)
    try:
        if isinstance(owner, str):
            __import__(owner)
        target = sys.modules[owner] if isinstance(owner, str) else objects[owner]
        answer = {"value": encode(getattr(target, name)(*map(decode, values)))}
    except BaseException as error:
        answer = {"error": type(error).__name__}
    answers.write(json.dumps(answer).encode() + bytes([10]))
"""
"""The process with the code that is tested: it makes the calls that it is sent, and answers with the values."""


class CallFailure(Exception):
    """A call of the code that is tested has no value."""


class CodeProcess:
    """The process in which the code that is tested runs; only values come back, as JSON, and nothing that has methods.

    A list, a number or a text that comes back is one of this process, so that no class of the code decides what equals
    what. An object of the code stays there: here it is a RemoteObject, whose methods are called there.
    """

    def __init__(self, directory: Path) -> None:
        self._deadline = time.monotonic() + TEST_TIMEOUT_S
        self._received = b""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", f"pycache_prefix={os.devnull}", "-c", _ANSWER_CALLS],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()

    def call(self, owner: "str | int", name: str, values: Sequence[object]) -> object:
        """Call a function of a module, or a method of an object; raises CallFailure."""
        request = json.dumps([owner, name, [_encode_value(value) for value in values]]).encode() + b"\n"
        try:
            os.write(self._requests, request)  # shorter than the pipe's buffer
            answer = json.loads(self._read_line())
            if "error" not in answer:
                return self._decode_value(answer["value"])
        except (OSError, EOFError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise CallFailure(f"{name}: {type(error).__name__}: {error}") from None
        raise CallFailure(f"{name}: {str(answer['error'])[:100]}")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _read_line(self) -> bytes:
        while b"\n" not in self._received:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise TimeoutError("no answer in time")
            data = os.read(self._answers, 1 << 16)
            self._received += data
            if not data or len(self._received) > MAX_ANSWER_BYTES:
                raise EOFError("no answer")
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _decode_value(self, value: Any) -> object:
        if not isinstance(value, list):
            if isinstance(value, dict):
                raise TypeError("not a value")
            return value
        kind, *parts = value
        match kind:
            case "object":
                return RemoteObject(self, int(parts[0]))
            case "dict":
                return {self._decode_value(key): self._decode_value(one) for key, one in parts}
            case "list":
                return [self._decode_value(part) for part in parts]
            case "tuple":
                return tuple(self._decode_value(part) for part in parts)
        raise TypeError("not a value")


class RemoteObject:
    """A module or an object of the code that is tested, for the tests: what they call of it is called there."""

    def __init__(self, process: CodeProcess, owner: "str | int") -> None:
        self._process = process
        self._owner = owner

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *values: self._process.call(self._owner, name, values)


def write_repository(directory: Path, number: int) -> dict[str, object]:
    """Make repository `number` in `directory`/name, with one bug; returns its row."""
    bug = BUGS[number % len(BUGS)]
    package = "".join(random.Random(number).choices("bdfgklmnprst", k=2)) + "kit"
    name = f"{number:04d}-{package}"
    repository = directory / name
    for file, text in PACKAGE.items():
        assert file != bug.file or text.count(bug.right) == 1, bug
        _write(repository / package / file, text.replace(bug.right, bug.wrong) if file == bug.file else text)
    _write(repository / package / "__init__.py", "")
    tests = {file: text.format(package=package) for file, text in TESTS.items()}
    for file, text in tests.items():
        _write(repository / "tests" / file, text)
    _write(repository / "README.md", f"# {package}\n\nRun the tests with `python -m pytest`.\n")
    for command in (["init", "-q"], ["add", "-A"], [*_AUTHOR, "commit", "-q", "-m", "First version"]):
        subprocess.run(["git", *command], cwd=repository, check=True)
    return {"name": name, "path": str(repository.absolute()), "package": package, "tests": tests}


def run_judge(workdir: Path, task: dict[str, object]) -> float:
    """Return 1 if the original tests pass on the package in `workdir`, else 0.

    The tests run here, the package in another process: this process neither imports nor reads its files.
    """
    package, tests = str(task["package"]), task["tests"]
    assert isinstance(tests, dict)
    if not (workdir / package).is_dir() or (workdir / package).is_symlink():
        return 0.0
    process = CodeProcess(workdir)
    try:
        for file, text in tests.items():
            _run_tests(file, text, process)
    except (AssertionError, CallFailure):
        return 0.0
    finally:
        process.close()
    return 1.0


def _run_tests(file: str, text: str, process: CodeProcess) -> None:
    """Run the tests of a file, for which every module that they import is one of the code that is tested."""

    def import_module(name: str, *_: object) -> RemoteObject:
        return RemoteObject(process, name)

    names: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": import_module}, "__name__": file}
    exec(compile(text, file, "exec"), names)  # these are of the task: no program could change them
    for name, test in list(names.items()):
        if name.startswith("test_"):
            test()


def _encode_value(value: object) -> object:
    match value:
        case list() | tuple():
            return ["list" if isinstance(value, list) else "tuple", *map(_encode_value, value)]
        case dict():
            return ["dict", *([_encode_value(key), _encode_value(one)] for key, one in value.items())]
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description="Make small broken Git repositories, or judge a repaired one.")
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--judge", action="store_true")
    args = parser.parse_args()
    if args.judge:
        protect_memory()  # the code that is tested must not print in its place
        sys.path.remove(str(Path.cwd()))  # it can write files there, and no module is to be one of them
        print(run_judge(Path(os.environ["HPCRL_WORKDIR"]), json.load(sys.stdin)))  # noqa: T201 - its output is the reward
        return 0
    if args.directory is None:
        parser.error("name the directory to make")
    rows = [write_repository(args.directory, number) for number in range(args.count)]
    _write(args.directory / "tasks.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
