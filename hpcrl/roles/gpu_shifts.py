"""Shifts of the trainer and of engines on GPUs that both have: while one works, the other's state is in host memory.

    TrainerShift         the side of the trainer's rank 0
    EngineShift          the side of an engine worker
    open_trainer_shift, open_engine_shift   the shift of a worker; None where it has its GPUs alone
    open_shift_locks     the locks of this node, for the other ranks

The trainer asks for the GPUs when it has the groups of a step, and leaves them when it has none for another one; the
engines continue with the newest version.
"""

import time
from collections.abc import Callable

from hpcrl.campaign_dir.events import GpuShiftChanged
from hpcrl.roles.context import ROLE_ROUND_INTERVAL_S, WorkerContext
from hpcrl.system.files import make_private_dir, publish_file
from hpcrl.system.gpu_shifts import ShiftLocks
from hpcrl.system.pulse import note_work
from hpcrl.system.wakeups import WakeEvent
from hpcrl.weights.window.file import make_window_key

SHIFT_POLL_INTERVAL_S = 0.02


def open_shift_locks(context: WorkerContext) -> ShiftLocks | None:
    """Open the locks of this node; None where the trainer's GPUs are its own."""
    if not context.plan.has_gpu_shifts:
        return None
    window = make_window_key(context.campaign, node=context.place.node).path
    path = window.with_name(f"{window.name}+shifts")
    make_private_dir(context.job.windows)
    publish_file(context.job.windows / path.name, str(path))  # it is removed with the windows of the job
    return ShiftLocks(path)


def open_trainer_shift(context: WorkerContext) -> "TrainerShift | None":
    """Open the shift of the trainer."""
    locks = open_shift_locks(context)
    return None if locks is None else TrainerShift(locks, context)


def open_engine_shift(context: WorkerContext) -> "EngineShift | None":
    """Open the shift of an engine worker, if any of its GPUs is one of the trainer's."""
    if not context.plan.shares_gpus(context.role, context.index):
        return None
    locks = open_shift_locks(context)
    return None if locks is None else EngineShift(locks, context)


class TrainerShift:
    """The side of the trainer's rank 0, which asks for the GPUs and waits until the engines have left them."""

    def __init__(self, locks: ShiftLocks, context: WorkerContext) -> None:
        self._locks = locks
        self._context = context
        self._sender = context.make_sender("prefill", "decode")
        self.is_held = False

    def start(self, *, should_end: Callable[[], bool] = lambda: False) -> bool:
        """Wait until engines have left the GPUs, those that end too, and take them; False if `should_end` first."""
        started = time.monotonic()
        for take in (self._request, self._locks.try_start_training):
            while not take():
                if should_end():
                    self._locks.end_training()
                    return False
                note_work()  # an engine that does not leave them is ended for that
                time.sleep(SHIFT_POLL_INTERVAL_S)
        self.is_held = True
        wait_s = round(time.monotonic() - started, 4)
        self._context.events.emit(GpuShiftChanged(is_awake=True, wait_s=wait_s))
        return True

    def _request(self) -> bool:
        """Ask the engines to leave the GPUs; False while another trainer does."""
        has_requested = self._locks.request()
        if has_requested:
            self._sender.wake()
        return has_requested

    def end(self) -> None:
        """Leave the GPUs to the engines."""
        self._context.events.emit(GpuShiftChanged(is_awake=False))
        self.is_held = False
        self._locks.end_training()
        self._sender.wake()


class EngineShift:
    """The side of an engine worker, which leaves the GPUs when the trainer asks for them."""

    def __init__(self, locks: ShiftLocks, context: WorkerContext) -> None:
        self._locks = locks
        self._context = context

    @property
    def fd(self) -> int:
        """The descriptor that a server inherits, which may outlive this worker for a moment."""
        return self._locks.fd

    @property
    def is_requested(self) -> bool:
        """Return whether the trainer asks for the GPUs."""
        return self._locks.is_requested()

    async def start(self, wakeups: WakeEvent) -> bool:
        """Wait until the trainer has left the GPUs, and take them; return False if the job ends before."""
        started = time.monotonic()
        while not self._context.draining:
            if self._locks.try_start_serving():
                wait_s = round(time.monotonic() - started, 4)
                self._context.events.emit(GpuShiftChanged(is_awake=True, wait_s=wait_s))
                return True
            note_work()
            await wakeups.wait(ROLE_ROUND_INTERVAL_S)
        return False

    def end(self) -> None:
        """Leave the GPUs to the trainer."""
        self._context.events.emit(GpuShiftChanged(is_awake=False))
        self._locks.end_serving()
