"""What is asked of vLLM, and read from its answers, where experts are to be reported."""

import base64
import dataclasses
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.vllm.protocol import build_sampling_params, make_expert_form, parse_chunk, parse_completion
from hpcrl.engines.vllm.server import VllmLaunch, build_command, build_environment
from hpcrl.errors import EngineError
from hpcrl.spool.routed_experts import read_span

FIELDS: dict[str, Any] = {
    **{"model_type": "glm4_moe", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "n_routed_experts": 8},
    **{"first_k_dense_replace": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
REQUEST = GenerateRequest(request_id="r", token_ids=[1, 2, 3], max_new_tokens=2, experts_from=1)


def make_answer(experts: np.ndarray | None, *, finish_reason: str | None = "stop") -> dict[str, Any]:
    """Make an answer of /inference/v1/generate with two tokens."""
    written = io.BytesIO()
    if experts is not None:
        np.save(written, experts, allow_pickle=False)
    entry = {"logprob": -1.0, "top_logprobs": []}
    choice = {
        "token_ids": [4, 5],
        "logprobs": {"content": [entry, entry]},
        "finish_reason": finish_reason,
        "weight_versions": [{"start": 0, "end": 2, "version": "0"}],
        "routed_experts": base64.b64encode(written.getvalue()).decode() if experts is not None else None,
    }
    return {"choices": [choice]}


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16)])
def test_layers_without_experts_are_left_out_and_tokens_start_where_asked(num_experts: int, dtype: type) -> None:
    reported = np.random.default_rng(0).integers(0, num_experts, (3, 4, 2)).astype(np.uint8)
    form = make_expert_form(FIELDS | {"n_routed_experts": num_experts}, start=1)
    answer = parse_completion(make_answer(reported), num_top=0, remote_prefill=False, experts=form)
    (span,) = answer.experts
    assert (span.start, span.end) == (1, 4), "the last of five tokens was not read"
    assert read_span(span).dtype == dtype
    np.testing.assert_array_equal(read_span(span), reported[:, 1:])


def test_an_answer_without_the_experts_that_were_asked_for_is_an_error() -> None:
    form = make_expert_form(FIELDS, start=0)
    with pytest.raises(EngineError, match=r"vLLM reported no experts, which train\.router_replay = true needs"):
        parse_completion(make_answer(None), num_top=0, remote_prefill=False, experts=form)
    assert parse_chunk(make_answer(None, finish_reason=None), num_top=0, experts=form).experts == []
    assert parse_completion(make_answer(None), num_top=0, remote_prefill=False).experts == []


def test_an_answer_with_an_unreadable_array_is_an_error() -> None:
    answer = make_answer(None)
    answer["choices"][0]["routed_experts"] = "AAAA"
    with pytest.raises(EngineError, match="vLLM sent an invalid answer"):
        parse_completion(answer, num_top=0, remote_prefill=False, experts=make_expert_form(FIELDS, start=0))


def test_a_server_reports_experts_only_if_it_is_to() -> None:
    plain = VllmLaunch(model=Path("/m"), log=Path("/l"))
    reporting = dataclasses.replace(plain, reports_experts=True)
    for launch, wanted in ((plain, False), (reporting, True)):
        given = build_environment(launch, scratch=Path("/s"), inherited={})
        assert ("--enable-return-routed-experts" in build_command(launch, scratch=Path("/s"))) == wanted
        assert given.get("VLLM_USE_V2_MODEL_RUNNER") == ("1" if wanted else None)
    assert build_sampling_params(REQUEST, max_new_tokens=2)["routed_experts_prompt_start"] == 1
    silent = msgspec.structs.replace(REQUEST, experts_from=None)
    assert "routed_experts_prompt_start" not in build_sampling_params(silent, max_new_tokens=2)
