"""A route of the vLLM server that switches to the version that is ready.

    POST /hpcrl/switch {"version": 7, "keeps_old_kv": false, "has_adapters": false}

    SwitchPlugin    the plugin, which vLLM finds by its entry point for routes
    switch_version  the route

The steps are those of vLLM's own routes, called within the server. The answer is sent while generation is paused, so
that the engine has the version before its first token.
"""

from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

from hpcrl.engines.vllm.adapter_worker import make_request
from hpcrl.engines.vllm.protocol import ADAPTERS_MODEL
from hpcrl.engines.vllm.weight_plugin import PLUGIN_NAME


class SwitchPlugin:
    """The plugin in the form that vLLM expects."""

    name = PLUGIN_NAME
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""
        app.add_api_route("/hpcrl/switch", switch_version, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Do nothing: the engine is found with each request."""


async def switch_version(request: Request) -> JSONResponse:
    """Pause, use the version, and reset the caches unless KV is kept; after a failure generation stays paused."""
    body = await request.json()
    version = int(body["version"])
    state = request.app.state
    engine = state.engine_client
    if body["has_adapters"]:
        await _switch_adapters(engine, version=version)
        state.openai_serving_models.lora_requests[ADAPTERS_MODEL] = make_request()
    else:
        await _switch_weights(engine, version=version)
    if body["keeps_old_kv"]:
        return JSONResponse({})
    if not await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise RuntimeError("the KV connector still holds keys and values of the previous version")
    return JSONResponse({})


async def _switch_weights(engine: Any, *, version: int) -> None:
    await engine.start_weight_update()
    await _pause(engine)
    await engine.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
    await engine.finish_weight_update(str(version))


async def _switch_adapters(engine: Any, *, version: int) -> None:
    await _pause(engine)
    await engine.collective_rpc("use_adapters", args=(version,))
    await engine.update_weight_version(str(version))


async def _pause(engine: Any) -> None:
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)  # pause_generation adds a sleep
