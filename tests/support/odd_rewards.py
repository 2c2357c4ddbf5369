"""Reward functions that are slow, and some that fail."""

import time

from hpcrl.spool.record import Trajectory


def after(trajectory: Trajectory, *, seconds: float) -> float:
    """Return 1 after a while, so that a test can act while a reward is being computed."""
    del trajectory
    time.sleep(seconds)
    return 1.0


def of_every_other_group(trajectory: Trajectory) -> float:
    """Fail for one member of every other group."""
    domain, group, index = trajectory.id.split("/")
    del domain
    if int(group) % 2 and int(index) == 0:
        raise LookupError("this one cannot be scored")
    return 1.0


def of_nothing(trajectory: Trajectory) -> float:
    """Return 0, whatever the episode was like."""
    del trajectory
    return 0.0
