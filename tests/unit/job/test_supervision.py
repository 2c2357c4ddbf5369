"""What the driver watches: requests to end a job, failures that repeat, progress."""

import os
import signal
from collections.abc import Iterator

import pytest

from hpcrl.errors import HpcrlError
from hpcrl.job.guardian import CLOSE_GRACE_S
from hpcrl.job.supervision import TERM_GRACE_S, DrainRequest, EndRequests, RestartBudget
from hpcrl.system.processes import MAX_RESTARTS

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
END_TIME = 1000.0


@pytest.fixture
def requests(tmp_path) -> Iterator[EndRequests]:
    """Requests of a job that drains for 60 s, in a process that takes their signals."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    requests = EndRequests(tmp_path / "stop", drain_s=60.0)
    requests.listen()
    yield requests
    for number, handler in before.items():
        signal.signal(number, handler)


def find_drain(requests: EndRequests, *, now: float = 0.0) -> DrainRequest | None:
    return requests.find_drain(now=now, end_time=END_TIME)


def test_a_job_without_requests_continues_until_there_is_just_time_to_drain(requests):
    assert find_drain(requests, now=END_TIME - 60.0) is None
    request = find_drain(requests, now=END_TIME - 59.0)
    assert request is not None
    assert (request.grace_s, request.is_at_walltime) == (59.0 - CLOSE_GRACE_S, True)


def test_a_job_past_its_end_still_has_a_moment_to_drain(requests):
    request = find_drain(requests, now=END_TIME + 5.0)
    assert request is not None
    assert request.grace_s == 1.0


def test_a_signal_before_the_end_of_the_walltime_drains_the_job_for_the_next_one(requests):
    os.kill(os.getpid(), signal.SIGUSR2)
    request = find_drain(requests, now=END_TIME - 120.0)
    assert request is not None
    assert (request.grace_s, request.is_at_walltime) == (120.0 - CLOSE_GRACE_S, True)


def test_a_terminated_job_drains_faster_than_slurm_kills_and_queues_no_other(requests):
    os.kill(os.getpid(), signal.SIGTERM)
    assert find_drain(requests) == DrainRequest(reason="it received SIGTERM", grace_s=TERM_GRACE_S)


def test_a_stop_of_a_user_counts_before_the_end_of_the_walltime(requests):
    requests.stop.touch()
    os.kill(os.getpid(), signal.SIGUSR2)
    request = find_drain(requests)
    assert request is not None
    assert (request.grace_s, request.is_at_walltime) == (60.0, False)
    assert "hpcrl stop" in request.reason


def test_a_cancelled_job_does_not_drain(requests):
    os.kill(os.getpid(), signal.SIGINT)
    assert requests.is_cancelled
    assert find_drain(requests) is None


def test_each_name_has_restarts_of_its_own(tmp_path):
    budget = RestartBudget(tmp_path / "logs")
    for _ in range(MAX_RESTARTS):
        assert not budget.is_used_up("env-0")
        budget.count_failure("env-0", "exit code 1")
    budget.count_failure("env-1", "exit code 2")
    assert budget.is_used_up("env-0")
    with pytest.raises(HpcrlError, match=rf"env-0 failed {MAX_RESTARTS + 1} times.*exit code 9; .*{tmp_path}/logs"):
        budget.count_failure("env-0", "exit code 9")
