"""The completions of all tests.

make_completion  the tokens of one answer, all with the same version and, unless given, the same log-probability
"""

from collections.abc import Sequence
from typing import Any

from hpcrl.engines.base import Completion


def make_completion(
    token_ids: Sequence[int] = (9,), *, version: int = 0, logprob: float = -1.0, **changed: Any
) -> Completion:
    """Make a completion that ended at the stop token; a field may be given, such as its finish reason."""
    fields: dict[str, Any] = {
        "token_ids": list(token_ids),
        "logprobs": [logprob] * len(token_ids),
        "versions": [version] * len(token_ids),
        "finish_reason": "stop",
    }
    return Completion(**{**fields, **changed})
