"""A turn whose vLLM engine is killed in the middle of it is finished by another, through the router."""

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpcrl.campaign_dir.endpoints import EndpointReader, announce_endpoint
from hpcrl.engines.base import Completion, GenerateRequest
from hpcrl.engines.embedded.engine import load_model
from hpcrl.engines.http import RemoteEngine, make_client_session
from hpcrl.errors import EngineError
from hpcrl.rollout.routing.engines import RouterTimeouts
from hpcrl.rollout.routing.router import Router
from tests.support.served import greedy

if TYPE_CHECKING:
    from tests.support.served import Behind, Place

PROMPT = [2, 45, 78, 5, 36, 3]
NUM = 500


def test_turns_of_a_killed_engine_are_finished_elsewhere(
    pair: "list[Behind]", vllm_place: "Place", slow_model_dir: Path, tmp_path: Path
) -> None:
    other, doomed = pair
    announce_endpoint(tmp_path, doomed.endpoint)

    async def body() -> list[Completion]:
        async with (
            make_client_session() as session,
            Router(
                EndpointReader(tmp_path, job=0, longest_s=0.0),
                connect=lambda endpoint: RemoteEngine(endpoint, session),
                seed=0,
                timeouts=RouterTimeouts(refresh_interval_s=0.1, max_attempts=20),
            ) as router,
        ):
            turns = [asyncio.create_task(router.generate(request(number))) for number in range(4)]
            while vllm_place.do(doomed.engine.load_figures()).num_running < len(turns):
                await asyncio.sleep(0.05)
            pause = doomed.engine.server.post("/pause", limit_s=60, mode="keep", clear_cache="false")
            vllm_place.do(pause)  # none of them ends before the engine does
            announce_endpoint(tmp_path, other.endpoint)
            await router.refresh()
            os.killpg(doomed.engine.server.pid, signal.SIGKILL)
            return list(await asyncio.gather(*turns))

    answers = asyncio.run(body())
    model = load_model(slow_model_dir)
    for answer in answers:
        assert (len(answer.token_ids), set(answer.versions)) == (NUM, {0})
        assert answer.token_ids == greedy(model, PROMPT, answer.token_ids)
    with pytest.raises(EngineError, match="the vLLM server ended"):
        vllm_place.do(doomed.engine.wait_until_failed())
    with pytest.raises(EngineError, match="did not answer"):
        vllm_place.do(doomed.engine.generate(request(5)))


def request(number: int) -> GenerateRequest:
    return GenerateRequest(request_id=f"t{number}", token_ids=PROMPT, max_new_tokens=NUM, temperature=0.0)
