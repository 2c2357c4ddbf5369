"""The table in docs/sites.md lists every environment variable of hpcrl."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_docs_list_every_environment_variable() -> None:
    faulty = ROOT / "hpcrl" / "testing" / "faulty_disk.py"  # sets those of its library for tests
    files = set((ROOT / "hpcrl").rglob("*.py")) - {faulty}
    sources = "".join(path.read_text() for path in files)
    table = (ROOT / "docs" / "sites.md").read_text()
    listed = set(re.findall(r"^\| `(HPCRL_\w+)`", table, re.MULTILINE))
    assert set(re.findall(r"\bHPCRL_[A-Z_]+\b", sources)) == listed
