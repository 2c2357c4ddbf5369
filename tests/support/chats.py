"""The rows of all tests that a warm-up imitates.

make_chat  a conversation of alternating messages
"""

from typing import Any


def make_chat(*texts: str) -> dict[str, Any]:
    """Make the row of a conversation that starts with the user."""
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}
