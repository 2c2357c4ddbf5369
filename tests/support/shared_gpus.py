"""Machines that seem to have GPUs, and what trainer and engines did with those that both had.

pretend_gpus    a folder for PATH with a program that lists GPUs
list_shifts     the times in which workers were on GPUs that the trainer and engines share
find_overlaps   those in which the trainer was there with an engine
"""

import os
from pathlib import Path
from typing import NamedTuple

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import events_of


class GpuShift(NamedTuple):
    """The time in which a worker was on GPUs."""

    worker: str
    role: str
    start: float
    end: float
    """The start too where nothing is known, because the worker was killed."""


def pretend_gpus(folder: Path, num: int) -> str:
    """Write a program that lists GPUs; return a PATH that finds it."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "echo 'NVIDIA H100 80GB HBM3, 81559'\n" * num)
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def list_shifts(campaign: CampaignDir) -> list[GpuShift]:
    """Return all shifts in the order of their start."""
    found: list[GpuShift] = []
    awake: dict[str, GpuShift] = {}
    for event in events_of(campaign, "shift"):
        worker, time_s = event["worker"], event["time"]
        if event["is_awake"]:
            if worker in awake:
                found.append(awake[worker])
            awake[worker] = GpuShift(worker, event["role"], time_s, time_s)
        else:
            found.append(awake.pop(worker)._replace(end=time_s))
    return sorted([*found, *awake.values()], key=lambda shift: shift.start)


def find_overlaps(campaign: CampaignDir) -> list[tuple[GpuShift, GpuShift]]:
    """Return the pairs of shifts of the trainer and of an engine that overlap."""
    shifts = list_shifts(campaign)
    training = [shift for shift in shifts if shift.role == "train"]
    serving = [shift for shift in shifts if shift.role != "train"]
    return [(one, other) for one in training for other in serving if one.start < other.end and other.start < one.end]
