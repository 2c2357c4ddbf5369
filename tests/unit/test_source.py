"""The source: one name for one class, and maps at the top of modules that name what is there."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "hpcrl"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAP_LINE = re.compile(r"^ {0,4}([A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*) {2,}\S")


def label(path):
    return str(path.relative_to(PACKAGE))


def mapped_names(docstring: str) -> Iterator[str]:
    for line in docstring.splitlines()[1:]:
        if match := MAP_LINE.match(line):
            yield from match[1].split(", ")


def defined_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # a map may list statuses, layouts, subcommands
    return names


def test_every_class_name_is_defined_in_one_module():
    homes = defaultdict(set)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(label(path))
    assert {name: sorted(places) for name, places in homes.items() if len(places) > 1} == {}


@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "__init__.py"], ids=label)
def test_the_map_of_a_module_names_what_the_module_defines(path):
    tree = ast.parse(path.read_text())
    defined = defined_names(tree)
    unknown = [name for name in mapped_names(ast.get_docstring(tree) or "") if not set(name.split(".")) <= defined]
    assert unknown == []


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "__init__.py"], ids=label)
def test_the_map_of_a_package_names_its_modules(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    folder = path.parent
    modules = {p.stem for p in folder.glob("*.py")} - {"__init__"}
    packages = {p.parent.name for p in folder.glob("*/__init__.py")}
    assert docstring, f"{label(path)} has no docstring"
    if folder.name == "examples":
        return
    assert set(mapped_names(docstring)) == modules | packages
