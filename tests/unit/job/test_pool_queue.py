"""The queue between a worker pool and its workers, and the tasks that are lost."""

import multiprocessing
import os
import queue
import signal
import tempfile
from pathlib import Path

import pytest

from hpcrl.job.pool_queue import LOST_AFTER_S, MAX_MESSAGE_BYTES, PoolQueue, TaskLedger
from tests.support.clocks import SettableClock


def take_forever(tasks: PoolQueue, results: PoolQueue) -> None:
    """Send back every task with the id of this process."""
    while True:
        results.put((os.getpid(), tasks.get()))


def test_a_queue_keeps_the_order_of_more_items_than_the_kernel_holds() -> None:
    tasks = PoolQueue()
    for number in range(2000):
        tasks.put(number)
    assert [tasks.get(timeout=10.0) for _ in range(2000)] == list(range(2000))
    assert tasks.is_empty()


def test_a_large_item_goes_through_a_file_that_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tasks, item = PoolQueue(), "x" * 10 * MAX_MESSAGE_BYTES
    tasks.put(item)
    assert len(list(tmp_path.iterdir())) == 1
    assert tasks.get() == item
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("block", [True, False])
def test_a_queue_without_items_is_empty(block: bool) -> None:
    tasks = PoolQueue()
    with pytest.raises(queue.Empty):
        tasks.get(block, timeout=0.01)


def test_a_reader_that_was_killed_while_it_waited_stops_no_other_reader() -> None:
    context = multiprocessing.get_context("spawn")
    tasks, results = PoolQueue(), PoolQueue()
    readers = [context.Process(target=take_forever, args=(tasks, results)) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        seen = set()
        while len(seen) < 2:
            tasks.put("hello")
            seen.add(results.get(timeout=60.0)[0])
        os.kill(readers[0].pid or 0, signal.SIGKILL)
        readers[0].join()
        for number in range(5):
            tasks.put(number)
        assert [results.get(timeout=60.0) for _ in range(5)] == [(readers[1].pid, number) for number in range(5)]
    finally:
        readers[1].kill()
        readers[1].join()


def test_a_task_is_lost_once_no_worker_has_had_it_for_a_while() -> None:
    clock = SettableClock()
    ledger = TaskLedger(clock=clock)
    for id in (1, 2, 3):
        ledger.note_task(id)
    ledger.note_result(3)
    assert ledger.find_lost([1]) is None
    clock.now = LOST_AFTER_S + 1.0
    assert ledger.find_lost([1]) == 2


def test_a_task_that_a_worker_has_taken_late_is_not_lost() -> None:
    clock = SettableClock()
    ledger = TaskLedger(clock=clock)
    ledger.note_task(1)
    assert ledger.find_lost([]) is None
    clock.now = LOST_AFTER_S - 1.0
    assert ledger.find_lost([1]) is None
    clock.now = LOST_AFTER_S + 1.0
    assert ledger.find_lost([]) is None
