"""The documents: every path that they name exists, and so does every function that a station of a walk names."""

import ast
import functools
import re
from pathlib import Path

import pytest

from hpcrl.campaign.request import load_request
from hpcrl.campaign_dir.events import CampaignEvent
from hpcrl.config.pipeline import make_pipeline, render_text

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WALKS = ROOT / "docs" / "how-it-travels.md"
BACKTICKED = re.compile(r"`([^`\n]+)`")
STATION = re.compile(r"^\d+\. `(hpcrl/[\w/]+\.py)` ((?:`[\w.]+`(?:, )?)+):", re.MULTILINE)
IMPORT_PATH = re.compile(r"\bhpcrl\.[a-z]\w*(?:\.\w+)*(?::\w+)?")
NUMBERED = re.compile(r"^\d+\. ", re.MULTILINE)
FOLDERS = ("hpcrl", "hpcrl/*", "hpcrl/*/*", "jobs", "bench", "tests", "docs")


def label(path):
    return str(path.relative_to(ROOT))


def named_modules(text: str) -> set[str]:
    """The Python files that a document names in backticks."""
    words = {word for span in BACKTICKED.findall(text) for word in re.split(r"[\s,:()]+", span)}
    return {word for word in words if re.fullmatch(r"(?:[\w.]+/)*\w+\.py", word)}


PLACES = [ROOT, *(place for folder in FOLDERS for place in ROOT.glob(folder) if place.is_dir())]


@functools.cache
def exists(name: str) -> bool:
    return any(place.joinpath(name).is_file() for place in PLACES)


def named_packages(text: str) -> set[str]:
    return {span for span in BACKTICKED.findall(text) if re.fullmatch(r"(?:hpcrl|tests|bench|docs)/[\w/]*", span)}


@functools.cache
def defined_names(path: Path) -> set[str]:
    """The top-level names of a module, and `Class.member` of its classes."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        names |= assigned(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member}" for child in node.body for member in assigned(child)}
    return names


def assigned(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def resolves(dotted: str) -> bool:
    """Whether an import path such as `hpcrl.envs.judge:judge` is a module, a package or what one of them defines."""
    *parents, last = re.split(r"[.:]", dotted)
    if ROOT.joinpath(*parents, last).is_dir() or ROOT.joinpath(*parents, f"{last}.py").is_file():
        return True
    module = ROOT.joinpath(*parents).with_suffix(".py")
    return module.is_file() and last in defined_names(module)


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_every_module_that_a_document_names_exists(path):
    assert {name for name in named_modules(path.read_text()) if not exists(name)} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_every_import_path_that_a_document_names_leads_to_a_definition(path):
    assert {dotted for dotted in IMPORT_PATH.findall(path.read_text()) if not resolves(dotted)} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_every_folder_that_a_document_names_exists(path):
    assert {name for name in named_packages(path.read_text()) if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_every_link_to_a_file_leads_to_one(path):
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


EVENT_NAMES = re.compile(r"\bevents? ((?:`[a-z-]+`(?:, | and | or )?)+)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_the_events_that_a_document_names_exist(path):
    """Names stand in backticks behind the word."""
    tags = {kind.__struct_config__.tag for kind in CampaignEvent.__subclasses__()}
    named = {name for names in EVENT_NAMES.findall(path.read_text()) for name in BACKTICKED.findall(names)}
    assert named <= tags


def test_every_numbered_line_of_a_walk_is_a_station():
    text = WALKS.read_text()
    assert len(STATION.findall(text)) == len(NUMBERED.findall(text)) > 0


@pytest.mark.parametrize(("file", "names"), STATION.findall(WALKS.read_text()))
def test_a_station_names_what_its_file_defines(file, names):
    assert set(BACKTICKED.findall(names)) - defined_names(ROOT / file) == set()


PACKAGE_ROWS = re.findall(r"^\| (`hpcrl/.*)$", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("row", PACKAGE_ROWS)
def test_a_row_of_the_architecture_names_modules_of_its_packages(row):
    packages = named_packages(row)
    missing = {name for name in named_modules(row) if not any((ROOT / folder / name).exists() for folder in packages)}
    assert packages, row
    assert missing == set()


def test_every_walk_gives_its_number_of_files_and_names_real_classes() -> None:
    walks = re.split(r"^## (?=[A-D]\. )", WALKS.read_text().partition("## Beside")[0], flags=re.MULTILINE)[1:]
    assert len(walks) == 4
    classes = {
        node.name
        for path in ROOT.joinpath("hpcrl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    for walk in walks:
        stations, _, _ = walk.partition("\n\n1. ")[2].partition(" files.")
        files = {path for path, _ in STATION.findall(walk)} | named_modules(stations)
        num_files = len(files)
        assert {file for file in files if not ROOT.joinpath(file).is_file()} == set()
        assert f"\n{num_files} files." in walk
        assert re.search(rf"^\| {walk[0]} \| \d+ \| {num_files} \|", WALKS.read_text(), flags=re.MULTILINE)
        _, _, names = walk.partition("Names of what")
        assert set(re.findall(r"`(\w+)`", names)) <= classes


def test_the_climbs_of_planning_are_those_that_the_walks_name() -> None:
    """A module of hpcrl/plan whose functions n others of the package import is returned to n - 1 times."""
    submission = WALKS.read_text().partition("## D. ")[2].partition("## Beside")[0]
    planning = {file for file, _ in STATION.findall(submission) if file.startswith("hpcrl/plan/")}
    callers = {file: 0 for file in planning}
    for file in planning:
        for node in ast.parse(ROOT.joinpath(file).read_text()).body:
            called = f"{(getattr(node, 'module', '') or '').replace('.', '/')}.py"
            if called in planning and any(alias.name.islower() for alias in node.names):
                callers[called] += 1
    climbs = {Path(file).name: count - 1 for file, count in callers.items() if count > 1}
    paragraph = WALKS.read_text().partition("Climbs in D")[2].partition("\n\n")[0]
    assert f"there are {sum(climbs.values())} now" in paragraph
    assert named_modules(paragraph) == climbs.keys()


FIRST_EXAMPLE = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_EXAMPLES = [path for path in DOCUMENTS if FIRST_EXAMPLE.search(path.read_text())]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=label)
def test_the_first_example_of_a_page_plans_as_printed(path, tmp_path):
    example = tmp_path / "example.toml"
    example.write_text(FIRST_EXAMPLE.search(path.read_text())[1])
    if path.name == "sites.md":
        assert load_request("quickstart", site=str(example)).site.name == "perlmutter"
    else:
        assert load_request(str(example), site="local").plan.roles


NAMED_EXAMPLE = re.compile(r'^```toml\n(name = "([\w-]+)"\n.*?)^```$', re.MULTILINE | re.DOTALL)


def test_the_recipes_with_nodes_of_ones_own_plan_as_printed_and_show_their_graphs(tmp_path):
    examples = NAMED_EXAMPLE.findall((ROOT / "docs" / "learning.md").read_text())
    for text, name in examples:
        (tmp_path / f"{name}.toml").write_text(text)
    shown = {}
    for _, name in examples:
        request = load_request(str(tmp_path / f"{name}.toml"), site="local")
        shown[name] = render_text(make_pipeline(request.recipe.train))
    assert list(shown) == ["my-pipeline", "my-loss", "my-teacher", "my-update"]
    assert "each trainer worker: shape -> advantage -> deal" in shown["my-pipeline"]
    assert "batches -> teacher -> loss -> update" in shown["my-teacher"]
    last = [re.sub(" +", " ", line) for line in shown["my-update"].splitlines()]
    assert " teacher reference <- batches -> tokens /models/larger (data_parallel = 2)" in last
    assert " update policy <- loss -> weights my_package.losses:momentum (each minibatch)" in last
