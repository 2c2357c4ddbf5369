"""What an agent program may ask of the model, as the tests let it."""

from typing import Any

from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.recording import ConversationRecording
from hpcrl.rollout.agents.session import ProgramSession


def session_of(template: ChatTemplate, *, name: str = "s/0/0", **facts: Any) -> ProgramSession:
    """A session that begins; `facts` has its limits, and what differs from the usual."""
    trajectory = name.rpartition("/")[0]
    usual = {
        "domain": "s",
        "seed": 3,
        "newest": lambda: 0,
        "start_version": 0,
        "recording": ConversationRecording(template),
    }
    return ProgramSession(name=name, trajectory=trajectory, **(usual | facts))
