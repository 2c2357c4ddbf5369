"""The status of an episode: how it ended.

EpisodeStatus, STATUSES   the type and all its values
TRAINABLE                 those that can be trained on
"""

from typing import Literal, get_args

EpisodeStatus = Literal["done", "truncated", "aborted-stale", "aborted-redundant", "env-fault", "policy-fault"]
STATUSES: tuple[EpisodeStatus, ...] = get_args(EpisodeStatus)

TRAINABLE: frozenset[EpisodeStatus] = frozenset({"done", "truncated"})
"""The statuses of episodes that can be trained on."""
