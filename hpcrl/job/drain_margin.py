"""The time that a job needs to drain, learned from what its trainer measured.

DrainMargin         the longest recent step and checkpoint
MARGIN_FACTOR, NUM_STEPS, READ_INTERVAL_S   constants
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

from hpcrl.campaign_dir.events import CampaignEvent, CheckpointSaved, StepFinished

MARGIN_FACTOR = 1.3
"""The next step may be longer than the longest seen."""
NUM_STEPS = 20
"""The number of the last steps that count."""
READ_INTERVAL_S = 5.0


class DrainMargin:
    """A reader of the trainer's events.

    The trainer sees the request to drain between two steps. If it has just started one, it needs the time of a step,
    of publishing, and of a checkpoint.
    """

    def __init__(
        self,
        poll_events: Callable[[], Iterable[CampaignEvent]],
        *,
        least_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the newest events of the trainer, and the least time to drain."""
        self._poll_events = poll_events
        self._least_s = least_s
        self._clock = clock
        self._next_read = float("-inf")
        self._step_times: deque[float] = deque(maxlen=NUM_STEPS)
        self._save_times: deque[float] = deque(maxlen=NUM_STEPS)

    def find_seconds(self) -> float:
        """Return how long before its end the job must drain."""
        if self._clock() >= self._next_read:
            self._next_read = self._clock() + READ_INTERVAL_S
            for event in self._poll_events():
                self._note_event(event)
        work_s = max(self._step_times, default=0.0) + max(self._save_times, default=0.0)
        return max(self._least_s, MARGIN_FACTOR * work_s)

    def _note_event(self, event: CampaignEvent) -> None:
        if isinstance(event, StepFinished):
            self._step_times.append((event.step_s or 0.0) + event.times.get("publish", 0.0))
        elif isinstance(event, CheckpointSaved):
            self._save_times.append(event.wall_s or 0.0)
