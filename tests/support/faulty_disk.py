"""A file system that fails on command, under a real process: a library is preloaded that makes its calls fail.

compile_library   compile faulty_disk.c; skips the test where there is no C compiler
FaultyProcess     a Python process under whose folder calls fail as long as the test wants
"""

import ast
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

SOURCE = Path(__file__).with_name("faulty_disk.c")
CHILD = """
import json, sys
names = {}
for line in sys.stdin:
    statements, value = json.loads(line)
    try:
        exec(statements, names)
        answer = repr(eval(value, names))
    except Exception as error:
        answer = repr(f"{type(error).__name__}: {error}")
    print(answer, flush=True)
"""


def compile_library(directory: Path) -> Path:
    """Return the library that is to be preloaded."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the file system of these tests cannot be made to fail")
    library = directory / "faulty_disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


class FaultyProcess:
    """A Python process under whose folder calls fail; it runs what a test sends it."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._switch = folder.with_name(f"{folder.name}.switch")
        environ = {"LD_PRELOAD": str(library), "FAULTY_FOLDER": str(folder), "FAULTY_SWITCH": str(self._switch)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environ,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._switch.unlink(missing_ok=True)
        self._process.communicate()

    @contextlib.contextmanager
    def failing(self, error: int, *, kinds: str = "rw", lag_ms: int = 0) -> Iterator[None]:
        """Make calls that read (r) or change something (w) fail for the length of a block; -1 ms: they hang."""
        self._switch.write_text(f"{error} {kinds} {lag_ms}")
        try:
            yield
        finally:
            self._switch.unlink()

    def start(self, statements: str, value: str = "None") -> None:
        """Run statements, without waiting for the answer."""
        assert self._process.stdin is not None
        print(json.dumps([statements, value]), file=self._process.stdin, flush=True)

    def wait(self) -> Any:
        """Return the value of the last `start`, or the error as text."""
        assert self._process.stdout is not None
        return ast.literal_eval(self._process.stdout.readline())

    def run(self, statements: str, value: str = "None") -> Any:
        """Run statements; return a value, or the error as text."""
        self.start(statements, value)
        return self.wait()
