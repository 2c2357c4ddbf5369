"""The notices of a campaign's jobs to people: a command of the user, or a request to a chat service.

    JobNotice          what is sent
    JobNotices         send it as the recipe asks
    NOTICE_TIMEOUT_S   the time that a command or a server may take

A notice that fails is a line in the batch log; nothing waits long for it.
"""

import os
import subprocess
import threading
import time
import urllib.request

import msgspec

from hpcrl.campaign_dir.job_end import JobEnd
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.config.recipe import NoticesConfig, NoticeState
from hpcrl.job.batch_log import note_in_log
from hpcrl.system.processes import end_group

NOTICE_TIMEOUT_S = 10.0


class JobNotice(msgspec.Struct, frozen=True, kw_only=True):
    """One notice: JSON on the standard input of the command, and in the body of the request."""

    campaign: str
    job: int
    state: NoticeState
    reason: str = ""
    time: float
    text: str
    """The same in one sentence, under the name that chat services show."""


class JobNotices:
    """The notices of one job."""

    def __init__(self, job: JobDir, config: NoticesConfig) -> None:
        self._job, self._config = job, config

    def report_start(self) -> None:
        """Send in the background that the job has started."""
        self._start_sending("started", "")

    def report_end(self, end: JobEnd) -> None:
        """Send how the job has ended; return when that is done, or has taken too long."""
        for thread in self._start_sending(end.outcome, end.reason):
            thread.join(NOTICE_TIMEOUT_S + 1)

    def _start_sending(self, state: NoticeState, reason: str) -> list[threading.Thread]:
        config = self._config
        ways = [self._run_command] * bool(config.command) + [self._post_webhook] * bool(config.webhook)
        if not ways or (config.states and state not in config.states):
            return []
        name, job = self._job.campaign.name, self._job.number
        text = f"campaign {name}, job {job}: {state}" + (f": {reason}" if reason else "")
        notice = JobNotice(campaign=name, job=job, state=state, reason=reason, time=time.time(), text=text)
        threads = [threading.Thread(target=way, args=(msgspec.json.encode(notice),), daemon=True) for way in ways]
        for thread in threads:
            thread.start()
        return threads

    def _run_command(self, data: bytes) -> None:
        try:
            command = subprocess.Popen(
                self._config.command,
                stdin=subprocess.PIPE,
                stdout=2,  # the batch log
                start_new_session=True,
            )
        except OSError as error:
            note_in_log(f"hpcrl: the command of [notices] was not started: {error}")
            return
        try:
            command.communicate(data, timeout=NOTICE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end_group(command, grace_s=0.0)
            note_in_log(f"hpcrl: the command of [notices] took over {NOTICE_TIMEOUT_S:g} s and was ended")
            return
        if command.returncode:
            note_in_log(f"hpcrl: the command of [notices] ended with code {command.returncode}")

    def _post_webhook(self, data: bytes) -> None:
        """Send the request; its address may be a secret, and is not in any message."""
        name = self._config.webhook.removeprefix("$")
        address = os.environ.get(name, "") if name != self._config.webhook else name
        if not address:
            note_in_log(f"hpcrl: [notices] webhook: the variable {name} is not set in the job")
            return
        try:
            request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=NOTICE_TIMEOUT_S):
                pass
        except (OSError, ValueError) as error:
            note_in_log(f"hpcrl: [notices] webhook: {type(error).__name__}: {getattr(error, 'reason', 'no answer')}")
