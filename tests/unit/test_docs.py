"""The documents: what they name exists, and what they show is accepted: recipes, sites, commands, Python."""

import argparse
import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hpcrl.campaign.request import load_request
from hpcrl.campaign_dir.events import CampaignEvent
from hpcrl.cli import make_parser
from hpcrl.commands.schemas import JSON_OUTPUTS
from hpcrl.config.key_table import list_keys
from hpcrl.config.pipeline import make_pipeline, render_text
from hpcrl.config.recipe import Recipe, make_recipe
from hpcrl.config.site import Site, load_site
from hpcrl.config.toml import ConfigKind, find_toml, load_table
from hpcrl.monitor import advisories
from hpcrl.spool.outcome import MAX_FAILED_SHARE
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from tests.support.doc_blocks import (
    TUTORIAL,
    DocBlock,
    find_blocks,
    find_files,
    find_missing,
    follow_page,
    list_commands,
    split_session,
)
from tests.support.printed_commands import LAB_SESSIONS, NOT_RUN, list_lines, list_printed, list_runnable, list_special

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


BENCH_SECTION = re.compile(r"^## `python -m bench\.(\w+)`\n\n```text\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def test_the_text_of_each_bench_is_that_of_its_module():
    sections = dict(BENCH_SECTION.findall((ROOT / "docs" / "benchmarks.md").read_text()))
    assert len(sections) >= 20
    for name, text in sections.items():
        paths = (ROOT / "bench" / f"{name}.py", ROOT / "bench" / name / "__main__.py")
        (path,) = (path for path in paths if path.exists())
        assert ast.get_docstring(ast.parse(path.read_text())) == text, path


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


def trace_command(*words: str, home: Path) -> list[tuple[str, str]]:
    """Return the functions that a command reaches, in the order of their first calls, with their files."""
    command = [sys.executable, "-m", "tests.support.call_order", *words]
    environ = os.environ | {"HPCRL_HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    return [(file, name) for file, name in json.loads(done.stdout.splitlines()[-1])]


def test_the_walk_of_a_submission_is_in_the_order_of_the_code(tmp_path):
    """A model of the hub that is not staged is planned and then refused; a tiny one is submitted."""
    walk = WALKS.read_text().partition("## D.")[2].partition("\n## ")[0]
    stations = {file: re.findall(r"[\w.]+", names) for file, names in STATION.findall(walk)}
    checks = "hpcrl/campaign/submission_checks.py"

    def list_reached(*words: str) -> list[str]:
        reached = trace_command("submit", *words, "--dry-run", home=tmp_path / "home")
        return list(dict.fromkeys(file for file, name in reached if name in stations.get(file, ())))

    order = list(stations)
    planned = list_reached("qwen3-8b-math", "--site", "perlmutter", "-s", "site.account=m1234")
    assert planned == [file for file in order if file in planned]
    assert checks in planned
    assert len(planned) > 25
    submitted = list_reached("quickstart", "--site", "local")
    written = [file for file in submitted if order.index(file) > order.index(checks)]
    assert written == [file for file in order if file in written]
    assert len(written) > 7


def test_the_climbs_of_planning_are_those_that_the_walks_name() -> None:
    """A module of hpcrl/plan whose functions n others of the package import is returned to n - 1 times."""
    planning = {str(path.relative_to(ROOT)) for path in ROOT.joinpath("hpcrl/plan").glob("*.py")}
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
    """A recipe of a real model is planned on a real machine."""
    example = tmp_path / "example.toml"
    example.write_text(FIRST_EXAMPLE.search(path.read_text())[1])
    if is_of_site(tomllib.loads(example.read_text())):
        assert load_request("quickstart", site=str(example)).plan.roles
    elif make_recipe(load_table("recipes", str(example))).model.config:
        assert load_request(str(example), site="perlmutter", settings=("site.account=m1234",)).plan.roles
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


HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def list_anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub, and the site, give to the headings of a page."""
    anchors: dict[str, int] = {}
    for heading in HEADING.findall(FENCED.sub("", path.read_text())):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())
        anchors[anchor] = anchors.get(anchor, 0) + 1
    return {anchor if not number else f"{anchor}-{number}" for anchor, num in anchors.items() for number in range(num)}


def find_broken_links(path: Path) -> list[str]:
    """Return the links to files that are not there, and to anchors that are not in them."""
    broken = []
    for target in LINK.findall(FENCED.sub("", path.read_text())):
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        if not re.match(r"[a-z]+:", target) and (
            not page.exists() or (anchor and page.suffix == ".md" and anchor not in list_anchors(page))
        ):
            broken.append(target)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_every_link_of_a_document_leads_to_a_file_and_a_heading_of_it(path):
    assert find_broken_links(path) == []


def test_a_link_to_a_file_or_a_heading_that_is_missing_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One `two.three` -- *four*\n\n## Again\n## Again\n```sh\n# not one\n```\n")
    assert list_anchors(page) == {"one-twothree----four", "again", "again-1"}
    links = "[a](page.md#again-1) [b](#again-2) [c](gone.md) [d](page.md#not-one) [e](https://here/#x) [f](#again)\n"
    page.write_text(page.read_text() + links)
    assert find_broken_links(page) == ["#again-2", "gone.md", "page.md#not-one"]


LANGUAGES = ("sh", "console", "toml", "python", "json", "jinja", "text")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
REQUIREMENTS = [*PYPROJECT["project"]["dependencies"], *(name for names in EXTRAS.values() for name in names)]
PACKAGES = {re.split(r"[^\w-]", name)[0].replace("-", "_").lower() for name in REQUIREMENTS} | {"datasets"}
USERS_OWN = ("my_", "bare_torch")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_.-]*")


def place(block: DocBlock) -> str:
    return f"{block.path.name}:{block.line}"


def blocks_of(*languages: str) -> list[DocBlock]:
    return [block for path in DOCUMENTS for block in find_blocks(path, *languages)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_every_block_of_a_document_has_a_language(path):
    """Text that is none of what is checked here has `text`."""
    assert [block.line for block in find_blocks(path) if block.language not in LANGUAGES] == []


def is_of_site(table) -> bool:
    """Whether a file is of a site: it extends a shipped one, or a key is none of a recipe's."""
    parent = table.get("extends", "")
    return (ROOT / "sites" / f"{parent}.toml").is_file() or not table.keys() <= {*Recipe.__struct_fields__, "extends"}


def complete(text: str, parent: str) -> str:
    """Return a whole file: a fragment, which neither has a name nor extends another file, extends `parent`."""
    return text if tomllib.loads(text).keys() & {"name", "extends"} else f'extends = "{parent}"\n{text}'


@pytest.mark.parametrize("block", blocks_of("toml"), ids=place)
def test_an_example_in_toml_is_a_recipe_or_a_site(block, tmp_path):
    for text, name in NAMED_EXAMPLE.findall(block.path.read_text()):  # what an example extends is beside it
        (tmp_path / f"{name}.toml").write_text(text)
    example = tmp_path / "the-example.toml"
    if is_of_site(tomllib.loads(block.text)):
        example.write_text(complete(block.text, "generic-slurm"))
        load_site(str(example))
    else:
        example.write_text(complete(block.text, "quickstart"))
        make_recipe(load_table("recipes", str(example)))


@pytest.mark.parametrize("block", blocks_of("python"), ids=place)
def test_an_example_in_python_compiles_and_imports_what_exists(block):
    tree = ast.parse(block.text)
    compile(tree, place(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            imported = [name.name for name in node.names]
        else:
            continue
        for name in imported:
            top = name.partition(".")[0]
            is_known = importlib.util.find_spec(top) or top in PACKAGES or top.startswith(USERS_OWN)
            assert resolves(name) if top == "hpcrl" else is_known, f"{place(block)}: {name}"


def commands_of(block: DocBlock) -> list[list[str]]:
    text = block.text
    if block.language == "console":
        text = "\n".join(command for command, _ in split_session(text))
    return list(list_commands(text))


def parse_hpcrl(words: list[str]) -> argparse.Namespace:
    """Parse a command; N stands for a number."""
    return make_parser().parse_args(["3" if word == "N" else word for word in words])


def test_a_command_that_does_not_exist_and_an_option_that_does_not_are_found():
    for command in ("hpcrl submitt quickstart --site lab", "hpcrl plan quickstart --site lab --cheap"):
        with pytest.raises(SystemExit):
            parse_hpcrl(next(list_commands(command))[1:])


def test_commands_are_found_in_pipes_substitutions_and_continued_lines():
    text = 'A=1 hpcrl ls | head  # hpcrl x\neval "$(hpcrl lab env)"\nhpcrl man > FILE && hpcrl \\\n  gc\n'
    found = [words for words in list_commands(text) if words[0] == "hpcrl"]
    assert found == [["hpcrl", "ls"], ["hpcrl", "lab", "env"], ["hpcrl", "man"], ["hpcrl", "gc"]]


OTHER_PROGRAMS = {
    "agent/bin/pip",
    "apt-get",
    "cat",
    "cd",
    "cp",
    "echo",
    "eval",
    "export",
    "inspect",
    "ln",
    "mkdir",
    "python",
    "sinfo",
    "source",
    "uv",
    "~/mini-swe-agent/python/bin/python3",
}


@pytest.mark.parametrize("block", blocks_of("sh", "console"), ids=place)
def test_the_commands_of_a_document_are_accepted(block, capsys):
    for words in commands_of(block):
        program, *arguments = words
        match program.removeprefix(".venv/bin/"):
            case "hpcrl":
                check_hpcrl(block, arguments)
            case "make":
                targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
                assert {word for word in arguments if "=" not in word} <= {*targets}, words
            case "pip":
                wanted = [name for word in arguments for name in re.findall(r"hpcrl\S*\[([\w,-]+)\]", word)]
                assert {extra for names in wanted for extra in names.split(",")} <= EXTRAS.keys(), words
            case "python" if arguments[:1] == ["-m"]:
                top = arguments[1].partition(".")[0]
                assert top not in ("hpcrl", "bench") or importlib.util.find_spec(arguments[1]), words
            case other:
                assert other in OTHER_PROGRAMS, words


def check_hpcrl(block: DocBlock, arguments: list[str]) -> None:
    """Parse a command of hpcrl; what it names exists, is a placeholder in capitals, or a path of the reader's own."""
    assert not re.search(r"<\w+>|\.\.\.", " ".join(arguments)), arguments
    parsed = parse_hpcrl(arguments)
    for kind, attribute in (("recipes", "recipe"), ("sites", "site")):
        name = getattr(parsed, attribute, None)
        if isinstance(name, str) and not PLACEHOLDER.fullmatch(name):
            assert is_known(kind, name), f"{place(block)}: {name}"


def is_known(kind: ConfigKind, name: str) -> bool:
    """Whether a recipe or site is shipped, or is the reader's own: a path, or one that starts with `my`."""
    if name.startswith(("my", "/")):
        return True
    return (ROOT / name).is_file() if name.endswith(".toml") else find_toml(kind, name).is_file()


WITH_FILES = [path for path in DOCUMENTS if find_files(path)]


@pytest.mark.parametrize("path", WITH_FILES, ids=label)
def test_the_files_of_a_page_are_a_campaign_that_may_be_submitted(path, tmp_path, monkeypatch):
    """The first line of a block names its file; code that a recipe names is imported and checked as by `submit`."""
    for name, text in find_files(path).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HPCRL_HOME", str(tmp_path / "home"))
    for file in tmp_path.glob("*.toml"):
        table = tomllib.loads(file.read_text())
        if is_of_site(table):
            words = ["plan", "quickstart", "--site", str(file)]
        elif make_recipe(load_table("recipes", str(file))).model.config:
            words = ["plan", str(file), "--site", "perlmutter", "-s", "site.account=m1234"]
        else:
            words = ["submit", str(file), "--site", "local", "--dry-run"]
        done = subprocess.run([sys.executable, "-m", "hpcrl.cli", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


MOVING = [ROOT / "docs" / "howto" / name for name in ("from-prime-rl.md", "from-verl.md", "megatron.md")]
KEYS = {entry.key for kind in (Recipe, Site) for entry in list_keys(kind)}


@pytest.mark.parametrize("path", MOVING, ids=label)
def test_the_keys_beside_those_of_another_program_exist(path):
    rows = re.findall(r"^\| `.* \|$", path.read_text(), flags=re.MULTILINE)
    column = 0 if path.name == "megatron.md" else 1
    cells = [row.strip("| ").split(" | ")[column] for row in rows]
    named = {name for cell in cells for name in re.findall(r"`([a-z][\w.]*)`", cell)}
    assert named
    assert named <= KEYS


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ("step 3\ndone\n", "step 40\ndone\n", None),
        ("in /a/b\n", "in /c\n", None),
        ("...\ndone\n", "step 40\nstep 41\ndone\n", None),
        ("step 3\n...\n", "step 40\nstep 41\n", None),
        ("step 3\n", "step 40\nstep 41\n", "nothing more"),
        ("step 3\ndone\n", "step 40\nmore\ndone\n", "done"),
        ("...\ndone\nstep 1\n", "step 1\ndone\n", "step 1"),
    ],
)
def test_what_a_page_shows_is_compared_with_what_is_printed(shown, printed, missing):
    assert find_missing(shown, printed) == missing


def test_the_supercomputer_of_the_tutorial_is_planned_as_shown():
    def run(words):
        environment = os.environ | {"COLUMNS": "100"}
        command = [sys.executable, "-m", "hpcrl.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    assert follow_page(TUTORIAL / "supercomputer.md", run) == 3


def test_the_memory_of_a_plan_is_printed_as_shown():
    """With its numbers, which the text explains."""
    blocks = find_blocks(ROOT / "docs" / "learning.md", "sh", "text")
    (command,) = (block.text for block in blocks if block.text.startswith("hpcrl plan"))
    (shown,) = (block.text for block in blocks if block.text.startswith("memory "))
    [[_, *words]] = list_commands(command)
    done = subprocess.run([sys.executable, "-m", "hpcrl.cli", *words], capture_output=True, text=True, check=True)
    assert [line for line in shown.splitlines() if line not in done.stdout.splitlines()] == []


def test_the_pictures_are_small_and_every_one_is_shown():
    pictures = sorted((ROOT / "docs" / "pictures").iterdir())
    assert sum(picture.stat().st_size for picture in pictures) < 300_000
    texts = [path.read_text() for path in DOCUMENTS]
    assert [one.name for one in pictures if not any(f"pictures/{one.name})" in text for text in texts)] == []
    assert [one.name for one in pictures if one.suffix == ".svg" and "url(http" in one.read_text()] == []


def test_every_line_that_needs_more_than_a_finished_campaign_is_printed_somewhere():
    printed = {line for lines in list_printed().values() for line in lines}
    between = ("hpcrl stop ", "hpcrl lab up --like ", "HPCRL_LAB=")
    assert {line for line in list_special() - printed if not line.startswith(between)} == set()
    assert not {line for lines in NOT_RUN.values() for line in lines} & set().union(*LAB_SESSIONS.values())


def test_most_pages_with_commands_have_some_that_are_run_as_printed():
    """All lines that are not listed are run (tests/e2e/test_printed_commands.py): a new line joins them by itself."""
    places = {place for place in list_printed() if list_runnable(place)}
    assert {"docs/commands.md", "docs/trajectories.md", "docs/simulation.md", "hpcrl traj show --help"} <= places
    assert sum(map(len, map(list_runnable, places))) > 50


def test_the_lines_of_shell_text_are_whole_and_without_comments():
    text = "# first\nhpcrl plan a \\\n  --site b   # why\n\necho 'x#y'\n"
    assert list_lines(text) == ["hpcrl plan a --site b", "echo 'x#y'"]


FOLLOWED = {"laptop.md", "lab.md", "gpu-node.md", "supercomputer.md"}


def test_every_session_is_on_a_page_of_the_tutorial_that_a_test_follows():
    assert {block.path.name for block in blocks_of("console")} == FOLLOWED
    assert {block.path.parent for block in blocks_of("console")} == {TUTORIAL}


def test_the_page_of_commands_has_every_exit_code_and_schema():
    text = (ROOT / "docs" / "commands.md").read_text()
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert codes == [EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED]
    listed = re.search(r"lists the names\): ([^.]*)\.", text)
    assert listed is not None
    assert set(listed[1].replace("\n", " ").replace(",", " ").split()) == set(JSON_OUTPUTS)


@pytest.mark.parametrize(
    ("advisory", "threshold"),
    [
        ("domain-fails", advisories.MIN_FAILED_AT_START),
        ("domain-failing", MAX_FAILED_SHARE),
        ("env-faults", advisories.MAX_ENV_FAULT_SHARE),
        ("truncation", advisories.MAX_TRUNCATED_SHARE),
        ("stale-episodes", advisories.MAX_STALE_SHARE),
        ("flat-groups", advisories.MAX_FLAT_SHARE),
        ("logprob-mismatch", advisories.MAX_KL_FRESH),
        ("gradient-explodes", advisories.MAX_GRADIENT_GROWTH),
        ("steps-skipped", advisories.MAX_SKIPPED_SHARE),
        ("entropy-collapse", advisories.MIN_ENTROPY_SHARE),
        ("trainer-waits", advisories.MAX_WAIT_SHARE),
        ("engines-idle", advisories.MIN_BUSY_SHARE),
        ("step-overdue", advisories.MAX_STEP_DELAY),
        ("workers-die", advisories.MIN_WORKER_FAILURES),
    ],
)
def test_the_page_of_advisories_has_their_thresholds(advisory, threshold):
    (row,) = re.findall(rf"^\| `{advisory}` \|.*$", (ROOT / "docs" / "monitoring.md").read_text(), re.MULTILINE)
    assert re.search(rf"(?<![\d.])({threshold:g}|{threshold * 100:g} %)(?![\d.])", row), row
