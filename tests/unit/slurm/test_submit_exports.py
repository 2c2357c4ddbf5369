"""The variables of the shell that jobs get."""

import pytest

from hpcrl.slurm.submit import make_job_environment, select_exports
from tests.support.plans import make_site

SHELL = {
    "PATH": "/bin",
    "LMOD_DIR": "/l",
    "HF_HOME": "/hf",
    "HF_TOKEN": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "MY_A": "1",
}


def test_without_a_list_jobs_get_everything() -> None:
    assert select_exports(SHELL, None) == SHELL


def test_with_a_list_jobs_get_what_it_names_and_what_modules_and_libraries_need() -> None:
    usual = {"PATH": "/bin", "LMOD_DIR": "/l", "HF_HOME": "/hf"}
    assert select_exports(SHELL, []) == usual
    assert select_exports(SHELL, ["MY_*"]) == usual | {"MY_A": "1"}


def test_a_submission_has_only_what_the_site_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "HF_TOKEN" not in make_job_environment(make_site("local", "exports=[]"))
    assert make_job_environment(make_site("local", 'exports=["HF_TOKEN"]'))["HF_TOKEN"] == "secret"
    assert "HF_TOKEN" in make_job_environment(make_site("local"))
