"""A Python process under whose folder calls fail as long as a test wants."""

import ast
import json
import os
import subprocess
import sys
from typing import Any, Self

from hpcrl.testing.faulty_disk import FaultyDisk

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


class FaultyProcess:
    """A Python process under whose folder calls fail; it runs what a test sends it."""

    def __init__(self, disk: FaultyDisk) -> None:
        self.failing = disk.fail_calls
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | disk.environ,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

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
