"""`python -m bench [NAME...]`: run every bench (or these) and write docs/benchmarks.md from what was measured."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "__main__", "figures", "fleet", "data_path")  # the last is a part of learning
)
REPORT = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def main() -> int:
    results = [_run(name) for name in sys.argv[1:] or NAMES]
    REPORT.write_text("\n".join(_lines(results)) + "\n")
    print(REPORT.read_text())
    return 0 if all(figure["ok"] for result in results for figure in result["figures"]) else 1


def _run(name: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", f"bench.{name}", "--json"], stdout=subprocess.PIPE, check=False)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _lines(results: list[dict[str, Any]]) -> list[str]:
    lines = ["# Benchmarks", "", "Written by `make bench`; every figure is a ratio of two things measured in one run."]
    for result in results:
        lines += ["", f"## `python -m bench.{result['name']}`", "", f"On {result['machine']}.", ""]
        lines += ["| figure | value | bar | |", "|---|---|---|---|"]
        for figure in result["figures"]:
            sign = "<=" if figure["better"] == "lower" else ">="
            bar = f"{sign} {figure['bar']:g}" if figure["bar"] is not None else ""
            verdict = ("ok" if figure["ok"] else "**missed**") if figure["bar"] is not None else ""
            lines.append(f"| {figure['name']} | {figure['value']:.3g} {figure['unit']} | {bar} | {verdict} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
