"""Serve the model under OpenAI's API to the agent programs of an env worker, on loopback and on a socket file.

    ModelProxy        POST /v1/chat/completions /v1/completions, GET /v1/models, POST /v1/hpcrl/reward
    ModelProxy.open   opens a session; its token is the program's API key, which identifies its calls
    DEFAULT_MODEL     the name of the model

All prompts and answers are recorded in the program's session with their exact tokens (hpcrl.rollout.agents.recording).
A client that disconnects ends its request in the engine. Every error is reported in OpenAI's form.
"""

import asyncio
import contextlib
import hashlib
import math
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
from aiohttp import web

from hpcrl.envs.base import ModelAccess
from hpcrl.errors import ConfigError, EngineAnswerError, EngineError
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.generation import CompletionCall, gather_or_cancel, merge_choices
from hpcrl.rollout.agents.recording import TurnPrompt
from hpcrl.rollout.agents.requests import (
    ApiError,
    ChatRequest,
    RewardRequest,
    TextRequest,
    normalise_messages,
    parse_body,
)
from hpcrl.rollout.agents.responses import AnswerForm, ChatForm, TextForm
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.agents.tool_parsers import HERMES, ToolParser
from hpcrl.rollout.turn import StreamingGenerator

MAX_BODY_BYTES = 64 << 20
DEFAULT_MODEL = "hpcrl"
"""The name of the model, unless a domain sets another."""
MODELS_PATH = "/v1/models"
JSON_HEADERS = {"Content-Type": "application/json"}
RouteHandler = Callable[[web.BaseRequest, ProgramSession], Awaitable[web.StreamResponse]]


class ModelProxy:
    """The server, used as `async with ModelProxy(...) as proxy`; `open` admits a program and `close` ends that."""

    def __init__(
        self,
        policy: StreamingGenerator,
        *,
        template: ChatTemplate,
        tools: ToolParser = HERMES,
        model: str = DEFAULT_MODEL,
    ) -> None:
        self.url = ""
        self.socket_path = Path()
        """The same API on a socket file, for sandboxes without network."""
        self._policy = policy
        self.template = template
        self._tools = tools
        self._model = model
        self._sessions: dict[bytes, ProgramSession] = {}
        self._routes: dict[tuple[str, str], RouteHandler] = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._text,
            ("GET", MODELS_PATH): self._models,
            ("POST", "/v1/hpcrl/reward"): self._reward,
        }
        self._runner: web.ServerRunner | None = None

    async def __aenter__(self) -> Self:
        # A handful of fixed routes does not need an Application, whose routing and middleware cost time on every call.
        make_request = partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=MAX_BODY_BYTES)
        server = web.Server(self._handle, request_factory=make_request, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        self.socket_path = (
            Path(tempfile.mkdtemp(prefix="hpcrl-")) / "openai.sock"
        )  # 0700, and short enough for a socket
        await web.UnixSite(self._runner, str(self.socket_path)).start()
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        await web.SockSite(self._runner, listening).start()
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        shutil.rmtree(self.socket_path.parent, ignore_errors=True)

    def open(self, session: ProgramSession) -> str:
        """Admit a session's program; return its API key."""
        token = secrets.token_urlsafe(32)
        self._sessions[_hash_token(token)] = session
        return token

    def model_access(self, token: str) -> ModelAccess:
        """Return how a program with this token reaches the model."""
        return ModelAccess(url=self.url, socket=str(self.socket_path), api_key=token, model=self._model)

    def close(self, token: str) -> None:
        """Close the session with this token, and cancel its running calls."""
        session = self._sessions.pop(_hash_token(token), None)
        if session is not None:
            session.close()

    # ---- routes

    async def _chat(self, http: web.BaseRequest, session: ProgramSession) -> web.StreamResponse:
        api_request = parse_body(await http.read(), ChatRequest)
        self._admit(session, api_request.model)
        tools = api_request.tools if api_request.tool_choice != "none" else None
        try:
            prompt = session.recording.chat_prompt(normalise_messages(api_request.messages), tools=tools)
        except ConfigError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from None
        form = ChatForm(api_request, template=self.template, tools=self._tools)
        return await self._answer_call(http, session, api_request, prompt, form)

    async def _text(self, http: web.BaseRequest, session: ProgramSession) -> web.StreamResponse:
        api_request = parse_body(await http.read(), TextRequest)
        self._admit(session, api_request.model)
        prompt = session.recording.text_prompt(api_request.prompt)
        ids = prompt.token_ids()
        if not ids or not 0 <= min(ids) <= max(ids) < self.template.vocabulary_size:
            known = self.template.vocabulary_size - 1
            raise ApiError(400, f"the prompt needs tokens, all in 0..{known}", param="prompt", code="invalid_value")
        return await self._answer_call(
            http, session, api_request, prompt, TextForm(api_request, template=self.template)
        )

    async def _models(self, _: web.BaseRequest, __: ProgramSession) -> web.Response:
        return _json_response({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, http: web.BaseRequest, _: ProgramSession) -> web.Response:
        self._check_model(http.path.removeprefix(MODELS_PATH + "/"))
        return _json_response(self._model_card())

    async def _reward(self, http: web.BaseRequest, session: ProgramSession) -> web.Response:
        reward = parse_body(await http.read(), RewardRequest).reward
        if not math.isfinite(reward):
            raise ApiError(400, f"reward is {reward}: it must be a finite number", param="reward")
        session.reward = reward
        return _json_response({"reward": reward})

    def _admit(self, session: ProgramSession, model: str) -> None:
        self._check_model(model)
        session.admit()

    def _check_model(self, model: str) -> None:
        if model != self._model:
            why = f"the model {model!r} does not exist: use {self._model!r}"
            raise ApiError(404, why, code="model_not_found", param="model")

    def _model_card(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": int(time.time()), "owned_by": "hpcrl"}

    # ---- answers

    async def _answer_call(
        self,
        http: web.BaseRequest,
        session: ProgramSession,
        api_request: ChatRequest | TextRequest,
        prompt: TurnPrompt,
        form: AnswerForm,
    ) -> web.StreamResponse:
        call = CompletionCall(
            session=session,
            api_request=api_request,
            prompt=prompt,
            form=form,
            policy=self._policy,
            template=self.template,
        )
        task = asyncio.current_task()
        assert task is not None
        session.calls.add(task)  # so that closing the session ends it
        try:
            if api_request.stream:
                return await self._stream_call(http, call)
            choices = await gather_or_cancel([call.complete(index) for index in range(call.num_choices)])
        finally:
            session.calls.discard(task)
        session.check_staleness()
        return _json_response({**call.header, "choices": choices, "usage": call.usage()})

    async def _stream_call(self, http: web.BaseRequest, call: CompletionCall) -> web.StreamResponse:
        """Send server-sent events; the status is sent with the first chunk, so that a failure before it has its own."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            async with contextlib.aclosing(merge_choices(call)) as chunks:
                async for chunk in chunks:
                    if not response.prepared:
                        await response.prepare(http)
                    await response.write(_encode_event({**call.header, "object": call.chunk_kind, "choices": [chunk]}))
        except EngineError as error:
            if not response.prepared:
                raise
            await response.write(_encode_event({"error": self._record_engine_failure(call.session, error).error}))
        else:
            call.session.check_staleness()
            if call.api_request.stream_options is not None and call.api_request.stream_options.include_usage:
                last = {**call.header, "object": call.chunk_kind, "choices": [], "usage": call.usage()}
                await response.write(_encode_event(last))
            await response.write(b"data: [DONE]\n\n")
        return response

    # ---- dispatch

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Dispatch a request with a valid token; every response, errors included, has OpenAI's form."""
        try:
            session = self._find_session(http)
            await _request_body(http)
            try:
                return await self._find_route(http)(http, session)
            except EngineError as error:
                return _error_response(self._record_engine_failure(session, error))
        except ApiError as error:
            return _error_response(error)
        except web.HTTPException as error:
            return _error_response(ApiError(error.status, error.text or error.reason))

    def _find_route(self, http: web.BaseRequest) -> RouteHandler:
        path = http.path
        if (route := self._routes.get((http.method, path))) is not None:
            return route
        if http.method == "GET" and path.startswith(MODELS_PATH + "/"):
            return self._one_model
        status = 405 if any(path == known for _, known in self._routes) else 404
        raise ApiError(status, f"{http.method} {path} is not supported: see OpenAI's API, under /v1")

    def _find_session(self, http: web.BaseRequest) -> ProgramSession:
        """Return the session that the request's API key belongs to."""
        scheme, _, token = http.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(_hash_token(token)) if scheme == "Bearer" else None
        if session is None:
            why = "no running program has this API key: use the one that it receives as OPENAI_API_KEY"
            raise ApiError(401, why, code="invalid_api_key")
        return session

    def _record_engine_failure(self, session: ProgramSession, error: EngineError) -> ApiError:
        session.fault = str(error)
        if isinstance(error, EngineAnswerError):
            return ApiError(502, str(error), code="engine_answer", kind="server_error")
        return ApiError(503, str(error), code="engine_unavailable", kind="server_error")


async def _request_body(http: web.BaseRequest) -> None:
    """Send 100 Continue to a client that waits for it, as curl does before a long body."""
    if http.headers.get("Expect", "").lower() == "100-continue":
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # the response has not started


def _hash_token(token: str) -> bytes:
    """Return the key under which a token is looked up: a hash, so that timing reveals nothing about the token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _json_response(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), headers=JSON_HEADERS)


def _error_response(error: ApiError) -> web.Response:
    return web.Response(status=error.status, body=error.body, headers=JSON_HEADERS)


def _encode_event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
