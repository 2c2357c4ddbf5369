"""Poses as a vLLM server: listens at the given address, and behaves as FAKE_VLLM demands."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from aiohttp import web

BEHAVIOUR = os.environ.get("FAKE_VLLM", "well")
UPDATE = ("/hpcrl/switch", "/resume")
"""What is asked in an update once it is made ready, in this order."""
TOKEN = {"token_id": 1, "logprob": -0.5, "top_logprobs": []}
CHOICE = {
    "token_ids": [1],
    "logprobs": {"content": [TOKEN]},
    "finish_reason": "length",
    "weight_versions": [{"version": "0", "start": 0, "end": 1}],
}


async def generate(request: web.Request) -> web.Response:
    body = await request.json()
    if "request_id" not in body:  # the first token, which shows that it is up
        return web.json_response({"choices": [{"token_ids": []} if BEHAVIOUR == "empty" else CHOICE]})
    match BEHAVIOUR:
        case "breaks":
            return web.json_response({"error": {"message": "EngineCore has died"}}, status=500)
        case "nonsense":
            return web.json_response({"choices": []})
        case "nan":
            odd = CHOICE | {"logprobs": {"content": [TOKEN | {"logprob": -9999.0}]}}
            return web.json_response({"choices": [odd]})
        case "hangs":
            await asyncio.Event().wait()
    return web.json_response({"choices": [CHOICE]})


async def well(_: web.Request) -> web.Response:
    if BEHAVIOUR == "unwell":
        raise web.HTTPServiceUnavailable
    return web.Response()


async def make_ready(request: web.Request) -> web.Response:
    """The answer comes in files, one of each rank; rank 1 is the one that finds something."""
    info = (await request.json())["init_info"]
    for rank, finding in enumerate(("", os.environ.get("FAKE_VLLM_FINDING", ""))):
        Path(f"{info['answer']}.{rank}").write_text(finding)
    return await accept(request)


async def accept(request: web.Request) -> web.Response:
    with Path(os.environ["FAKE_VLLM_LOG"]).open("a") as log:
        log.write(request.path + "\n")
    return web.json_response({})


def main() -> None:
    if BEHAVIOUR == "dies":
        sys.exit("no such GPU")
    if BEHAVIOUR == "leaves":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    app = web.Application()
    app.router.add_get("/health", well)
    app.router.add_get("/metrics", lambda _: web.Response(text=METRICS))
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/init_weight_transfer_engine", make_ready)
    for path in ("/update_weight_version", "/abort_requests", "/pause", *UPDATE):
        app.router.add_post(path, accept)
    arguments = sys.argv[1:]
    Path(os.environ["FAKE_VLLM_LOG"]).write_text(json.dumps(arguments) + "\n")
    web.run_app(app, path=arguments[arguments.index("--uds") + 1], print=lambda _: None)


METRICS = """# HELP vllm:num_requests_waiting of no use here
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 3.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:generation_tokens_total{engine="0"} 1e+02
vllm:prefix_cache_queries_total{engine="0"} 400.0
vllm:prefix_cache_hits_total{engine="0"} 300.0
vllm:external_prefix_cache_hits_total{engine="0"} 7.0
vllm:num_preemptions_total{engine="0"} 2.0
vllm:cache_config_info{block_size="32",kv_cache_size_tokens="2000",num_gpu_blocks="9"} 1.0
"""

if __name__ == "__main__":
    main()
