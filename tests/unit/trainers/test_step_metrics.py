"""The metrics of a step: the reason why it was skipped."""

import pytest
import torch

from hpcrl.learn.loss import LossSums
from hpcrl.monitor.advisories import SKIPPED_FOR_GRADIENT
from hpcrl.trainers.step_metrics import LearnResult


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), float("nan")), (0.1, float("inf"))])
def test_the_reason_of_a_step_that_is_not_finite_has_the_words_that_advisories_look_for(
    loss: float, norm: float
) -> None:
    sums = LossSums.zero(torch.device("cpu"))
    result = LearnResult(sums)
    result.add(sums._replace(loss=torch.tensor(loss)), norm=norm, num_tokens=8)
    fields = result.metric_fields()
    assert SKIPPED_FOR_GRADIENT in fields["skipped"]
    assert fields["grad_norm"] is None
