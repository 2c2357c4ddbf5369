"""The status of an episode: how it ended.

EpisodeStatus, STATUSES   the type and all its values
"""

from typing import Literal, get_args

EpisodeStatus = Literal["done", "truncated", "aborted-stale", "aborted-redundant", "env-fault", "policy-fault"]
STATUSES: tuple[EpisodeStatus, ...] = get_args(EpisodeStatus)
