"""What `hpcrl doctor --job` writes into a user's site file."""

from datetime import date
from pathlib import Path

import pytest

from hpcrl.config.site import load_site
from hpcrl.config.toml import user_folder
from hpcrl.doctor.result import fail_check, pass_check, write_facts

TODAY = date(2027, 1, 2)
REFUSED = pass_check("submission", "sbatch from the node: refused, as the site file has it")


@pytest.fixture
def own(home: Path) -> Path:
    """The user's own file of the site `lab`."""
    return user_folder("sites") / "lab.toml"


def test_a_new_file_extends_the_site(own: Path) -> None:
    assert write_facts("lab", [REFUSED], today=TODAY) == own
    site = load_site("lab")
    assert (site.verified, site.checked_on, site.nodes_may_submit) == (True, "2027-01-02", False)
    assert site.partitions["train"].gpu == "h100"


def test_what_the_user_wrote_stays_and_facts_are_replaced(own: Path) -> None:
    own.parent.mkdir(parents=True)
    top = '# mine\nextends = "lab"\naccount = "m1"  # of the project\nverified = false\n'
    mine = f"{top}\n[partitions.train]\nmax_nodes = 1\n"
    own.write_text(mine)
    for _ in range(2):
        write_facts("lab", [], today=TODAY)
    text = own.read_text()
    assert '# mine\nextends = "lab"\naccount = "m1"  # of the project\n' in text
    assert text.count("verified = true") == text.count("checked_on") == text.count("hpcrl doctor") == 1
    assert load_site("lab").partitions["train"].max_nodes == 1


def test_a_failure_takes_back_that_a_site_is_verified(own: Path) -> None:
    failure = fail_check("cores", "1 of 2 CPUs", "x")
    assert write_facts("lab", [failure], today=TODAY) is None
    assert not own.exists()
    write_facts("lab", [REFUSED], today=TODAY)
    assert write_facts("lab", [failure], today=TODAY) == own
    site = load_site("lab")
    assert (site.verified, site.nodes_may_submit) == (False, False), "what else is known stays"


def test_the_way_to_the_internet_is_recorded_unless_the_site_file_has_it(own: Path) -> None:
    reached = pass_check("internet", "reached")
    for _ in range(2):
        write_facts("lab", [reached, reached], today=TODAY, knows_internet=False)
    assert load_site("lab").network.internet_on_compute == "yes"
    own.write_text('extends = "lab"\n[network]\ninterface = "lo"\n')
    write_facts("lab", [reached], today=TODAY, knows_internet=False)
    assert "internet_on_compute" not in own.read_text(), "a table of the user's is left as it is"
