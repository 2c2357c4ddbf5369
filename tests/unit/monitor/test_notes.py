"""Notes of one cause are one line with a number, and are printed the 1st, 10th, 100th time."""

from hpcrl.monitor.notes import MAX_NOTES, NoteLog, make_cause


def test_notes_of_one_cause_are_one_line_with_their_number() -> None:
    log = NoteLog()
    for index in range(656):
        log.add(time=float(index), text=f"reward: rnan/{index}/0: nan", bad=True, cause=make_cause(f"rnan/{index}/0"))
    (note,) = log
    assert note.line == "656 x reward: rnan/655/0: nan"
    assert log.num_due == 3


def test_notes_without_a_cause_are_a_line_each_in_order() -> None:
    log = NoteLog()
    for step in (10, 20):
        log.add(time=0.0, text=f"checkpoint at step {step}", bad=False)
    assert [note.line for note in log] == ["checkpoint at step 10", "checkpoint at step 20"]
    assert [note.number for note in log] == [1, 2]


def test_a_number_that_the_event_names_counts() -> None:
    log = NoteLog()
    for num in (1, 10, 100):
        log.add(time=0.0, text="reward: nan", bad=True, cause="x", num=num)
    (note,) = log
    assert (note.num, note.number) == (100, 3)
    assert note.line == "100+ x reward: nan"


def test_the_newest_notes_are_kept() -> None:
    log = NoteLog()
    for index in range(2 * MAX_NOTES):
        log.add(time=0.0, text=str(index), bad=False)
    assert [note.text for note in log] == [str(index) for index in range(MAX_NOTES, 2 * MAX_NOTES)]


def test_a_cause_differs_in_more_than_names_and_numbers() -> None:
    assert make_cause("lake/3/0: no 'a.txt'") == make_cause("lake/12/7: no 'b.txt'")
    assert make_cause("lake/3/0: no 'a.txt'") != make_cause("lake/3/0: no room")
