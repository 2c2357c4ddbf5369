"""An interpreter with other programs' readers of exports: inspect-ai and datasets, whose packages are not hpcrl's.

find_readers    return it, or None where `make .venv-readers/.done` did not make it
run_reader      run a script in it, and return the lines that it printed
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}


def find_readers() -> str | None:
    python = os.environ.get("HPCRL_READERS_PYTHON", str(ROOT / ".venv-readers" / "bin" / "python"))
    return python if os.access(python, os.X_OK) else None


def run_reader(script: str, *arguments: str, directory: Path) -> Sequence[str]:
    """Run the script in a directory, which is also its home."""
    environment = os.environ | OFFLINE | {"HOME": str(directory)}
    command = [str(find_readers()), "-c", script, *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
