"""Fixtures of all suites: a private home, a tiny model, reports of failed campaigns, checks of skips and leftovers."""

import contextlib
import functools
import gc
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from hpcrl.system.garbage import pause_collection
from tests.support.campaigns import last_words
from tests.support.leftovers import LeftoverCheck, remove_own, start_check

if TYPE_CHECKING:
    from hpcrl.models.chat_template import ChatTemplate

hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

if "PYTEST_XDIST_WORKER" in os.environ:  # processes share the cores, and threads that wait for each other use them up
    os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):
    import readline  # noqa: F401 - it sets the size of the terminal for children, among them the processes of xdist
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)  # readline has set it without os.environ

LEFTOVERS = pytest.StashKey[LeftoverCheck]()
COMPILED = pytest.StashKey[Path]()
"""The directory of what torch compiles, for all processes of this session."""
IN_CI = bool(os.environ.get("CI"))
YOUNG_OBJECTS = 20_000
"""New objects between two collections: Python's 700 cost tests that parse or draw a tenth of their time."""
MUST_RUN_IN_CI = ("browser", "mpi", "slurm", "vllm")
KILLERS = {"agents", "e2e", "mpi", "slurm", "vllm"}
"""The folders whose tests kill steps of campaigns."""

LONG_FILES = (
    "test_megatron_model.py",
    "test_context_group.py",
    "test_cli.py",
    "test_worker_pool.py",
    "test_guardian.py",
    "test_reward_process.py",
    "test_state_machine.py",
    "test_algorithms.py",
    "test_agent.py",
    "test_courier_step.py",
    "test_trainer.py",
    "test_agent_judge.py",
    "test_metrics_export.py",
    "test_engine.py",
    "test_golden.py",
)
"""The files of the fast suites that take longest, the longest first; by their place the last two would come last."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private home for campaigns and for the user's sites and recipes."""
    monkeypatch.setenv("HPCRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that all suites share; read only."""
    from hpcrl.config.recipe import TinyModel
    from hpcrl.models.tiny import make_tiny_model

    directory = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(directory, TinyModel(), seed=0)
    return directory


@pytest.fixture(scope="session")
def template(tiny_model_dir: Path) -> "ChatTemplate":
    """The chat template of the tiny model."""
    from hpcrl.models.chat_layout import load_chat_template

    return load_chat_template(tiny_model_dir)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage during the imports, which make little, and never look through what they made again."""
    gc.set_threshold(YOUNG_OBJECTS)
    with pause_collection():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the files that take longest to the front: one that starts last leaves the other processes idle."""
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give one process all files that start ranks: their server takes seconds to import torch and Megatron."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class RankScheduling(LoadFileScheduling):
        """Scheduling by files, where those that start ranks count as two: with Megatron and without."""

        def _split_scope(self, nodeid: str) -> str:
            name = super()._split_scope(nodeid)
            return find_rank_group(config.rootpath / name) or name

    return RankScheduling(config, log)


@functools.cache
def find_rank_group(path: Path) -> str:
    text = path.read_text()
    if "run_ranks" not in text and "RANK_SERVER" not in text:
        return ""
    return "ranks of Megatron" if "megatron" in text else "ranks"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the last output of campaigns to the report of a failed test: their home is removed soon."""
    report = yield
    campaigns = getattr(item, "funcargs", {}).get("campaigns")
    if report.failed and campaigns is not None:
        report.sections += last_words(campaigns)
    return report


def must_run(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return isinstance(report, pytest.CollectReport) or any(mark in report.keywords for mark in MUST_RUN_IN_CI)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # the processes of xdist belong to the session that started them
        session.stash[LEFTOVERS] = start_check()
        session.stash[COMPILED] = Path(tempfile.mkdtemp(prefix="hpcrl-tests-compiled-"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(session.stash[COMPILED])  # else they leave one for each user


def find_leftovers(session: pytest.Session) -> list[str]:
    """Return what this session left; tests that kill campaigns leave what the next step on a node removes."""
    if LEFTOVERS not in session.stash:
        return []
    shutil.rmtree(session.stash[COMPILED], ignore_errors=True)
    if session.exitstatus == pytest.ExitCode.OK and (made := session.config._tmp_path_factory._basetemp) is not None:
        shutil.rmtree(made, ignore_errors=True)  # a process may have written while pytest removed it
    left = session.stash[LEFTOVERS].end()
    places = [*session.config.args, *(str(item.path) for item in getattr(session, "items", []))]
    is_killer = left.may_be_of_killed or any(KILLERS & set(Path(place).parts) for place in places)
    return [*left.lasting, *(() if is_killer else left.orphans)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail on what was left behind, in CI also if a whole suite was skipped or a module could not be imported."""
    if hasattr(session.config, "workerinput"):
        remove_own()  # xdist kills a process that does not end within 10 s
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    failures = []
    if left := find_leftovers(session):
        failures.append(f"{len(left)} files were left behind: {', '.join(left[:8])}")
    skipped = [r for r in reporter.stats.get("skipped", []) if must_run(r)] if reporter is not None else []
    if skipped and IN_CI:
        failures.append(f"{len(skipped)} tests were skipped that CI must run: {skipped[0].nodeid}")
    if (cache := getattr(session.config, "cache", None)) is not None:
        cache.set("hpcrl/failures", failures)  # .ci/suites.py names them last
    if reporter is None:
        return
    for failure in failures:
        reporter.write_line(failure, red=True)
    if failures and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
