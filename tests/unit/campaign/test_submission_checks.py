"""What a site names that is not there is refused before the queue."""

from pathlib import Path

import pytest

from hpcrl.campaign.request import CampaignRequest, load_request
from hpcrl.campaign.submission_checks import check_plan, check_request, check_site_files
from hpcrl.errors import ConfigError

KEYS = ("image", "partitions.host.image", "python", "partitions.host.python")


def request_with(key: str, path: Path) -> CampaignRequest:
    settings = (f"site.{key}={path}", "site.container=bubblewrap")
    return load_request("quickstart", site="local", settings=settings)


@pytest.mark.parametrize("key", KEYS)
def test_a_file_of_the_site_that_does_not_exist_is_refused_with_its_key(home: Path, tmp_path: Path, key: str) -> None:
    absent = tmp_path / "absent"
    request, refusal = request_with(key, absent), f"site.{key} = {str(absent)!r} does not exist: correct the path"
    with pytest.raises(ConfigError) as caught:
        check_request(request)
    assert str(caught.value).startswith(refusal)
    assert any(note.startswith(refusal) for note in check_plan(request))


@pytest.mark.parametrize("key", KEYS)
def test_a_file_of_the_site_in_a_directory_that_only_nodes_may_have_gives_a_note(
    home: Path, tmp_path: Path, key: str
) -> None:
    path = tmp_path / "of-nodes" / "file"
    note = f"site.{key} = {str(path)!r} is not checked: {path.parent} is not on this machine"
    assert check_site_files(request_with(key, path)) == [note]


def test_files_of_the_site_that_exist_are_accepted_also_as_a_link_to_what_nodes_have(
    home: Path, tmp_path: Path
) -> None:
    link = tmp_path / "python"
    link.symlink_to(tmp_path / "absent")
    assert check_site_files(request_with("python", link)) == []
    assert check_site_files(request_with("image", tmp_path)) == []
