"""A further part of a vLLM engine over several nodes: processes without a server, as long as its meeting lasts.

run_part        join one meeting after the other until the job ends
MEETING_POLL_INTERVAL_S, PART_BEAT_INTERVAL_S  times
"""

import asyncio
import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpcrl.engines.vllm.engine_group import EngineGroup, GroupMeeting
from hpcrl.engines.vllm.server import SERVER_END_GRACE_S, VllmLaunch, check_version, find_cause, spawn_supervised
from hpcrl.system.files import measure_file
from hpcrl.system.processes import end_group

MEETING_POLL_INTERVAL_S = 0.5
PART_BEAT_INTERVAL_S = 5.0


async def run_part(launch: VllmLaunch, *, is_ending: Callable[[], bool]) -> None:
    """Join one meeting after the other until the job ends; a failure is reported to the first part."""
    check_version(launch)
    group, left = launch.group, ""
    assert group is not None
    while not is_ending():
        meeting = await asyncio.to_thread(group.read_meeting)
        if meeting is None or meeting.id == left:
            await asyncio.sleep(MEETING_POLL_INTERVAL_S)
            continue
        left = meeting.id
        if await asyncio.to_thread(group.join, meeting, node_rank=launch.node_rank):
            await _attend(launch, group, meeting, is_ending=is_ending)


async def _attend(
    launch: VllmLaunch, group: EngineGroup, meeting: GroupMeeting, *, is_ending: Callable[[], bool]
) -> None:
    """Run the processes of this part until they end, another meeting is announced, or the job ends."""
    scratch = Path(tempfile.mkdtemp(prefix="vllm-"))
    log_start = measure_file(launch.log)
    process = spawn_supervised(launch, scratch=scratch, meeting=meeting)
    beat, beats, beaten_s = group.beat_path(meeting, node_rank=launch.node_rank), itertools.count(), 0.0
    try:
        while not is_ending() and await asyncio.to_thread(group.read_meeting) == meeting:
            if process.poll() is not None:
                cause = find_cause(launch.log, start=log_start)
                reason = (
                    f"part {launch.node_rank} ended with {process.returncode}: {cause}; all of it is in {launch.log}"
                )
                group.report_failure(meeting, reason)
                return
            if time.monotonic() - beaten_s > PART_BEAT_INTERVAL_S:
                beaten_s = time.monotonic()
                with contextlib.suppress(OSError):
                    beat.write_text(str(next(beats)))
            await asyncio.sleep(MEETING_POLL_INTERVAL_S)
    finally:
        await asyncio.shield(asyncio.to_thread(end_group, process, grace_s=SERVER_END_GRACE_S))
        shutil.rmtree(scratch, ignore_errors=True)
