"""Ranks that prefetch the next step, killed in the middle of a step, or asked to abandon it: the state is the same."""

import pytest

from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.spool.segment import write_segment
from hpcrl.testing.ranks import run_ranks
from tests.support.learners import batch, make_model, segment_of_step

pytestmark = pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
LAST = 5


def test_ranks_killed_while_they_prefetch_resume_to_the_same_state(tmp_path):
    model_dir, spool = str(make_model(tmp_path / "model")), tmp_path / "spool"
    spool.mkdir()
    for step in range(1, LAST + 1):
        write_segment(spool / segment_of_step(step), batch(step))
    lead = "tests.support.learners:lead_steps"
    straight = run_ranks(2, lead, model_dir, str(spool), str(tmp_path / "straight"), LAST)[0]
    with pytest.raises(RuntimeError, match="rank 0 of"):
        run_ranks(2, lead, model_dir, str(spool), str(tmp_path / "killed"), LAST, 3)
    resumed = run_ranks(2, lead, model_dir, str(spool), str(tmp_path / "killed"), LAST)[0]
    assert list(resumed) == ["3", "4", "5"]  # steps 1 and 2 were committed, and 3 was not
    assert resumed == {step: straight[step] for step in resumed}
    last = [sorted((tmp_path / name).iterdir())[-1] for name in ("straight", "killed")]
    ids = {episode.id for step in range(1, LAST + 1) for episode in batch(step)}
    for path in last:
        consumed = ConsumedTrajectories.decode((path / "consumed.json").read_bytes())
        assert all(one in consumed for one in ids)
    assert (last[0] / "consumed.json").read_bytes() == (last[1] / "consumed.json").read_bytes()
    assert (last[0] / "state-00000.safetensors").read_bytes() == (last[1] / "state-00000.safetensors").read_bytes()


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_all_ranks_abandon_a_step_between_two_micro_batches_and_make_it_afterwards(tmp_path, sharding):
    model_dir, spool = str(make_model(tmp_path / "model")), tmp_path / "spool"
    spool.mkdir()
    for step in (1, 2):
        write_segment(spool / segment_of_step(step), batch(step))
    is_same, first, abandoned, second = run_ranks(
        2, "tests.support.learners:abandon_a_step", model_dir, str(spool), sharding
    )[0]
    assert is_same, "no weight has changed"
    assert abandoned.startswith("step 2 was abandoned")
    assert first != second
