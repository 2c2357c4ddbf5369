"""The rows of the next step, read during the current one."""

import threading

import numpy as np
import pytest

from hpcrl.errors import TrainError
from hpcrl.learn.batch import TrainingRow
from hpcrl.learn.distribute import ShareItem
from hpcrl.trainers.leader import RowPrefetcher

GENEROUS_S = 60


def share(*ids):
    return [[ShareItem(id=one, credit=[1.0], segment="s") for one in ids]]


class Reading:
    """A reader that records shares and threads; it waits while `may` is not set."""

    def __init__(self):
        self.read = []
        self.threads = []
        self.may_read = threading.Event()
        self.may_read.set()
        self.started = threading.Event()

    def __call__(self, asked):
        self.started.set()
        assert self.may_read.wait(GENEROUS_S)
        names = [item.id for items in asked for item in items]
        self.read.append(names)
        self.threads.append(threading.current_thread().name)
        if "bad" in names:
            raise TrainError("bad is missing")
        shared = np.zeros(3, np.int32)
        known = np.ones(2, np.float32)
        row = TrainingRow(
            inputs=shared,
            mask=shared == 0,
            targets=shared[:2],
            behaviour=known,
            credit=known,
            versions=shared[:2],
            teacher=known,
        )
        return [[row for _ in items] for items in asked]


@pytest.fixture
def reading():
    return Reading()


@pytest.fixture
def prefetcher(reading):
    made = RowPrefetcher(reading)
    yield made
    reading.may_read.set()
    made.close()


def test_a_right_prediction_is_read_once_in_the_background(prefetcher, reading):
    reading.may_read.clear()
    prefetcher.start(share("a", "b"))
    assert reading.started.wait(GENEROUS_S)  # the reader waits while a step would run
    reading.may_read.set()
    rows = prefetcher.rows(share("a", "b"))
    assert [len(part) for part in rows] == [2]
    assert reading.read == [["a", "b"]]
    assert reading.threads[0].startswith("ahead")


def test_a_wrong_prediction_changes_nothing(prefetcher, reading):
    prefetcher.start(share("a", "b"))
    assert [len(part) for part in prefetcher.rows(share("b", "c", "d"))] == [3]
    assert reading.read[-1] == ["b", "c", "d"]
    assert reading.threads[-1] == threading.current_thread().name


def test_the_same_rows_with_other_advantages_are_another_share(prefetcher, reading):
    prefetcher.start(share("a"))
    prefetcher.rows([[ShareItem(id="a", credit=[-1.0], segment="s")]])
    assert reading.read[-1] == ["a"]
    assert reading.threads[-1] == threading.current_thread().name


def test_prefetched_rows_are_not_views_of_a_mapped_file(prefetcher, reading):
    own = reading(share("a"))[0][0]
    prefetcher.start(share("a"))
    row = prefetcher.rows(share("a"))[0][0]
    assert row.inputs.base is None
    assert not np.shares_memory(row.inputs, own.inputs)


def test_a_prediction_that_cannot_be_read_is_an_error_only_if_it_was_right(prefetcher):
    prefetcher.start(share("bad"))
    assert [len(part) for part in prefetcher.rows(share("good"))] == [1]
    prefetcher.start(share("bad"))
    with pytest.raises(TrainError, match="bad is missing"):
        prefetcher.rows(share("bad"))


def test_one_prediction_at_a_time_is_kept(prefetcher, reading):
    for name in "abc":
        prefetcher.start(share(name))
    assert [len(part) for part in prefetcher.rows(share("c"))] == [1]
    prefetcher.rows(share("a"))
    assert reading.threads[-1] == threading.current_thread().name


def test_an_empty_prediction_reads_nothing(prefetcher, reading):
    prefetcher.start([])
    prefetcher.start([[]])
    assert prefetcher.rows([]) == []
    assert reading.read == [[]]


def test_prefetched_rows_have_all_columns(prefetcher, reading):
    prefetcher.start(share("a"))
    row = prefetcher.rows(share("a"))[0][0]
    expected = vars(reading(share("a"))[0][0])
    assert vars(row).keys() == expected.keys()
    for name, column in expected.items():
        np.testing.assert_array_equal(getattr(row, name), column)
