"""The checks of shell scripts: bash's syntax and shellcheck, which the development packages have."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

IGNORED = ("SC1091",)
"""Files that are not here, which a script of a user's own may include."""


def find_script_problems(scripts: Mapping[str, str], folder: Path) -> str:
    """Return what bash and shellcheck find in these texts; "" if that is nothing."""
    paths = [folder / name for name in scripts]
    for path, text in zip(paths, scripts.values(), strict=True):
        path.write_text(text)
    found = ""
    shellcheck = [str(Path(sys.executable).parent / "shellcheck"), f"--exclude={','.join(IGNORED)}"]
    for command in (*(["bash", "-n", str(path)] for path in paths), [*shellcheck, *map(str, paths)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found += done.stdout + done.stderr if done.returncode else ""
    return found
