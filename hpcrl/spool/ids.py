"""Ids of groups, episodes, attempts and requests, and the domain names of held-out tasks.

They are made and parsed only here:

lake/12             group: domain and number of its task
lake/12/3           episode 3 of the group; its trajectory has the same id
lake/12/3/0         attempt 0 of the episode
lake/12/3/0/5       request 5 of the attempt to an engine
held-out:lake/4/3   episode 3 of a held-out task of domain `lake`
"""

HELD_OUT_PREFIX = "held-out:"
"""The prefix of the domain of a held-out task; no domain of a recipe has a colon."""
MAX_NUMBER_DIGITS = 18
"""A longer number is damage, not the number of a group or an episode."""


def make_group_id(domain: str, number: int) -> str:
    """Make the id of the group that plays task `number`."""
    return f"{domain}/{number}"


def make_episode_id(group: str, index: int) -> str:
    """Make the id of episode `index` of a group."""
    return f"{group}/{index}"


def make_attempt_id(episode: str, attempt: int) -> str:
    """Make the id of an attempt to play an episode."""
    return f"{episode}/{attempt}"


def make_request_id(attempt: str, number: int | str) -> str:
    """Make the id of a request that an attempt sends to an engine, or of a part of such a request."""
    return f"{attempt}/{number}"


def parse_group_id(group: str) -> tuple[str, int] | None:
    """Return the domain and the number of a group; None if this is not the id of one."""
    domain, _, number = group.rpartition("/")
    return (domain, int(number)) if domain and _is_number(number) else None


def parse_episode_id(episode: str) -> tuple[str, int] | None:
    """Return the group and the index of an episode; None if this is not the id of one."""
    group, _, index = episode.rpartition("/")
    return (group, int(index)) if group and _is_number(index) else None


def parse_request_id(request: str) -> tuple[str, str] | None:
    """Return the domain and the episode that a request belongs to; None if its id does not name an episode."""
    parts = request.split("/", maxsplit=3)
    return (parts[0], "/".join(parts[:3])) if len(parts) >= 3 else None


def parse_domain(id: str) -> str:
    """Return the domain that an id of any of these kinds starts with; the whole text if it has no other part."""
    return id.partition("/")[0]


def get_group(episode: str) -> str:
    """Return the id of the group of an episode."""
    return episode.rpartition("/")[0]


def get_domain(episode: str) -> str:
    """Return the domain of the task of an episode."""
    return get_group(get_group(episode))


def get_index(episode: str) -> int:
    """Return the index of an episode in its group."""
    return int(episode.rpartition("/")[2])


def make_held_out_domain(domain: str) -> str:
    """Make the domain name that held-out tasks of a recipe's domain have."""
    return HELD_OUT_PREFIX + domain


def is_held_out(domain: str) -> bool:
    """Return whether tasks of this domain are held out: only evaluated, never trained on."""
    return domain.startswith(HELD_OUT_PREFIX)


def strip_held_out(domain: str) -> str:
    """Return the recipe's domain that the domain of a task stands for."""
    return domain.removeprefix(HELD_OUT_PREFIX)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_NUMBER_DIGITS and str(int(text)) == text
