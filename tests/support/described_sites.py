"""Clusters that hpcrl does not ship, each described in a site file of a few lines."""

from pathlib import Path

FOLDER = Path(__file__).parent / "sites"
DESCRIBED = sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_described(name: str) -> str:
    """Return the path of a description."""
    return str(FOLDER / f"{name}.toml")
