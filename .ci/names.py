"""Measure how well the names of hpcrl explain themselves: `make names`; exit code 1 when a bar is missed.

    python .ci/names.py            the table
    python .ci/names.py --words    the dialect words of the glossary table, in any case, with their lines
    python .ci/names.py --classes  one-word classes, and classes of one name

Private names count, without their underscores. Dialect words have a bar in the package and the docs, and another in
tests and benches.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hpcrl"
SMALL_LINES = 120
DIALECT = {
    "": (
        r"told|tells?|telling|said|says?|saying|heard|hears?|hearing|heed\w*|begins?|began|begun|beginning|"
        r"anew|lies?|lay in|nobody|somebody|who \w+s|nothing of it|what of|so many|as many|many a|goes? on|"
        r"going on|gone on|went on|of its own|of their own|puts? aside|lets? go|letting go|given? up|gives up|"
        r"giving up|gave up|takes? in|taking in|taken in|took in|mend|mends|mended|mending|cures?|cured|"
        r"tak(?:e|es|en|ing) (?:it|them) away|dear|dearer|dearest|reckon\w*|sooner|in vain|of late|"
        r"comes? into question|is no|are no|was no|were no|the dead|the living|remains|attained|demanding|"
        r"strained|doors?|life|lives|rungs?|ladder|shel(?:f|ves)|ill|well (?:known|meant)"
    ),
    "hpcrl/weights": r"pieces?|box(?:es)?|placed|wires?",
    "hpcrl/trainers": r"pieces?|box(?:es)?|placed|wires?",
    "hpcrl/rollout/flow_control.py": r"words?",
}
"""The words of the glossary of plain words, by the place in which they are not the noun of something else.

A piece is part of an answer in hpcrl/rollout, a word may be one of a command line, a link is one of a file system or
between two nodes, a part is in docs/glossary.md, and lag is measured in versions behind.
"""
DIALECT_WORDS = {
    place: re.compile(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", re.IGNORECASE) for place, words in DIALECT.items()
}
TEXT_FILES = ("*.py", "*.md", "*.toml", "*.sh", "Makefile", "run")
CODE_AND_DOCS = ("hpcrl", "docs", "recipes", "sites", "jobs")
TESTS = ("tests", "bench")
ROOT_TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml")


def main(args: list[str]) -> int:
    modules = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    classes = find_classes(trees)
    words, test_words = find_words(CODE_AND_DOCS, ROOT_TEXTS), find_words(TESTS)
    if "--words" in args:
        print(*words, *test_words, sep="\n")
        return 0
    if "--classes" in args:
        print("one word:", *sorted({name for name in classes if num_words(name) == 1}))
        print(
            "several modules:", *(f"{name} ({', '.join(where)})" for name, where in classes.items() if len(where) > 1)
        )
        return 0
    functions = [
        node.name.strip("_")
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    content = {name for name, tree in trees.items() if not is_empty(tree)}
    small = find_small_single_user_modules(trees, modules, content)
    rows = [
        ("one-word class names", percent(sum(num_words(name) == 1 for name in classes), len(classes)), 20, "%"),
        (
            "one-word module functions",
            percent(sum("_" not in name for name in functions), len(functions)),
            25,
            "%",
        ),
        ("class names in several modules", sum(len(where) > 1 for where in classes.values()), 0, ""),
        ("modules with one importer, under 120 lines", percent(len(small), len(content)), 8, "%"),
        ("modules in the root", len(list(PACKAGE.glob("*.py"))), 3, ""),
        ("dialect words in code and docs", len(words), 60, ""),
        ("dialect words in tests and benches", len(test_words), 40, ""),
    ]
    missed = False
    for label, value, bar, unit in rows:
        missed |= value > bar
        print(f"{label:<44} {value:4}{unit:1}  at most {bar}{unit}{'   MISSED' if value > bar else ''}")
    return int(missed)


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_classes(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name.strip("_")].append(module)
    return found


def num_words(name: str) -> int:
    return len(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name.strip("_")))


def is_empty(tree: ast.Module) -> bool:
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in tree.body)


def find_small_single_user_modules(
    trees: dict[str, ast.Module], modules: dict[str, Path], content: set[str]
) -> list[str]:
    importers: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    target = f"{node.module}.{alias.name}"
                    importers[target if target in modules else node.module].add(module)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importers[alias.name].add(module)
    return [
        name
        for name in content
        if len(importers[name] - {name}) == 1 and len(modules[name].read_text().splitlines()) < SMALL_LINES
    ]


def percent(part: int, whole: int) -> int:
    return round(100 * part / max(whole, 1))


def find_words(folders: tuple[str, ...], files: tuple[str, ...] = ()) -> list[str]:
    """Return each dialect word with its file and line."""
    found = []
    paths = [path for folder in folders for pattern in TEXT_FILES for path in sorted((ROOT / folder).rglob(pattern))]
    for path in [*paths, *(ROOT / name for name in files)]:
        if "golden/files" in str(path) or path.name == "glossary.md" or path == Path(__file__).resolve():
            continue
        text = re.sub(r"<[|\uff5c][^<>]*[|\uff5c]>|[_`]", " ", path.read_text(errors="replace"))  # not models' marks
        name = str(path.relative_to(ROOT))
        for place, words in DIALECT_WORDS.items():
            if name.startswith(place):
                lines = ((text.count("\n", 0, word.start()) + 1, word[0]) for word in words.finditer(text))
                found += [f"{name}:{line}: {' '.join(word.split())}" for line, word in lines]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
