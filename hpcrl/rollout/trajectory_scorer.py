"""Score single trajectories from an event loop, in processes that are killed when a call hangs: for evaluations.

TrajectoryScorer     requests the scores, each trajectory as a segment of one in a temporary directory
RECEIVE_TIMEOUT_S    the interval at which new requests are sent
"""

import asyncio
import contextlib
import itertools
import shutil
import tempfile
import threading
from collections import deque
from pathlib import Path

from hpcrl.errors import EnvFault, RewardError, SpoolError
from hpcrl.rollout.reward_process import RewardProcess, SegmentScores
from hpcrl.rollout.rewards import RewardScore
from hpcrl.spool.record import Trajectory
from hpcrl.spool.segment import write_segment

RECEIVE_TIMEOUT_S = 0.05


class TrajectoryScorer:
    """Scores trajectories, many at the same time; the process starts with the first of them."""

    def __init__(self, process: RewardProcess) -> None:
        self._process = process
        self._directory: Path | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._unsent: deque[Path] = deque()
        self._waiting: dict[str, asyncio.Future[SegmentScores]] = {}
        self._exchange: asyncio.Task[None] | None = None

    async def score(self, trajectory: Trajectory) -> RewardScore | None:
        """Return the score of a trajectory, None if none is asked for; EnvFault if the disk or the process fails."""
        path = await asyncio.to_thread(self._write_request, trajectory)
        answer: asyncio.Future[SegmentScores] = asyncio.get_running_loop().create_future()
        self._waiting[str(path)] = answer
        self._unsent.append(path)
        if self._exchange is None or self._exchange.done():
            self._exchange = asyncio.create_task(self._exchange_until_answered(), name="scores of evaluations")
        try:
            found = await answer
        finally:
            self._waiting.pop(str(path), None)
            with contextlib.suppress(OSError):  # the directory is removed at the end
                path.unlink()
        if found.error:
            raise EnvFault(f"the reward of {trajectory.id} was not computed: {found.error}")
        return found.scores[0]

    async def close(self) -> None:
        """End the process and all calls, which must not be waited for any more."""
        self._waiting.clear()
        if self._exchange is not None:
            await self._exchange
        await asyncio.to_thread(self._process.close)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _write_request(self, trajectory: Trajectory) -> Path:
        try:
            with self._lock:
                if self._directory is None:
                    self._directory = Path(tempfile.mkdtemp(prefix="hpcrl-scores-"))
            path = self._directory / f"{next(self._numbers)}.h5"
            write_segment(path, [trajectory])
        except (OSError, SpoolError) as error:
            raise EnvFault(f"the reward of {trajectory.id} was not computed: {error}") from error
        return path

    async def _exchange_until_answered(self) -> None:
        """Send requests and receive answers, in a thread, until all have one; a process that ends fails them all."""
        while self._waiting:
            try:
                answer = await asyncio.to_thread(self._send_and_receive)
            except (RewardError, OSError) as error:
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(EnvFault(str(error)))
                self._waiting.clear()
                self._unsent.clear()
                return
            if answer is None:
                continue
            waiting = self._waiting.pop(answer.segment, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def _send_and_receive(self) -> SegmentScores | None:
        while self._unsent:
            self._process.request(self._unsent.popleft())
        return self._process.receive(RECEIVE_TIMEOUT_S)
