"""One driver at a time runs a campaign."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcrl.campaign_dir.campaign_lease import CampaignLease, LeaseHolder, take_lease
from hpcrl.campaign_dir.paths import CampaignDir


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignDir:
    return CampaignDir(tmp_path)


def make_holder(scheduler_id: str | None, *, job: int = 0, pid: int = 1) -> LeaseHolder:
    return LeaseHolder(job=job, scheduler_id=scheduler_id, node="env1", pid=pid, start_ticks=7)


def is_alive(_: LeaseHolder) -> bool:
    return True


def is_dead(_: LeaseHolder) -> bool:
    return False


def test_a_second_driver_is_refused_while_the_first_is_alive(campaign: CampaignDir) -> None:
    assert isinstance(take_lease(campaign, make_holder("11"), is_alive=is_alive), CampaignLease)
    found = take_lease(campaign, make_holder("12"), is_alive=is_alive)
    assert isinstance(found, LeaseHolder)
    assert found.describe() == "job 0 of this campaign runs already, as job 11"


def test_the_next_job_takes_the_lease_of_one_that_has_ended_which_then_sees_it(campaign: CampaignDir) -> None:
    first = take_lease(campaign, make_holder("11"), is_alive=is_alive)
    assert isinstance(first, CampaignLease)
    assert not first.is_lost()
    second = take_lease(campaign, make_holder("12", job=1), is_alive=is_dead)
    assert isinstance(second, CampaignLease)
    assert first.is_lost()
    assert not second.is_lost()


def test_a_job_that_runs_again_under_its_id_takes_its_own_lease(campaign: CampaignDir) -> None:
    take_lease(campaign, make_holder("11"), is_alive=is_alive)
    assert isinstance(take_lease(campaign, make_holder("11"), is_alive=is_alive), CampaignLease)


def test_two_local_drivers_are_not_one_job(campaign: CampaignDir) -> None:
    take_lease(campaign, make_holder(None, pid=1), is_alive=is_alive)
    assert isinstance(take_lease(campaign, make_holder(None, pid=2), is_alive=is_alive), LeaseHolder)


def test_of_drivers_that_start_together_one_gets_the_lease(campaign: CampaignDir) -> None:
    take_lease(campaign, make_holder("1"), is_alive=is_alive)
    ids = [str(number) for number in range(2, 18)]
    with ThreadPoolExecutor(len(ids)) as pool:
        taken = list(
            pool.map(
                lambda id: take_lease(campaign, make_holder(id), is_alive=lambda last: last.scheduler_id != "1"), ids
            )
        )
    assert sum(isinstance(one, CampaignLease) for one in taken) == 1
    assert sorted(path.name for path in campaign.leases.iterdir()) == ["000000", "000001"], "no draft is left"
