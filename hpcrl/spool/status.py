"""The status of an episode: how it ended."""

from typing import Literal, get_args

EpisodeStatus = Literal["done", "truncated", "aborted-stale", "aborted-redundant", "env-fault", "policy-fault"]
STATUSES: tuple[EpisodeStatus, ...] = get_args(EpisodeStatus)
