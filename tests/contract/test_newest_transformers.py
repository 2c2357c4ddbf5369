"""The newest transformers that hpcrl allows, whose names change from release to release: vLLM may not allow it yet."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("HPCRL_NEWEST_PYTHON", ROOT / ".venv-newest" / "bin" / "python"))


@pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="`make .venv-newest/.done` makes its environment")
@pytest.mark.parametrize("tests", ["trainers/test_token_model.py", "engines/embedded"])
def test_models_of_the_newest_transformers_train_and_answer(tests: str, tmp_path: Path) -> None:
    """Nothing that it has deprecated is used, and the head of a model is found, so that logits come in chunks."""
    options = ["-q", "-p", "no:cacheprovider", "-W", "error::FutureWarning", "--basetemp", tmp_path / "tests"]
    done = subprocess.run(
        [PYTHON, "-m", "pytest", *options, ROOT / "tests" / "unit" / tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
