"""Rows of the next step, read while the present one is learned from."""

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
    """Counts what is read, and by which thread; it waits until it is let."""

    def __init__(self):
        self.read = []
        self.threads = []
        self.may = threading.Event()
        self.may.set()
        self.began = threading.Event()

    def __call__(self, asked):
        self.began.set()
        assert self.may.wait(GENEROUS_S)
        names = [item.id for items in asked for item in items]
        self.read.append(names)
        self.threads.append(threading.current_thread().name)
        if "bad" in names:
            raise TrainError("bad is not there")
        shared = np.zeros(3, np.int32)
        none = np.zeros(0, np.float32)
        row = TrainingRow(inputs=shared, mask=shared > 0, targets=shared[:0], behaviour=none, credit=none)
        return [[row for _ in items] for items in asked]


@pytest.fixture
def reading():
    return Reading()


@pytest.fixture
def ahead(reading):
    made = RowPrefetcher(reading)
    yield made
    reading.may.set()
    made.close()


def test_a_right_guess_is_read_once_and_while_something_else_is_done(ahead, reading):
    reading.may.clear()
    ahead.begin(share("a", "b"))
    assert reading.began.wait(GENEROUS_S)  # the reader waits, and we are here: a step would run now
    reading.may.set()
    rows = ahead.rows(share("a", "b"))
    assert [len(part) for part in rows] == [2]
    assert reading.read == [["a", "b"]]
    assert reading.threads[0].startswith("ahead")


def test_a_wrong_guess_changes_nothing(ahead, reading):
    ahead.begin(share("a", "b"))
    assert [len(part) for part in ahead.rows(share("b", "c", "d"))] == [3]
    assert reading.read[-1] == ["b", "c", "d"]
    assert reading.threads[-1] == threading.current_thread().name


def test_the_same_rows_with_other_advantages_are_another_share(ahead, reading):
    ahead.begin(share("a"))
    ahead.rows([[ShareItem(id="a", credit=[-1.0], segment="s")]])
    assert reading.read[-1] == ["a"]
    assert reading.threads[-1] == threading.current_thread().name


def test_what_is_read_ahead_is_no_view_of_a_mapped_file(ahead, reading):
    own = reading(share("a"))[0][0]
    ahead.begin(share("a"))
    row = ahead.rows(share("a"))[0][0]
    assert row.inputs.base is None
    assert not np.shares_memory(row.inputs, own.inputs)


def test_a_guess_that_cannot_be_read_is_told_only_if_it_was_right(ahead):
    ahead.begin(share("bad"))
    assert [len(part) for part in ahead.rows(share("good"))] == [1]
    ahead.begin(share("bad"))
    with pytest.raises(TrainError, match="bad is not there"):
        ahead.rows(share("bad"))


def test_one_guess_at_a_time_is_kept(ahead, reading):
    for name in "abc":
        ahead.begin(share(name))
    assert [len(part) for part in ahead.rows(share("c"))] == [1]
    ahead.rows(share("a"))
    assert reading.threads[-1] == threading.current_thread().name


def test_an_empty_guess_reads_nothing(ahead, reading):
    ahead.begin([])
    ahead.begin([[]])
    assert ahead.rows([]) == []
    assert reading.read == [[]]
