"""Sessions of agent programs for tests."""

from typing import Any

from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.recording import ConversationRecording
from hpcrl.rollout.agents.session import ProgramSession


def session_of(template: ChatTemplate, *, name: str = "s/0/0", **facts: Any) -> ProgramSession:
    """Return a new session; `facts` has its limits, and the fields that differ from the defaults."""
    trajectory = name.rpartition("/")[0]
    usual = {
        "domain": "s",
        "seed": 3,
        "newest_version": lambda: 0,
        "start_version": 0,
        "recording": ConversationRecording(template),
    }
    return ProgramSession(name=name, trajectory=trajectory, **(usual | facts))
