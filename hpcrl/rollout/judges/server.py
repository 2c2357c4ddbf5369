"""One engine of a judge behind a separate address, with OpenAI's API: vLLM's server, or an engine of ours.

    serve_judge         serves a judge's engine until the block ends
    ModelApi            what answers the requests, on a socket file
    EngineApi           an engine of ours, behind the API of agent programs
    VllmApi             vLLM's own server
    PUBLIC_PATHS        what can be reached
    ScoreRequest, ScoreAnswer   its bodies

Nothing of a judge's requests is recorded or kept: each has a separate session.
"""

import contextlib
import itertools
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec
from aiohttp import web

from hpcrl.campaign_dir.endpoints import HELLO_PATH, NONCE_HEADER, PROOF_HEADER, make_proof
from hpcrl.config.recipe import JudgeConfig
from hpcrl.engines.base import TokenScorer
from hpcrl.engines.vllm.server import VllmServer
from hpcrl.envs.judge_access import LOGPROBS_PATH
from hpcrl.errors import EngineError
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.models.model_config import read_context_length
from hpcrl.rollout.agents.answer_parser import AnswerParser, choose_parsers
from hpcrl.rollout.agents.recording import ConversationRecording
from hpcrl.rollout.agents.server import ANY_MODEL, ModelProxy
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.episode import EpisodeLimits
from hpcrl.rollout.http_server import start_server
from hpcrl.rollout.judges.relay import STATUS_GONE, is_allowed, make_error, relay_request
from hpcrl.rollout.turn import StreamingGenerator

PUBLIC_PATHS = ("/v1/", "/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank")
"""The starts of the paths that can be reached; reward models answer at /pooling, /classify and /score of vLLM."""
HEALTH_PATH = "/health"


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one conversation."""

    token_ids: list[int]


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The log-prob of each token after the first, at temperature 1."""

    logprobs: list[float]


class ModelApi(Protocol):
    """The server that answers the requests to a judge, on a socket file."""

    @property
    def socket_path(self) -> Path: ...

    def open_key(self) -> contextlib.AbstractAsyncContextManager[str]:
        """Yield the key for one request."""

    async def is_well(self) -> bool:
        """Return whether it can answer."""

    async def compute_logprobs(self, token_ids: list[int]) -> list[float]:
        """Return the log-prob of each token after the first; raise EngineError if they cannot be computed."""


class EngineApi:
    """An engine of ours, behind the API of agent programs; `async with` starts and ends the API, not the engine."""

    def __init__(self, engine: StreamingGenerator, *, name: str, judge: JudgeConfig, model_dir: Path) -> None:
        self._name, self._engine = name, engine
        self._template = load_chat_template(model_dir, judge)
        parser = choose_parsers(self._template.text, judge.engine)
        self._proxy = ModelProxy(
            engine,
            template=self._template,
            parser=AnswerParser.from_choice(parser, self._template, model_dir),
            model=name,
            aliases=(ANY_MODEL,),
        )
        context_length = read_context_length(model_dir, max_model_len=judge.engine.max_model_len)
        self._limits = EpisodeLimits(
            max_turns=sys.maxsize, max_new_tokens=context_length, context_length=context_length, max_lag=sys.maxsize
        )
        self._numbers = itertools.count()

    async def __aenter__(self) -> "EngineApi":
        await self._proxy.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._proxy.__aexit__()

    @property
    def socket_path(self) -> Path:
        return self._proxy.socket_path

    @contextlib.asynccontextmanager
    async def open_key(self) -> AsyncIterator[str]:
        number = next(self._numbers)
        session = ProgramSession(
            name=f"judge/{self._name}/{number}",
            trajectory="",
            domain="",
            seed=number,
            limits=self._limits,
            recording=ConversationRecording(self._template),
            newest_version=lambda: 0,
            start_version=0,
            sampling="program",
        )
        key = self._proxy.open(session)
        try:
            yield key
        finally:
            await self._proxy.close(key)

    async def is_well(self) -> bool:
        return True  # an engine that fails ends its worker

    async def compute_logprobs(self, token_ids: list[int]) -> list[float]:
        if not isinstance(self._engine, TokenScorer):
            raise EngineError("a simulated engine has no probabilities")
        return await self._engine.compute_logprobs(token_ids)


class VllmApi:
    """vLLM's own server, with all of its routes that answer requests."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server

    @property
    def socket_path(self) -> Path:
        return self._server.socket_path

    @contextlib.asynccontextmanager
    async def open_key(self) -> AsyncIterator[str]:
        yield ""

    async def is_well(self) -> bool:
        return await self._server.is_well()

    async def compute_logprobs(self, token_ids: list[int]) -> list[float]:
        return await self._server.compute_logprobs(token_ids)


@contextlib.asynccontextmanager
async def serve_judge(api: ModelApi, *, host: str, token: str, certificate: Path | None = None) -> AsyncIterator[str]:
    """Serve the API at an address that other nodes reach, for requests with the token; yields the URL."""
    connector = aiohttp.UnixConnector(path=str(api.socket_path), limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def handle(http: web.BaseRequest) -> web.StreamResponse:
            if http.path == HELLO_PATH:
                return web.Response(headers={PROOF_HEADER: make_proof(token, http.headers.get(NONCE_HEADER, ""))})
            if not is_allowed(http, token):
                return make_error(401, "send the header `Authorization: Bearer` with the key", code="invalid_api_key")
            if http.path == HEALTH_PATH:
                return web.Response(status=200 if await api.is_well() else 503)
            if http.path == "/v1" + LOGPROBS_PATH:
                return await _answer_logprobs(http, api)
            if not http.path.startswith(PUBLIC_PATHS):
                return make_error(404, f"{http.method} {http.path} is not served: see OpenAI's API", code="not_found")
            async with api.open_key() as key:
                return await _relay_to_api(http, session, key=key)

        url, runner = await start_server(handle, host=host, certificate=certificate)
        try:
            yield url
        finally:
            await runner.cleanup()


async def _answer_logprobs(http: web.BaseRequest, api: ModelApi) -> web.StreamResponse:
    """Answer with the log-probs of the tokens; a refusal of the engine is not the status of an engine that is gone."""
    try:
        token_ids = msgspec.json.decode(await http.read(), type=ScoreRequest).token_ids
    except msgspec.MsgspecError as error:
        return make_error(400, f"the body is not {{token_ids: [...]}}: {error}", code="invalid_body")
    try:
        logprobs = await api.compute_logprobs(token_ids)
    except EngineError as error:
        if not await api.is_well():
            return make_error(STATUS_GONE, str(error), code="judge_gone")
        return make_error(400, str(error), code="not_scored")
    if not all(map(math.isfinite, logprobs)):
        return make_error(400, "a log-probability is not finite: the model is damaged", code="not_finite")
    body = msgspec.json.encode(ScoreAnswer(logprobs=logprobs))
    return web.Response(body=body, headers={"Content-Type": "application/json"})


async def _relay_to_api(http: web.BaseRequest, session: aiohttp.ClientSession, *, key: str) -> web.StreamResponse:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return await relay_request(http, session, url=f"http://judge{http.path_qs}", headers=headers)
    except EngineError as error:
        return make_error(STATUS_GONE, str(error), code="judge_gone")
