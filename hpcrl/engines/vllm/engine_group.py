"""One vLLM engine over several nodes: where its parts meet, and how they notice that one of them is gone.

    EngineGroup      the parts of one engine, and the files by which they find each other
    GroupMeeting   the address at which the parts of one start meet
    GroupWatch     the first part's watch over the others
    MAX_PART_SILENCE_S, CHECK_INTERVAL_S  times

The first part, node rank 0, has the engine; the others have only processes of vLLM. Each start of the first part is
another meeting, at another port. A part joins a meeting once: if its processes end, or its worker is started again,
this meeting has failed for all, and the first part ends with the reason and is started again by the driver.
"""

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.errors import EngineError
from hpcrl.system import network
from hpcrl.system.files import make_private_dir, publish_file

MAX_PART_SILENCE_S = 120.0
CHECK_INTERVAL_S = 1.0


class GroupMeeting(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which the parts of one start meet."""

    id: str
    host: str
    port: int
    rpc_port: int
    """The port for calls between the copies of a data-parallel engine."""


@dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """The parts of one engine, and the files by which they find each other, in a directory that all nodes see."""

    directory: Path
    name: str
    num_nodes: int

    def open_meeting(self, host: str) -> GroupMeeting:
        """Announce a meeting at this node; the parts of an earlier one leave it."""
        (_, port), (_, rpc_port) = network.find_free_address(host), network.find_free_address(host)
        meeting = GroupMeeting(id=secrets.token_hex(8), host=host, port=port, rpc_port=rpc_port)
        publish_file(make_private_dir(self.directory) / f"{self.name}.json", msgspec.json.encode(meeting))
        return meeting

    def read_meeting(self) -> GroupMeeting | None:
        """Return the newest meeting; None before the first."""
        try:
            data = (self.directory / f"{self.name}.json").read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(data, type=GroupMeeting)

    def join(self, meeting: GroupMeeting, *, node_rank: int) -> bool:
        """Join a meeting; False, and it has failed for all, if this part joined it before."""
        try:
            self.beat_path(meeting, node_rank=node_rank).touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            self.report_failure(meeting, f"part {node_rank} was started again")
            return False
        return True

    def report_failure(self, meeting: GroupMeeting, reason: str) -> None:
        """Make the first part end, and the others wait for its next meeting."""
        publish_file(self._failure_path(meeting), reason)

    def read_failure(self, meeting: GroupMeeting) -> str | None:
        """Return why a meeting has failed; None if it has not."""
        try:
            return self._failure_path(meeting).read_text()
        except FileNotFoundError:
            return None

    def beat_path(self, meeting: GroupMeeting, *, node_rank: int) -> Path:
        """Return the file in which a part shows that it is there: a number that changes."""
        return self.directory / f"{self.name}.{meeting.id}.{node_rank}"

    def _failure_path(self, meeting: GroupMeeting) -> Path:
        return self.directory / f"{self.name}.{meeting.id}.failed"


@dataclass
class GroupWatch:
    """The first part's watch over the others."""

    group: EngineGroup
    meeting: GroupMeeting
    _seen: dict[int, tuple[str, float]] = field(default_factory=dict)
    """The last beat of each part that has joined, and when it changed."""
    _checked_s: float = 0.0

    def check(self) -> None:
        """Raise an EngineError if a part has failed, or has been silent for long since it joined."""
        now = time.monotonic()
        if now - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now
        if (reason := self.group.read_failure(self.meeting)) is not None:
            raise EngineError(f"the vLLM engine {self.group.name} has lost a node: {reason}")
        for node_rank in range(1, self.group.num_nodes):
            try:
                beat = self.group.beat_path(self.meeting, node_rank=node_rank).read_text()
            except OSError:
                continue  # it has not joined, for which the server's start has a limit
            if node_rank not in self._seen or self._seen[node_rank][0] != beat:
                self._seen[node_rank] = beat, now
            elif now - self._seen[node_rank][1] > MAX_PART_SILENCE_S:
                raise EngineError(
                    f"part {node_rank} of the vLLM engine {self.group.name} has been silent "
                    f"for {MAX_PART_SILENCE_S:g} s: its node is lost or too busy"
                )
