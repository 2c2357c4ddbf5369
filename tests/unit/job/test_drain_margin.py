"""The time that a job keeps for its last step and checkpoint."""

from hpcrl.campaign_dir.events import CampaignEvent, CheckpointSaved, StepFinished
from hpcrl.job.drain_margin import MARGIN_FACTOR, NUM_STEPS, READ_INTERVAL_S, DrainMargin

LEAST_S = 60.0


def make_margin(*batches: list[CampaignEvent]) -> DrainMargin:
    """Return a margin that reads one batch of events after the other, each time it is asked."""
    times = iter(range(0, 10_000, int(READ_INTERVAL_S)))
    left = iter(batches)
    return DrainMargin(lambda: next(left, []), least_s=LEAST_S, clock=lambda: float(next(times)))


def test_a_job_without_steps_keeps_the_time_of_its_recipe():
    assert make_margin().find_seconds() == LEAST_S


def test_a_long_step_its_publishing_and_a_checkpoint_are_kept():
    events = [StepFinished(step=1, step_s=800.0, times={"publish": 20.0}), CheckpointSaved(step=1, wall_s=180.0)]
    assert make_margin(events).find_seconds() == MARGIN_FACTOR * 1000.0


def test_short_steps_do_not_lower_the_time_of_the_recipe():
    assert make_margin([StepFinished(step=1, step_s=0.2)]).find_seconds() == LEAST_S


def test_a_long_step_is_forgotten_after_many_short_ones():
    margin = make_margin([StepFinished(step=1, step_s=800.0)], [StepFinished(step=2, step_s=100.0)] * NUM_STEPS)
    assert margin.find_seconds() == MARGIN_FACTOR * 800.0
    assert margin.find_seconds() == MARGIN_FACTOR * 100.0
