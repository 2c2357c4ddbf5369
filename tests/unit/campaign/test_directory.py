"""The directory of campaigns that a site file names."""

from pathlib import Path

import pytest

from hpcrl.campaign.directory import find_campaigns_root, show_campaigns_root
from hpcrl.config.site import load_site
from hpcrl.config.toml import shipped_folder
from hpcrl.errors import SlurmError
from tests.support.plans import make_site

MACHINES_WITHOUT_FILES = {"generic-slurm", "lab", "lab-hetstep", "local", "workstation"}


def test_the_directory_of_campaigns_may_contain_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMBERWORK", "/lustre/orion/scratch/me")
    assert find_campaigns_root(make_site("frontier")) == Path("/lustre/orion/scratch/me/proj42/hpcrl")


def test_the_account_is_shown_where_other_variables_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMBERWORK", raising=False)
    assert show_campaigns_root(make_site("frontier")) == Path("$MEMBERWORK/proj42/hpcrl")


def test_a_missing_account_is_named_where_the_directory_of_campaigns_contains_it() -> None:
    site = load_site("frontier")
    with pytest.raises(SlurmError, match=r"'frontier' has no account.* set account .* or -s site\.account=NAME$"):
        find_campaigns_root(site)
    assert show_campaigns_root(site) == Path("$MEMBERWORK/{account}/hpcrl")


@pytest.mark.parametrize("account", ["", " "])
def test_an_empty_account_is_none(account: str) -> None:
    with pytest.raises(SlurmError, match="has no account"):
        find_campaigns_root(load_site("frontier", settings=(f"account={account}",)))


def test_every_shipped_machine_stores_campaigns_outside_the_home_directory() -> None:
    names = {path.stem for path in shipped_folder("sites").glob("*.toml")}
    assert [name for name in names - MACHINES_WITHOUT_FILES if not load_site(name).campaigns_dir] == []
