"""The files with the answers of an example, which no program is shown.

list_answer_files  those that a sandbox would show
"""

from collections.abc import Sequence
from pathlib import Path


def list_answer_files(shown: Sequence[str]) -> tuple[str, ...]:
    """Return the files with the answers of the shipped example, and the history of a checkout, as far as `shown`."""
    examples = Path(__file__).resolve().parent
    checkout = examples.parents[2]
    files = [examples / "repositories.py", *examples.glob("__pycache__/repositories.*"), checkout / ".git"]
    places = [(Path(place), Path(place).resolve()) for place in shown]
    found = [
        str(place / file.relative_to(real))
        for file in files
        for place, real in places
        if file.exists() and file.is_relative_to(real)
    ]
    return tuple(dict.fromkeys(found))
