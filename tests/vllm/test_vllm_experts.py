"""Experts that vLLM reports: the format of its answers, and the refusal of its build for CPUs."""

import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest

from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.vllm.engine import VllmEngine
from hpcrl.engines.vllm.protocol import build_sampling_params, make_expert_form, parse_completion
from hpcrl.errors import EngineError
from hpcrl.models.model_config import read_model_config
from hpcrl.spool.routed_experts import read_span
from tests.support.served import place
from tests.vllm.test_vllm_families import make_served_model

pytestmark = pytest.mark.long


def test_answers_and_requests_have_the_form_of_vllms_own_classes(tmp_path: Path) -> None:
    sampling_params = importlib.import_module("vllm.sampling_params")
    protocol = importlib.import_module("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    serial_utils = importlib.import_module("vllm.utils.serial_utils")
    make_served_model(tmp_path, family="deepseek_v3")
    form = make_expert_form(read_model_config(tmp_path / "config.json").fields, start=2)
    reported = np.random.default_rng(0).integers(0, 4, (5, 2, 2)).astype(np.uint8)  # of both layers, the first without
    choice = protocol.GenerateTokensChoice(
        index=0,
        finish_reason="stop",
        token_ids=[],
        routed_experts=serial_utils.numpy2base64(reported),
        weight_versions=[],
    )
    answer = {"choices": [choice.model_dump()]}
    (span,) = parse_completion(answer, num_top=0, remote_prefill=False, experts=form).experts
    np.testing.assert_array_equal(read_span(span), reported[:, 1:])
    request = GenerateRequest(request_id="r", token_ids=[1, 2, 3], max_new_tokens=1, experts_from=2)
    assert (
        sampling_params.SamplingParams(**build_sampling_params(request, max_new_tokens=1)).routed_experts_prompt_start
        == 2
    )


def test_vllm_for_cpus_refuses_to_report_them(tmp_path: Path) -> None:
    """The plan refuses it with this reason; where vLLM no longer gives it, the plan need not."""
    model = tmp_path / "model"
    make_served_model(model, family="qwen3_moe")
    with place(tmp_path / "campaign", model) as there:
        launch = dataclasses.replace(there.launch("only"), reports_experts=True, kv_connector=None, kv_dir=None)
        with pytest.raises(EngineError, match="the vLLM server ended with 1"):
            there.do(VllmEngine(launch, place=WorkerPlace(there.job, "here")).__aenter__())
        assert "Model Runner V2 requires Triton" in launch.log.read_text()
