"""Serve the model to the agent programs of an env worker, on loopback and on a socket file, by the APIs that they use.

    WorkThread        the thread in which the work on large requests is done
    ModelProxy        POST /v1/chat/completions /v1/completions /v1/responses /v1/messages /v1/messages/count_tokens
                      /tokenize /detokenize /v1/hpcrl/reward, GET /v1/models
    ModelProxy.open   opens a session; its token is the program's API key, which identifies its calls
    RewardRequest     the body of a posted reward
    DEFAULT_MODEL     the name of the model
    ANY_MODEL         the alias that stands for every name

Each form is read into one internal call (requests.py), which is answered in one way (generation.py) and sent in the
form of the request: chat_form.py, text_form.py, responses_form.py, messages_form.py. All prompts and answers are
recorded in the program's session with their exact tokens (hpcrl.rollout.agents.recording). A client that disconnects
ends its request in the engine. Every error has the form of the API that was called.
"""

import asyncio
import contextlib
import hashlib
import itertools
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import msgspec
from aiohttp import web

from hpcrl.config.recipe import MAX_REWARD
from hpcrl.engines.base import OutputStructure
from hpcrl.engines.structure import check_structure, relax_structure
from hpcrl.envs.base import ModelAccess
from hpcrl.errors import ConfigError, EngineAnswerError, EngineError, EngineRequestError, TemplateLimitError
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.models.message_form import MessageForm
from hpcrl.rollout.agents import messages_form
from hpcrl.rollout.agents.answer_parser import AnswerParser, find_mark_texts
from hpcrl.rollout.agents.answers import AnswerForm, ModelAnswer, encode_event
from hpcrl.rollout.agents.chat_form import ChatForm
from hpcrl.rollout.agents.generation import CompletionCall, gather_or_cancel, merge_choices
from hpcrl.rollout.agents.messages_form import MessagesForm
from hpcrl.rollout.agents.recording import PromptLengthError, TurnPrompt
from hpcrl.rollout.agents.requests import ApiError, JsonObject, ModelCall, parse_body
from hpcrl.rollout.agents.responses_form import ResponsesForm
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.agents.shared_sequence import IdListCache
from hpcrl.rollout.agents.structures import make_structure
from hpcrl.rollout.agents.text_form import TextForm, check_count, detokenize, list_prompt_ids, tokenize
from hpcrl.rollout.http_server import start_server
from hpcrl.rollout.turn import StreamingGenerator

MAX_BODY_BYTES = 32 << 20
MAX_LOOP_BYTES = 256 << 10
"""The size of a body up to which it is read, and its prompt made, in the event loop; with a larger one, in a thread."""
MAX_REFUSAL_CHARS = 500
"""The length of a refusal's reason that is kept."""
MAX_LISTED_IDS = 2 << 20
"""The ids of prompts that are kept as lists, of 36 bytes each, for the prompts that extend them."""
DEFAULT_MODEL = "hpcrl"
"""The name of the model, unless a domain sets another."""
ANY_MODEL = "*"
"""The alias that stands for every name."""
MODELS_PATH = "/v1/models"
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
REWARD_PATH = "/v1/hpcrl/reward"
JSON_HEADERS = {"Content-Type": "application/json"}
RouteHandler = Callable[[web.BaseRequest, ProgramSession], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class RunWork(Protocol):
    """A protocol for what runs the work on a request, wherever."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


ReportNotice = Callable[[ProgramSession, str], None]
"""Report what a program sends and what becomes of it, a phrase; it may be called for each request."""
TOOLS_NOTICE = "tools, which the chat template leaves out: they are described in the system message"
CALLS_NOTICE = "tool calls or results, which the chat template leaves out: they are written as text"
NEIGHBOURS_NOTICE = "messages of one role in a row, which the chat template refuses: they are joined"
LAST_ANSWER_NOTICE = "the model's message as the last one: it is not continued, another follows it"
ONE_CALL_NOTICE = "parallel_tool_calls = false where no call is required: an answer may have several calls all the same"


class WorkThread:
    """A thread that does one work at a time, to its end: the turn of a client that leaves ends when its work does."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="proxy")
        self._turns = asyncio.Semaphore(1)
        """Works that wait for it are not in the thread's queue, which would keep those of clients that left."""

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def run(self, work: Callable[[], T]) -> T:
        """Return what the work returns; if the caller is cancelled, the work that has started continues."""
        return await asyncio.shield(await self._start(work))

    @contextlib.asynccontextmanager
    async def hold(self, lock: asyncio.Lock) -> AsyncIterator[RunWork]:
        """Yield what runs works while a lock is held, which is released when the last of them has ended."""
        await lock.acquire()
        started: list[asyncio.Future[Any]] = []

        async def run(work: Callable[[], T]) -> T:
            future = await self._start(work)
            started.append(future)
            return await asyncio.shield(future)

        try:
            yield run
        finally:
            if started and not started[-1].done():
                started[-1].add_done_callback(lambda _: lock.release())
            else:
                lock.release()

    async def _start(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        await self._turns.acquire()
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        future.add_done_callback(lambda _: self._turns.release())
        return future


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/hpcrl/reward."""

    reward: float


class ModelProxy:
    """The server, used as `async with ModelProxy(...) as proxy`; `open` admits a program and `close` ends that."""

    def __init__(
        self,
        policy: StreamingGenerator,
        *,
        template: ChatTemplate,
        parser: AnswerParser | None = None,
        model: str = DEFAULT_MODEL,
        aliases: Collection[str] = (),
        report: ReportNotice = lambda session, notice: None,
    ) -> None:
        self.url = ""
        self.socket_path = Path()
        """The same API on a socket file, for sandboxes without network."""
        self._policy = policy
        self.template = template
        self._parser = parser or AnswerParser()
        self._mark_texts = find_mark_texts(template, self._parser.marks)
        self._model, self._aliases = model, tuple(aliases)
        self._report = report
        self._longest_token = max(map(len, template.tokenizer.get_vocab()))
        self.max_token_chars = 2 * self._longest_token
        """The most characters that a token of a rendered prompt stands for, those that guard marks included."""
        self._id_lists = IdListCache(max_ids=MAX_LISTED_IDS)
        self._sessions: dict[bytes, ProgramSession] = {}
        self._rewarded_sessions: dict[bytes, ProgramSession] = {}
        """The sessions by the keys that post rewards, which reach no model; those of the model post no reward."""
        self._routes: dict[tuple[str, str], RouteHandler] = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._text,
            ("POST", RESPONSES_PATH): self._responses,
            ("POST", MESSAGES_PATH): self._messages,
            ("POST", f"{MESSAGES_PATH}/count_tokens"): self._count_tokens,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/v1/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/v1/detokenize"): self._detokenize,
            ("GET", MODELS_PATH): self._models,
            ("POST", REWARD_PATH): self._reward,
        }
        self._large_works, self._structure_works = WorkThread(), WorkThread()
        self._runner: web.ServerRunner | None = None

    async def __aenter__(self) -> Self:
        # A handful of fixed routes does not need an Application, whose routing and middleware cost time on every call.
        url, self._runner = await start_server(self._handle, host="127.0.0.1", max_body_bytes=MAX_BODY_BYTES)
        self.url = f"{url}/v1"
        self.socket_path = (
            Path(tempfile.mkdtemp(prefix="hpcrl-")) / "openai.sock"
        )  # 0700, and short enough for a socket
        await web.UnixSite(self._runner, str(self.socket_path)).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        self._large_works.close()
        self._structure_works.close()
        shutil.rmtree(self.socket_path.parent, ignore_errors=True)

    def open(self, session: ProgramSession) -> str:
        """Admit a session's program; return its API key."""
        token = secrets.token_urlsafe(32)
        session.id_lists = self._id_lists
        self._sessions[_hash_token(token)] = session
        self._rewarded_sessions[_hash_token(session.reward_key)] = session
        return token

    def model_access(self, token: str) -> ModelAccess:
        """Return how a program with this token reaches the model."""
        return ModelAccess(url=self.url, socket=str(self.socket_path), api_key=token, model=self._model)

    async def close(self, token: str) -> None:
        """Close the session with this token, and end its running calls."""
        session = self._sessions.pop(_hash_token(token), None)
        if session is not None:
            del self._rewarded_sessions[_hash_token(session.reward_key)]
            await session.close()

    # ---- routes

    async def _chat(self, http: web.BaseRequest, session: ProgramSession) -> web.StreamResponse:
        return await self._answer(http, session, partial(ChatForm, template=self.template, memory=session.memory))

    async def _text(self, http: web.BaseRequest, session: ProgramSession) -> web.StreamResponse:
        return await self._answer(http, session, partial(TextForm, template=self.template))

    async def _responses(self, http: web.BaseRequest, session: ProgramSession) -> web.StreamResponse:
        make_form = partial(ResponsesForm, template=self.template, memory=session.responses)
        return await self._answer(http, session, make_form)

    async def _messages(self, http: web.BaseRequest, session: ProgramSession) -> web.StreamResponse:
        return await self._answer(http, session, partial(MessagesForm, memory=session.memory))

    async def _count_tokens(self, http: web.BaseRequest, session: ProgramSession) -> web.Response:
        def count(body: bytes) -> JsonObject:
            call = MessagesForm(body, memory=session.memory).call
            return {"input_tokens": len(self._list_prompt_ids(session, call))}

        return _json_response(await self._read(http, session, count))

    async def _tokenize(self, http: web.BaseRequest, session: ProgramSession) -> web.Response:
        read = partial(
            tokenize,
            template=self.template,
            list_ids=partial(self._list_prompt_ids, session),
            context_length=session.limits.context_length,
        )
        return _json_response(await self._read(http, session, read))

    def _list_prompt_ids(self, session: ProgramSession, call: ModelCall) -> list[int]:
        """Return the ids of a prompt that is only counted, unless it surely has more than the context."""
        check = partial(check_count, call=call, context_length=session.limits.context_length)
        check(self._count_tokens_at_least(call))
        return list_prompt_ids(
            call, self.template, check_chars=lambda num_chars: check(num_chars // self.max_token_chars + 1)
        )

    async def _detokenize(self, http: web.BaseRequest, session: ProgramSession) -> web.Response:
        return _json_response(await self._read(http, session, partial(detokenize, template=self.template)))

    async def _models(self, _: web.BaseRequest, __: ProgramSession) -> web.Response:
        names = [self._model, *(alias for alias in self._aliases if alias != ANY_MODEL)]
        cards = [_make_card(name) for name in names]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return _json_response({"object": "list", "data": cards, **pages})

    async def _one_model(self, http: web.BaseRequest, _: ProgramSession) -> web.Response:
        name = http.path.removeprefix(MODELS_PATH + "/")
        self._check_model(name)
        return _json_response(_make_card(name))

    async def _reward(self, http: web.BaseRequest, session: ProgramSession) -> web.Response:
        reward = (await self._read(http, session, partial(parse_body, kind=RewardRequest)))[0].reward
        if not abs(reward) <= MAX_REWARD:  # nor is NaN
            problem = f"reward is {reward}: it must be a finite number, {MAX_REWARD:g} at most in size"
            raise ApiError(400, problem, param="reward")
        session.reward = reward
        return _json_response({"reward": reward})

    def _check_model(self, model: str) -> None:
        if model != self._model and model not in self._aliases and ANY_MODEL not in self._aliases:
            names = " or ".join(repr(name) for name in (self._model, *self._aliases))
            why = f"the model {model!r} does not exist: use {names}, or add it to rollout.model_aliases in the recipe"
            raise ApiError(404, why, code="model_not_found", param="model")

    # ---- answers

    async def _answer(
        self, http: web.BaseRequest, session: ProgramSession, make_form: Callable[[bytes], AnswerForm]
    ) -> web.StreamResponse:
        async with self._take_turn(http, session) as run:
            body = await http.read()
            session.check_admission()
            form = await run(partial(make_form, body))
            self._check_model(form.call.model)
            for name in session.note_ignored_fields(form.call.ignored_fields):
                self._report(session, f"{name!r}, which is not known here: it is ignored")
            for notice in _list_notices(form.call, self.template.choose_form(form.call.tools)):
                self._report(session, notice)
            session.check_length(self._count_tokens_at_least(form.call), param=form.call.prompt_field)
            try:
                prompt = await run(partial(_make_prompt, session, form.call))
            except PromptLengthError as error:
                session.check_length(error.num_chars // self.max_token_chars + 1, param=form.call.prompt_field)
                raise
        call = CompletionCall(
            session=session,
            call=form.call,
            prompt=prompt,
            structure=await self._make_structure(session, form.call, prompt),
            policy=self._policy,
            template=self.template,
            parser=self._parser,
            mark_texts=self._mark_texts,
        )
        try:
            if form.call.stream:
                return await self._stream_call(http, form, call)
            answers = await gather_or_cancel([call.complete(index) for index in range(call.num_choices)])
        except EngineError:
            if not call.usage.num_generated:
                session.num_calls -= 1
            raise
        session.check_staleness()
        return _json_response(form.make_response(answers, call.usage))

    def _count_tokens_at_least(self, call: ModelCall) -> int:
        return call.count_tokens_at_least(longest_token=self._longest_token)

    async def _make_structure(
        self, session: ProgramSession, call: ModelCall, prompt: TurnPrompt
    ) -> OutputStructure | None:
        """Return what the answer must be, as far as engines can hold it to that; large schemas take a while."""
        asked = make_structure(call, prompt, self._parser)
        if asked is None:
            return None
        try:
            async with self._structure_works.hold(session.structure_turn) as run:
                structure, dropped = await run(partial(relax_structure, asked))
                await run(partial(check_structure, structure))
        except EngineError as error:
            param = "tools" if call.output_schema is None else "response_format"
            raise ApiError(400, str(error), param=param, code="invalid_value") from None
        for keyword in dropped:
            self._report(session, f"{keyword} in a JSON schema, to which no answer can be held: it is ignored")
        return structure

    async def _read(self, http: web.BaseRequest, session: ProgramSession, read: Callable[[bytes], T]) -> T:
        """Read a request that no engine answers."""
        async with self._take_turn(http, session) as run:
            return await run(partial(read, await http.read()))

    @contextlib.asynccontextmanager
    async def _take_turn(self, http: web.BaseRequest, session: ProgramSession) -> AsyncIterator[RunWork]:
        """Yield what runs the work on a request: here, or in a thread if it is so large that others would wait for it.

        A program has one large request in work and no body of another in memory, and one thread serves all programs,
        each in its turn: so none of them stops the rest, whatever it sends, and however early it leaves. The size of a
        compressed body is not known.
        """
        is_compressed = "Content-Encoding" in http.headers
        if http.content_length is not None and http.content_length <= MAX_LOOP_BYTES and not is_compressed:
            yield _run_here
        else:
            async with self._large_works.hold(session.large_body) as run:
                yield run

    async def _stream_call(self, http: web.BaseRequest, form: AnswerForm, call: CompletionCall) -> web.StreamResponse:
        """Send server-sent events; the status is sent with the first, so that a failure before it has its own."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        answers: list[ModelAnswer] = []
        try:
            async with contextlib.aclosing(merge_choices(call)) as items:
                async for item in items:
                    if not response.prepared:
                        await response.prepare(http)
                        await _send_events(response, form.open_events(call.usage))
                    if isinstance(item, ModelAnswer):
                        answers.append(item)
                        await _send_events(response, form.end_events(item))
                    else:
                        await _send_events(response, form.delta_events(item))
        except EngineError as error:
            if not response.prepared:
                raise
            await _send_events(response, [form.error_event(_read_engine_error(call.session, error))])
        else:
            call.session.check_staleness()
            await _send_events(response, form.close_events(answers, call.usage))
            await response.write(form.stream_end)
        return response

    # ---- dispatch

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Dispatch a request with a valid token; every response, errors included, has the form of its API."""
        try:
            session = self._find_session(http)
        except ApiError as wrong_key:
            return _error_response(http, wrong_key)
        try:
            with session.note_call():
                await _request_body(http)
                return await self._find_route(http)(http, session)
        except EngineError as engine_error:
            error = _read_engine_error(session, engine_error)
        except ApiError as api_error:
            error = api_error
        except TemplateLimitError as limit_error:
            session.end_for_template(str(limit_error))
            error = ApiError(400, str(limit_error), code="chat_template")
        except web.RequestPayloadError:
            error = ApiError(400, "the request body cannot be decompressed", code="invalid_value")
        except RecursionError:
            error = ApiError(400, "the request body is nested too deeply", code="invalid_value")
        except web.HTTPRequestEntityTooLarge:
            notice = f"a body of more than {MAX_BODY_BYTES} bytes: it is refused"
            self._report(session, notice)
            error = ApiError(413, f"the request has {notice}: send less", code="invalid_value")
        except web.HTTPException as http_error:
            error = ApiError(http_error.status, http_error.text or http_error.reason)
        session.refusal = f"{http.method} {http.path}: {error}"[:MAX_REFUSAL_CHARS]
        return _error_response(http, error)

    def _find_route(self, http: web.BaseRequest) -> RouteHandler:
        path = http.path
        if (route := self._routes.get((http.method, path))) is not None:
            return route
        if http.method == "GET" and path.startswith(MODELS_PATH + "/"):
            return self._one_model
        status = 405 if any(path == known for _, known in self._routes) else 404
        if path.startswith(f"{RESPONSES_PATH}/"):
            why = f"POST {RESPONSES_PATH}, whose responses cannot be read, cancelled or deleted later, is"
            raise ApiError(404, f"{http.method} {path} is not supported: {why}")
        known_paths = ", ".join(dict.fromkeys(known for _, known in self._routes))
        raise ApiError(status, f"{http.method} {path} is not supported: the paths are {known_paths}")

    def _find_session(self, http: web.BaseRequest) -> ProgramSession:
        """Return the session that the request's API key belongs to."""
        scheme, _, token = http.headers.get("Authorization", "").partition(" ")
        posts_reward = http.path == REWARD_PATH
        sessions = self._rewarded_sessions if posts_reward else self._sessions
        session = None
        for key in (token if scheme.lower() == "bearer" else "", http.headers.get("x-api-key", "")):
            session = session or sessions.get(_hash_token(key))
        if session is None and posts_reward:
            why = "this key cannot post a reward: only the one that a program with posts_reward = true reads can"
            raise ApiError(403, why, code="not_a_reward_key")
        if session is None:
            why = "no running program has this API key: use the one that it receives as OPENAI_API_KEY"
            raise ApiError(401, why, code="invalid_api_key")
        return session


async def _run_here(work: Callable[[], T]) -> T:
    return work()


def _list_notices(call: ModelCall, form: MessageForm) -> Iterator[str]:
    """Yield what is not done as the request asks."""
    if call.tools and not form.has_tools:
        yield TOOLS_NOTICE
    if not (form.has_calls and form.has_results) and any(message["role"] == "tool" for message in call.messages):
        yield CALLS_NOTICE
    if form.alternates:
        pairs = itertools.pairwise(message["role"] for message in call.messages)
        if any(one == other != "tool" for one, other in pairs):
            yield NEIGHBOURS_NOTICE
    if call.messages and call.messages[-1]["role"] == "assistant":
        yield LAST_ANSWER_NOTICE
    if call.is_unheld_to_one:
        yield ONE_CALL_NOTICE


def _make_prompt(session: ProgramSession, call: ModelCall) -> TurnPrompt:
    if call.text is not None:
        return session.recording.text_prompt(call.text)
    try:
        return session.recording.chat_prompt(call.messages, tools=call.tools, template_kwargs=call.template_kwargs)
    except ConfigError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from None


def _make_card(name: str) -> JsonObject:
    """Return the description of the model under a name, as both OpenAI's and Anthropic's clients read it."""
    made = {"created": int(time.time()), "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    return {"id": name, "object": "model", "type": "model", "display_name": name, "owned_by": "hpcrl", **made}


def _read_engine_error(session: ProgramSession, error: EngineError) -> ApiError:
    """Return the error response; it is remembered if engines failed, not if the request is one that none can serve."""
    if isinstance(error, EngineRequestError):
        return ApiError(400, str(error), code="invalid_value")
    session.fault = str(error)
    if isinstance(error, EngineAnswerError):
        return ApiError(502, str(error), code="engine_answer", kind="server_error")
    return ApiError(503, str(error), code="engine_unavailable", kind="server_error")


async def _send_events(response: web.StreamResponse, events: Iterable[JsonObject]) -> None:
    if encoded := b"".join(encode_event(event) for event in events):
        await response.write(encoded)


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


_RESPONSES_PARAMS = {"messages": "input", "response_format": "text.format"}


def _name_param(path: str, param: str | None) -> str | None:
    """Return the name that a form of API has for a field, which is that of the chat API elsewhere."""
    return _RESPONSES_PARAMS.get(param or "", param) if path == RESPONSES_PATH else param


def _error_response(http: web.BaseRequest, error: ApiError) -> web.Response:
    body: JsonObject = {"error": {**error.error, "param": _name_param(http.path, error.error["param"])}}
    if http.path.startswith(MESSAGES_PATH):
        body = messages_form.encode_error(error)
    return web.Response(status=error.status, body=msgspec.json.encode(body), headers=JSON_HEADERS)
