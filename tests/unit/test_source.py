"""The source: one name for one class, and maps at the top of modules that name what is there."""

import ast
import functools
import graphlib
import itertools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.conftest import LONG_FILES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpcrl"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAP_LINE = re.compile(r"^ {0,4}([A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*) {2,}\S")
METHOD_LINE = re.compile(r"^ {6}([A-Za-z_]\w*) {2,}\S", re.MULTILINE)
FUNCTION_COLUMN = re.compile(r" {2,}(\w+\.py) (\w+) {2,}\S")
TREE_LINE = re.compile(r"^[ │]*(?:[├└]── )?(\w+Error|\w+Fault|\w+Failure) {2,}\S", re.MULTILINE)
VALUE_LINE = re.compile(r"^ {0,4}\"([\w-]+)\" {2,}\S")


def label(path):
    return str(path.relative_to(PACKAGE))


def mapped_names(docstring: str) -> Iterator[str]:
    for line in docstring.splitlines()[1:]:
        if match := MAP_LINE.match(line):
            yield from match[1].split(", ")


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def walk(path: Path) -> list[ast.AST]:
    """Return the nodes of a module, which many tests look at."""
    return list(ast.walk(parse(path)))


def list_definitions(body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield the names that a module or class defines, with what a class consists of; no local name and no import."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((name.id, []) for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.If):
            yield from list_definitions([*node.body, *node.orelse])


@functools.cache
def defined_names(path: Path) -> set[str]:
    """Return what a module defines: `name`, and `Class.name`."""
    names = set()
    for name, body in list_definitions(parse(path).body):
        names |= {name, *(f"{name}.{inner}" for inner, _ in list_definitions(body))}
    return names


@functools.cache
def importable_names(path: Path) -> set[str]:
    imported = {a.asname or a.name for n in walk(path) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
    return defined_names(path) | imported


@functools.cache
def list_strings(path: Path) -> set[str]:
    return {node.value for node in walk(path) if isinstance(node, ast.Constant) if isinstance(node.value, str)}


def test_every_class_name_is_defined_in_one_module():
    """Of tests and benches the top level counts; agent programs are files that run alone."""
    homes = defaultdict(set)
    for path in itertools.chain(ROOT.joinpath("tests").rglob("*.py"), ROOT.joinpath("bench").rglob("*.py")):
        if path.parent.name != "agent_programs":
            for node in parse(path).body:
                if isinstance(node, ast.ClassDef):
                    homes[node.name].add(str(path.relative_to(ROOT)))
    for path in MODULES:
        for node in walk(path):
            if isinstance(node, ast.ClassDef):
                homes[node.name.strip("_")].add(label(path))
    assert {name: sorted(places) for name, places in homes.items() if len(places) > 1} == {}


@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "__init__.py"], ids=label)
def test_the_map_of_a_module_names_what_the_module_defines(path):
    """Names are those of the module and its classes; values, such as statuses, are in quotes."""
    docstring = ast.get_docstring(parse(path)) or ""
    values = {match[1] for line in docstring.splitlines() if (match := VALUE_LINE.match(line))}
    unknown = [*(set(mapped_names(docstring)) - defined_names(path)), *(values - list_strings(path))]
    assert unknown == []


def list_cramped_lines(path: Path) -> Iterator[str]:
    """Yield the lines of maps that have one space after a name of the module, so that no test reads them."""
    for block in (ast.get_docstring(parse(path)) or "").split("\n\n"):
        lines = block.splitlines()
        if any(MAP_LINE.match(line) for line in lines):
            yield from (
                line for line in lines if line.partition(" ")[0] in defined_names(path) and line.count("  ") == 0
            )


def test_every_line_of_a_map_has_two_spaces_after_its_names():
    assert {label(path): lines for path in MODULES if (lines := list(list_cramped_lines(path)))} == {}


def test_the_methods_and_functions_of_other_modules_in_a_map_exist():
    """A method is indented by two more than its class; another module's function follows the name of its file."""
    functions = {(path.name, name) for path in MODULES for name in defined_names(path)}
    methods, elsewhere, unknown = [], [], []
    for path in MODULES:
        docstring = ast.get_docstring(parse(path)) or ""
        own = {name.partition(".")[2] for name in defined_names(path)}
        methods += (found := METHOD_LINE.findall(docstring))
        elsewhere += (named := FUNCTION_COLUMN.findall(docstring))
        unknown += [f"{label(path)}: {name}" for name in found if name not in own]
        unknown += [f"{label(path)}: {file} {name}" for file, name in named if (file, name) not in functions]
    assert unknown == []
    assert methods
    assert elsewhere


def test_the_tree_of_errors_has_every_error():
    path = PACKAGE / "errors.py"
    named = TREE_LINE.findall(ast.get_docstring(parse(path)))
    assert sorted(named) == sorted(node.name for node in parse(path).body if isinstance(node, ast.ClassDef))


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "__init__.py"], ids=label)
def test_the_map_of_a_package_names_its_modules(path):
    docstring = ast.get_docstring(parse(path))
    folder = path.parent
    modules = {p.stem for p in folder.glob("*.py")} - {"__init__"}
    packages = {p.parent.name for p in folder.glob("*/__init__.py")}
    assert docstring, f"{label(path)} has no docstring"
    if folder.name == "examples":
        return
    assert set(mapped_names(docstring)) == modules | packages


@functools.cache
def imported_names(path: Path) -> list[tuple[str, str]]:
    """Return the module and the name of every import from our own code, also those inside functions."""
    found = []
    for node in walk(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("hpcrl", "bench", "tests"):
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return found


@functools.cache
def find_source(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    found = [place for place in (path.with_suffix(".py"), path / "__init__.py", path) if place.exists()]
    return found[0] if found else None


@pytest.mark.parametrize("folder", ["hpcrl", "bench", "tests"])
def test_every_import_of_our_own_code_resolves(folder):
    broken = []
    for path in (ROOT / folder).rglob("*.py"):
        for module, name in imported_names(path):
            if not name:
                continue
            source = find_source(module)
            has_name = source is not None and source.is_file() and name in importable_names(source)
            if not has_name and find_source(f"{module}.{name}") is None:
                broken.append(f"{path.relative_to(ROOT)}: from {module} import {name}")
    assert broken == []


def test_every_factory_of_tests_is_defined_in_one_file():
    """What several files make is made by a factory in `tests/support`, with keywords for what differs."""
    homes = defaultdict(list)
    for path in sorted(ROOT.joinpath("tests").rglob("*.py")):
        for name, _ in list_definitions(parse(path).body):
            if name.startswith("make_"):
                homes[name].append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def own_definitions(path: Path) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield functions, classes, and methods of classes without bases: no other package calls those by name."""
    for node in walk(path):
        if isinstance(node, ast.Module) or (isinstance(node, ast.ClassDef) and not node.bases):
            yield from (b for b in node.body if isinstance(b, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))


def list_constants(path: Path) -> Iterator[tuple[str, ast.expr]]:
    """Yield the upper-case names that a module assigns, each with its value."""
    for node in parse(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            value = getattr(node, "value", None)
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                named = zip(target.elts, value.elts, strict=True)
            else:
                named = ((name, value) for name in (target.elts if isinstance(target, ast.Tuple) else [target]))
            yield from ((name.id, of) for name, of in named if isinstance(name, ast.Name) and name.id.isupper())


def is_literal(node: ast.AST) -> bool:
    """Whether a value is written out: numbers, texts, their sums and collections."""
    shapes = (ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp)
    return all(isinstance(part, (*shapes, ast.operator, ast.unaryop, ast.expr_context)) for part in ast.walk(node))


SAME_BY_CHANCE = {
    "PR_SET_CHILD_SUBREAPER": "hpcrl/lab/keeper.py runs as a file and imports nothing of hpcrl",
    "PR_SET_PDEATHSIG": "hpcrl/lab/keeper.py runs as a file and imports nothing of hpcrl",
}
"""The constants that several modules may define with one value, each with the reason."""


def test_a_constant_has_its_name_and_value_in_one_module():
    """Else one of them is changed and the other is not; two that only happen to be equal have names that differ."""
    places = defaultdict(list)
    for path in MODULES:
        for name, value in list_constants(path):
            if is_literal(value):
                places[name, ast.dump(value)].append(label(path))
    found = {name: where for (name, _), where in places.items() if len(where) > 1}
    assert found.keys() >= SAME_BY_CHANCE.keys()
    assert {name: where for name, where in found.items() if name not in SAME_BY_CHANCE} == {}


def test_a_literal_of_three_texts_or_more_is_written_once():
    """Its name is used everywhere else, and `get_args` makes a tuple of it."""
    places = defaultdict(list)
    for path in MODULES:
        for node in walk(path):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
                texts = frozenset(ast.literal_eval(node.slice)) if isinstance(node.slice, ast.Tuple) else ()
                if len(texts) > 2:
                    places[texts].append(f"{label(path)}:{node.lineno}")
    assert [where for where in places.values() if len(where) > 1] == []


def test_every_constant_is_used_by_its_module_or_another_of_the_package():
    """One that only tests and benches use belongs into hpcrl/testing."""
    modules = [path for path in MODULES if PACKAGE / "testing" not in path.parents]
    imported = {(find_source(module), name) for path in modules for module, name in imported_names(path)}
    attributes = {node.attr for path in modules for node in walk(path) if isinstance(node, ast.Attribute)}
    unused = []
    for path in modules:
        read = {node.id for node in walk(path) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        for name, _ in list_constants(path):
            if name not in read | attributes and (path, name) not in imported:
                unused.append(f"{label(path)}: {name}")
    assert unused == []


CALLED_BY_OTHERS = {"FilesConnector", "AdapterWorker", "attach_router", "init_state"}  # of vLLM's server
CALLED_BY_OTHERS |= {"qsize", "get_result", "put_task"}  # of Parsl's pool


def list_code_names(text: str) -> set[str]:
    """Return the names that a string or a document gives as `module:name`, as `:name`, or alone."""
    return set(re.findall(r":([A-Za-z_]\w*)", text)) | ({text} if text.isidentifier() else set())


def test_what_the_package_defines_is_used_there_or_by_its_users():
    """What only tests and benches import belongs into hpcrl/testing.

    A function or class is imported by another module, used in its own, or loaded by its name; a method is called
    somewhere. Environments are for users: a document names their module.
    """
    modules = [path for path in MODULES if PACKAGE / "testing" not in path.parents]
    texts = [path for folder in ("docs", "recipes", "sites") for path in (ROOT / folder).rglob("*.*")]
    texts = [path for path in texts if path.suffix != ".png"]
    documents = "\n".join(path.read_text() for path in (*texts, ROOT / "README.md", ROOT / "pyproject.toml"))
    shown = "\n".join(line for line in documents.splitlines() if "import " in line)
    named = CALLED_BY_OTHERS | list_code_names(documents) | set(re.findall(r"\w+", shown))
    named = named.union(*(list_code_names(string) for path in modules for string in list_strings(path)))
    imported = {(find_source(module), name) for path in modules for module, name in imported_names(path)}
    attributes = {node.attr for path in modules for node in walk(path) if isinstance(node, ast.Attribute)}
    unused = []
    for path in modules:
        own = {node.id for node in walk(path) if isinstance(node, ast.Name)}
        if path.parent.name == "envs" and f"hpcrl.envs.{path.stem}" in documents:
            continue
        for node in own_definitions(path):
            is_used = node.name in own | attributes | named or (path, node.name) in imported
            if not is_used and not node.name.startswith("__"):
                unused.append(f"{label(path)}:{node.lineno}: {node.name}")
    assert unused == []


def test_no_module_imports_a_private_name_of_another():
    private = [
        f"{label(path)}: from {module} import {name}"
        for path in MODULES
        for module, name in imported_names(path)
        if name.startswith("_") and not name.startswith("__")
    ]
    assert private == []


@pytest.mark.parametrize(("folder", "other"), [("bench", "tests"), ("tests", "bench"), ("hpcrl", "tests")])
def test_folders_do_not_import_each_other(folder, other):
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in (ROOT / folder).rglob("*.py")
        for module, _ in imported_names(path)
        if module.split(".")[0] == other
    ]
    assert found == []


OWNERS = {
    "parsl": {"job/interchange.py", "job/executors.py", "job/parsl_providers.py", "job/worker_pool.py"},
    "mpi4py": {"weights/couriers/mpi_transport.py"},
    "rich": {"commands", "monitor", "staging", "system/terminal.py", "traj"},
    "vllm": {"engines/vllm"},
    "megatron": {"trainers/megatron"},
    "h5py": {"spool/hdf5.py"},
    "hdf5plugin": {"spool/hdf5.py"},
    "submitit": {"slurm/submit.py"},
    "huggingface_hub": {"staging/hub_files.py", "trainers/export.py", "trainers/model_files.py"},
    "pyarrow": {"envs/task_set.py", "traj/parquet.py"},
    "mlflow": {"job/metric_sinks.py"},
    "tensorboard": {"job/metric_sinks.py"},
    "wandb": {"job/metric_sinks.py"},
}
"""The modules or packages of hpcrl that may import a package; the checks of ruff end at a noqa or an ignored file."""
OWNER_ROW = re.compile(r"\| ([\w, ]+) \| ([^|]*`hpcrl/[^|]*) (?=\|)")
RUN_MODULE = {"import_module", "load_program", "__import__"}


def imported_packages(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every package that is imported, also by its name in a string, and the line."""
    for node in walk(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in RUN_MODULE:
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        yield from ((name.split(".")[0], node.lineno) for name in names)


def test_every_owned_package_is_imported_by_its_owners_and_nowhere_else():
    found, used = [], set()
    for path in MODULES:
        places = {label(path), *(label(parent) for parent in path.parents if parent.is_relative_to(PACKAGE))}
        for package, line in imported_packages(path):
            owners = OWNERS.get(package, places) & places
            used |= {(package, owner) for owner in owners}
            if not owners:
                found.append(f"{label(path)}:{line}: {package}")
    assert found == []
    assert {(package, owner) for package in OWNERS for owner in OWNERS[package]} - used == set()


def test_the_table_of_owners_for_contributors_is_that_of_the_tests():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("package has one owner:")[2].partition("\n## ")[0]
    named = {
        package: {place.strip("/") for place in re.findall(r"`hpcrl/([\w/.]+)`", places)}
        for packages, places in OWNER_ROW.findall(text)
        for package in packages.split(", ")
    }
    assert named == OWNERS


def test_the_list_of_folders_for_contributors_names_every_package():
    listed = (ROOT / "CONTRIBUTING.md").read_text().partition("\nhpcrl/ ")[2].partition("\nrecipes/")[0]
    names = set().union(
        *(re.split(r"[ ,()]+", re.split(r" {3,}", line.strip())[0]) for line in listed.splitlines()[1:])
    )
    packages = {path.parent for path in PACKAGE.glob("*/__init__.py")}
    assert {folder.name for folder in packages} - names == set()
    assert names - {""} <= {path.parent.name for path in PACKAGE.rglob("__init__.py")}


@functools.cache
def imported_folders(path: Path) -> set[Path]:
    """Return the folders of hpcrl whose modules a file imports, relative to hpcrl."""
    sources = [find_source(f"{module}.{name}") or find_source(module) for module, name in imported_names(path)]
    folders = {source if source.is_dir() else source.parent for source in sources if source is not None}
    return {folder.relative_to(PACKAGE) for folder in folders if folder.is_relative_to(PACKAGE)}


def test_folders_of_a_package_do_not_import_in_a_circle():
    below = defaultdict(set)
    for path in MODULES:
        folder = path.parent.relative_to(PACKAGE)
        below[folder] |= imported_folders(path) - {folder, Path()}
    order = graphlib.TopologicalSorter({folder: below[folder] for folder in below if folder != Path()})
    order.prepare()  # raises CycleError, which names the folders


GRAPH = "the graph of a step as data, which the login node prints without the modules' imports"
PROGRAM = "a separate program, often in another Python: only its command line is known here"
SHIPPED = "code that a recipe may name as it names the user's, which only its worker loads"
NAMED_ABOVE = {
    "campaign/submission_checks.py": (PROGRAM, {"hpcrl.roles.warmup_check"}),
    "commands/interpreters.py": (PROGRAM, {"hpcrl.simulation"}),
    "commands/schemas.py": (
        "the record of one command, loaded with it",
        {"hpcrl.simulation.result", "hpcrl.trial.report"},
    ),
    "commands/trial.py": (PROGRAM, {"hpcrl.trial"}),
    "config/pipeline.py": (
        GRAPH,
        {
            "hpcrl.learn.distribute",
            "hpcrl.learn.loss",
            "hpcrl.roles.env",
            "hpcrl.roles.judge",
            "hpcrl.roles.reward",
            "hpcrl.roles.warmup",
            "hpcrl.trainers.nodes",
        },
    ),
    "config/program.py": (SHIPPED, {"hpcrl.envs.agent", "hpcrl.envs.verifiers"}),
    "config/recipe.py": (SHIPPED, {"hpcrl.envs.base", "hpcrl.envs.judge"}),
    "config/user_code.py": (SHIPPED, {"hpcrl.envs.repair"}),
    "doctor/node_checks.py": (PROGRAM, {"hpcrl.trial.engine_probe"}),
    "envs/check.py": (PROGRAM, {"hpcrl.engines.vllm.parsers"}),
    "envs/task_set.py": (PROGRAM, {"hpcrl.traj.imitation"}),
    "job/metric_sinks.py": ("no module, but a tag of MLflow", {"hpcrl.campaign"}),
    "job/fork_server.py": (PROGRAM, {"hpcrl.roles.__main__"}),
    "job/ranks.py": (PROGRAM, {"hpcrl.roles"}),
    "job/runtime.py": (PROGRAM, {"hpcrl.roles", "hpcrl.roles.__main__"}),
    "plan/checks.py": (SHIPPED, {"hpcrl.envs.judge"}),
    "slurm/script.py": (PROGRAM, {"hpcrl.job.driver", "hpcrl.job.component_holder"}),
}
"""The modules that name others above their layer, or beside, in a string: each with the reason, and the others."""
MODULE_STRING = re.compile(r"(hpcrl(?:\.\w+)+)(?::\w*|\.)?")
"""A module's name in a string, alone, with a name in it, or at the start of an f-string."""


@functools.cache
def read_layers() -> dict[str, int]:
    """Return the height of each package of hpcrl, as import-linter checks it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers"]
    return {name: height for height, layer in enumerate(reversed(layers)) for name in layer.split(" | ")}


def list_upward_strings(path: Path) -> Iterator[str]:
    """Yield the modules in the strings of a module that it could not import: those of a layer above, or beside."""
    package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    heights = read_layers()
    for string in list_strings(path):
        match = MODULE_STRING.fullmatch(string)
        if match is None or find_source(match[1]) is None:
            continue
        other = match[1].split(".")[1]
        if other != package and heights.get(other, -1) >= heights.get(package, -1):
            yield match[1]


def test_a_module_names_one_above_its_layer_only_for_a_reason():
    """A name in a string is an import that import-linter does not see."""
    found = {(label(path), module) for path in MODULES for module in list_upward_strings(path)}
    assert found == {(path, module) for path, (_, modules) in NAMED_ABOVE.items() for module in modules}


NO_VERBS = {"A", "All", "An", "How", "One", "The", "This", "True", "What", "Whether"}
PROPERTIES = {"property", "cached_property", "fixture"}


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(getattr(call, "id", getattr(call, "attr", "")) in PROPERTIES for call in node.decorator_list)


def list_functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods of a module, without its properties."""
    for node in walk(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node):
            yield node


def starts_with_verb(docstring: str) -> bool:
    """Whether the first word may be an imperative: "Return", not "Returns", "True" or "The"."""
    word = docstring.split()[0]
    return word not in NO_VERBS and (not word.endswith("s") or word.endswith("ss"))


def test_the_docstring_of_a_function_starts_with_an_imperative_verb():
    wrong = []
    for path in MODULES:
        for node in list_functions(path):
            if (docstring := ast.get_docstring(node)) and not starts_with_verb(docstring):
                wrong.append(f"{label(path)}:{node.lineno}: {docstring.splitlines()[0]}")
    assert wrong == []


CLAUSES = {"By", "From", "How", "Of", "So", "That", "Those", "To", "What", "When", "Where", "Whether", "Who", "Why"}


def described_nodes(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module, of its classes, and of properties, fields and constants; with their lines."""
    for node in walk(path):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else []
        is_described = not isinstance(node, ast.FunctionDef) or is_property(node)
        if is_described and (docstring := ast.get_docstring(node) if body else None):
            yield body[0].lineno, docstring
        for field, text in itertools.pairwise(body):
            value = getattr(text, "value", None) if isinstance(field, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Constant) and isinstance(text, ast.Expr) and isinstance(value.value, str):
                yield text.lineno, value.value


def test_the_docstring_of_a_module_class_field_or_constant_starts_with_a_noun_or_a_verb():
    wrong = [
        f"{label(path)}:{line}: {docstring.splitlines()[0]}"
        for path in MODULES
        for line, docstring in described_nodes(path)
        if docstring.split()[0].strip(":,") in CLAUSES
    ]
    assert wrong == []


NO_FUNCTIONS = re.compile(r"_*(?!(?:feed|seed|embed|meeting)$)(?:[a-z]+(?:ed|ing)|fits|gone|marks|until)")


def test_the_name_of_a_function_is_not_a_participle():
    """A word alone: `finished_segments` returns segments, and `arrived` may do anything."""
    wrong = []
    for path in MODULES:
        for node in list_functions(path):
            if NO_FUNCTIONS.fullmatch(node.name):
                wrong.append(f"{label(path)}:{node.lineno}: {node.name}")
    assert wrong == []


UNIT_TESTS = sorted((ROOT / "tests" / "unit").rglob("test_*.py"))


def find_misplacement(path: Path) -> str:
    """Return why a test file is in the wrong folder, or nothing: tests/unit mirrors hpcrl."""
    folder = path.parent.relative_to(ROOT / "tests" / "unit")
    if not list((PACKAGE / folder).glob("*.py")):
        return f"the package is missing: hpcrl/{folder}"
    homes = {module.parent.relative_to(PACKAGE) for module in MODULES if f"test_{module.stem}" == path.stem}
    if homes and folder not in homes:
        return f"its module is in {sorted(map(str, homes))}"
    imported = imported_folders(path)
    below = {str(other) for other in imported if folder in other.parents}
    if below and folder != Path() and folder not in imported:
        return f"it tests {sorted(below)} alone"
    return ""


def test_unit_tests_are_in_the_folder_of_the_package_that_they_test():
    found = {str(path.relative_to(ROOT)): find_misplacement(path) for path in UNIT_TESTS}
    assert {path: why for path, why in found.items() if why} == {}


def test_every_package_has_unit_tests():
    """Those of a package of packages may be in the folders of these."""
    tested = {folder for path in UNIT_TESTS for folder in path.relative_to(ROOT / "tests" / "unit").parents}
    packages = {path.parent.relative_to(PACKAGE) for path in MODULES}
    assert packages - tested == set()


ACROSS_MODULES = {
    "campaign/test_damaged_campaigns.py",
    "campaign_dir/test_old_campaign.py",
    "learn/test_conversations.py",
    "rollout/agents/test_agent_forms.py",
    "rollout/agents/test_node_clients.py",
    "spool/test_faults.py",
    "spool/test_power_loss.py",
    "spool/test_state_machine.py",
    "test_docs.py",
    "test_leftovers.py",
    "test_release.py",
    "test_source.py",
    "trainers/test_algorithms.py",
    "trainers/test_distillation.py",
    "trainers/test_lora.py",
    "trainers/test_packing.py",
    "trainers/test_teacher.py",
}
"""The files in tests/unit that test what several modules do together, and those about the repository."""


def is_named_after_module(path: Path) -> bool:
    """Whether a test file's name starts or ends with the name of a module of its package."""
    folder = PACKAGE / path.parent.relative_to(ROOT / "tests" / "unit")
    homes = {module.stem.strip("_") for module in folder.glob("*.py") if module.stem != "__init__"}
    subject = path.stem.removeprefix("test_")
    return any(subject == home or subject.startswith(f"{home}_") or subject.endswith(f"_{home}") for home in homes)


def test_unit_tests_are_named_after_the_module_that_they_test():
    unit = ROOT / "tests" / "unit"
    unnamed = {str(path.relative_to(unit)) for path in UNIT_TESTS if not is_named_after_module(path)}
    assert unnamed == ACROSS_MODULES


def test_no_two_test_files_have_one_name():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
    assert set(LONG_FILES) <= set(names)


EVENTS = PACKAGE / "campaign_dir" / "events.py"
FOR_PEOPLE = {
    "CurriculumUpdated": {"weights"},
    "DrainStarted": {"grace_s"},
    "EvaluationFinished": {"newest", "oldest"},
    "FaultReported": {"at", "bucket", "bytes", "rank"},
    "FlatGroupsDropped": {"shares"},
    "GpuShiftChanged": {"is_awake", "wait_s"},
    "MemoryRanOut": {"max_row_tokens", "num_rows", "rank"},
    "ParsersChosen": {"reasoning_parser", "tool_parser"},
    "RowsSkipped": {"share"},
    "TrainingResumed": {"checkpoint"},
    "TurnRouted": {"is_home", "wait_s"},
    "VersionDelivered": {"bytes", "codec", "sent_bytes", "sources", "to", "wall_s"},
    "WorkerStarted": {"gpus"},
}
"""The fields that only `hpcrl events` prints, for a person in search of a cause; no module decides by them."""


def list_event_fields() -> dict[str, set[str]]:
    """Return the fields of each kind of event, without those of every line."""
    return {
        node.name: {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
        for node in parse(EVENTS).body
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["CampaignEvent"]
    }


def list_read_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the attributes that a module reads, and the names in its patterns, strings and classes of figures."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names.add(node.attr)
        elif isinstance(node, ast.MatchClass):
            names.update(node.kwd_attrs)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def list_received_kinds(path: Path, kinds: set[str]) -> set[str]:
    """Return the kinds of events that a module names otherwise than to make or import one."""
    made = {node.func for node in walk(path) if isinstance(node, ast.Call)}
    return {node.id for node in walk(path) if isinstance(node, ast.Name) and node not in made} & kinds


def test_every_field_of_an_event_is_read_by_the_package_or_meant_for_people():
    """A kind is read by the modules that name it, and by those that import what they define."""
    fields = list_event_fields()
    used = {kind: set() for kind in fields}
    receivers = {path: list_received_kinds(path, set(fields)) for path in MODULES if path != EVENTS}
    for path in MODULES:
        sources = {find_source(module) for module, _ in imported_names(path)} & receivers.keys()
        received = set().union(receivers.get(path, set()), *(receivers[source] for source in sources))
        read = list_read_names(walk(path)) if received else set()
        for kind in received:
            used[kind] |= read
    functions = [node for node in parse(EVENTS).body if isinstance(node, ast.FunctionDef)]
    described = list_read_names(node for function in functions for node in ast.walk(function))
    unread = {kind: names - used[kind] - described for kind, names in fields.items()}
    assert {kind: names for kind, names in unread.items() if names} == FOR_PEOPLE


CONFIG = PACKAGE / "config"
READ_BY_NAME = {"inference", "on_exit", "on_max_turns", "on_overflow", "on_timeout"}
"""The keys that are read otherwise: `Site.choose_inference` returns the first, `getattr` the others."""


def list_config_keys(path: Path) -> set[str]:
    """Return the names of the keys that the tables of a module have."""
    tables = [node for node in parse(path).body if isinstance(node, ast.ClassDef)]
    return {field.target.id for table in tables for field in table.body if isinstance(field, ast.AnnAssign)}


def test_every_key_of_a_recipe_and_a_site_is_read():
    """Names are compared, without their tables: a key passes if any module reads an attribute of its name."""
    keys = list_config_keys(CONFIG / "recipe.py") | list_config_keys(CONFIG / "site.py")
    outside = [node for path in MODULES if path.parent != CONFIG for node in walk(path)]
    read = {node.attr for node in outside if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    assert keys - read == READ_BY_NAME
