"""Models of real families in vLLM: it loads the export of one, and takes updates under the names of its files."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from tests.support.families import DENSE_FAMILIES, EXPERT_FAMILIES
from tests.support.family_engines import assert_follows_trainer, make_served_model
from tests.support.trained import train_and_export

pytestmark = pytest.mark.long
FAMILIES = (*DENSE_FAMILIES, *EXPERT_FAMILIES)
MLA_ARGS = (
    *("--attention-backend", "CPU_MLA"),  # with AMX vLLM would take one that has bfloat16 alone
    *("--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}'),  # its kernel rotates some heads wrongly
)
FAMILY_ARGS = {"deepseek_v3": MLA_ARGS}
"""What vLLM 0.32 needs on CPUs."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_trainers_logprobs_from_its_export_and_after_each_update(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.served import place

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # vLLM's routers for CPUs would be compiled, which takes a minute
    exported = train_and_export(tmp_path / "model", make_model=partial(make_served_model, family=family))
    with place(tmp_path / "campaign", exported.exported) as there:
        launch = there.launch(family)
        launch = dataclasses.replace(launch, extra_args=(*launch.extra_args, *FAMILY_ARGS.get(family, ())))
        with there.engine(launch) as engine:
            assert_follows_trainer(engine, there, exported)
