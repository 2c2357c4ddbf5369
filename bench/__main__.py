"""`python -m bench [--full] [NAME...]`: run every bench, or these, and write the figures into docs/benchmarks.md."""

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NO_BENCH = ("__init__", "__main__", "figures", "data_path", "memory_steps")  # the last two are parts of others
NAMES = sorted([*(path.stem for path in HERE.glob("*.py") if path.stem not in NO_BENCH), "papers"])
"""`bench.gpu` is not among them: it needs a GPU, and prints its own JSON."""
REPORT = HERE.parent / "docs" / "benchmarks.md"
INTRODUCTION = (
    "# Benchmarks\n\nWritten by `make bench`; every figure with a bar is a ratio of two things measured in one run.\n"
)
HEADING = "## `python -m bench."


def main() -> int:
    """Sections of benches that were not run now stay as they are."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--full", action="store_true", help="the long run of each")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"no bench is named {unknown[0]!r}; there are {', '.join(NAMES)}")
    sections = _sections(REPORT.read_text() if REPORT.exists() else "")
    all_ok = True
    for name in arguments.names or NAMES:
        result = _run(name, full=arguments.full)
        all_ok = all_ok and all(figure["ok"] for figure in result["figures"])
        sections[name] = "\n".join(_lines(result))
        REPORT.write_text("\n".join([INTRODUCTION, *(sections[name] for name in sorted(sections))]))
        print(sections[name])
    return 0 if all_ok else 1


def _sections(report: str) -> dict[str, str]:
    found = re.split(f"^(?={re.escape(HEADING)})", report, flags=re.MULTILINE)[1:]
    return {text.removeprefix(HEADING).split("`")[0]: text.rstrip() + "\n" for text in found}


def _run(name: str, *, full: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", f"bench.{name}", "--json", *(["--full"] if full else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _lines(result: dict[str, Any]) -> list[str]:
    source = HERE / f"{result['name']}.py"
    about = ast.get_docstring(
        ast.parse((source if source.exists() else source.with_suffix("") / "__main__.py").read_text())
    )
    lines = [f"{HEADING}{result['name']}`", "", "```text", about or "", "```", "", f"On {result['machine']}.", ""]
    lines += ["| figure | value | bar | |", "|---|---|---|---|"]
    for figure in result["figures"]:
        sign = "<=" if figure["better"] == "lower" else ">="
        bar = f"{sign} {figure['bar']:g}" if figure["bar"] is not None else ""
        verdict = ("ok" if figure["ok"] else "**missed**") if figure["bar"] is not None else ""
        lines.append(f"| {figure['name']} | {figure['value']:.3g} {figure['unit']} | {bar} | {verdict} |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main())
