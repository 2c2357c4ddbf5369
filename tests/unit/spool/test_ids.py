"""Ids of groups, episodes, attempts and requests can be parsed again, and damage is not mistaken for one."""

import pytest

from hpcrl.spool import ids

NOT_GROUPS = ("", "lake", "/1", "lake/", "lake/x", "lake/-1", "lake/007", "lake/٣", "lake/" + "9" * 19)
NOT_EPISODES = ("", "/3", "lake/12/", "lake/12/x", "lake/12/03", "lake/12/٣", "lake/12/" + "9" * 9999)


def test_episode_id_names_its_group_and_index():
    group = ids.make_group_id("lake", 12)
    episode = ids.make_episode_id(group, 3)
    assert (group, episode) == ("lake/12", "lake/12/3")
    assert ids.parse_group_id(group) == ("lake", 12)
    assert ids.parse_episode_id(episode) == (group, 3)
    assert (ids.get_group(episode), ids.get_index(episode)) == (group, 3)


def test_request_id_names_its_domain_and_episode():
    attempt = ids.make_attempt_id("lake/12/3", 1)
    request = ids.make_request_id(attempt, 5)
    assert request == "lake/12/3/1/5"
    assert ids.parse_request_id(request) == ("lake", "lake/12/3")
    assert ids.parse_request_id(ids.make_request_id(request, "2.0")) == ("lake", "lake/12/3")


@pytest.mark.parametrize("id", ["lake", "lake/12", "lake/12/3", "lake/12/3/0", "lake/12/3/0/5"])
def test_every_id_starts_with_its_domain(id):
    assert ids.parse_domain(id) == "lake"


def test_request_id_without_an_episode_is_not_parsed():
    assert ids.parse_request_id("lake/12") is None


@pytest.mark.parametrize("group", NOT_GROUPS)
def test_group_id_without_a_number_is_not_parsed(group):
    assert ids.parse_group_id(group) is None


@pytest.mark.parametrize("episode", NOT_EPISODES)
def test_episode_id_without_an_index_is_not_parsed(episode):
    assert ids.parse_episode_id(episode) is None


def test_held_out_domain_is_recognized_and_stripped():
    domain = ids.make_held_out_domain("lake")
    assert ids.is_held_out(domain)
    assert not ids.is_held_out("lake")
    assert (ids.strip_held_out(domain), ids.strip_held_out("lake")) == ("lake", "lake")
    assert ids.parse_group_id(ids.make_group_id(domain, 4)) == (domain, 4)
