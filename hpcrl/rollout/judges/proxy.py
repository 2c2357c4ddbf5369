"""The proxy to the judges: an address on this machine that stays the same, whichever engines of a judge are up.

    JudgeProxy          serves it in a thread, and sets the variables that user code reads
    open_judge_proxy    the proxy of a worker, if its recipe has judges
    CALL_HOLD_TIMEOUT_S, PROBE_INTERVAL_S, PROBE_TIMEOUT_S, MAX_CALL_ATTEMPTS   limits

A request goes to the engine of its judge with the fewest requests of this proxy. If that is gone, another engine gets
it; if all are, it waits. What the judge responds is passed on as it is: a 4xx is the matter of the function that sent
the request. A failure of the judge itself is marked for the worker (`hpcrl.rollout.judge_outages`).
"""

import asyncio
import contextlib
import os
import random
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import aiohttp
from aiohttp import web

from hpcrl.campaign_dir.endpoints import EndpointReader, EngineEndpoint
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import Recipe
from hpcrl.engines.http import make_client_session
from hpcrl.envs.judge_access import JudgeAccess, write_variables
from hpcrl.errors import EngineError
from hpcrl.rollout.http_server import start_server
from hpcrl.rollout.judge_outages import JudgeOutages
from hpcrl.rollout.judges.relay import STATUS_GONE, is_allowed, make_error, relay_request
from hpcrl.system.variables import JUDGE_OUTAGES_VARIABLE

CALL_HOLD_TIMEOUT_S = 300.0
"""The time that a request waits for an engine of its judge."""
PROBE_INTERVAL_S = 0.5
WAIT_INTERVAL_S = 0.05
PROBE_TIMEOUT_S = 10.0
MAX_CALL_ATTEMPTS = 3
"""The engines that may fail at one request."""


@dataclass(eq=False)
class _JudgeEngine:
    """An engine of a judge, in the view of this proxy."""

    endpoint: EngineEndpoint
    num_requests: int = 0
    is_up: bool = False


@dataclass(eq=False)
class _JudgeState:
    """A judge, in the view of this proxy."""

    name: str
    endpoints: EndpointReader
    engines: dict[str, _JudgeEngine] = field(default_factory=dict)
    """The engines by token, which is another one after each start."""

    def list_up(self) -> list[_JudgeEngine]:
        return [engine for engine in self.engines.values() if engine.is_up]


class JudgeProxy:
    """The proxy of one worker, used as `with JudgeProxy(...)`; it serves in its own thread."""

    def __init__(
        self,
        directories: Mapping[str, Path],
        *,
        job: int,
        report: Callable[[str], None] = lambda problem: None,
        certificate: Path | None = None,
    ) -> None:
        self.variables: dict[str, str] = {}
        """The variables of the processes that call judges; those of this process are set as well."""
        self._judges = {
            name: _JudgeState(name, EndpointReader(directory, job=job)) for name, directory in directories.items()
        }
        self._report, self._certificate = report, certificate
        self._tokens = {name: secrets.token_urlsafe(32) for name in directories}
        self._marks = Path()
        self._thread = threading.Thread(target=self._run, name="judge proxy", daemon=True)
        self._ready, self._stopped = threading.Event(), threading.Event()
        self._url = ""
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._marks = Path(tempfile.mkdtemp(prefix="hpcrl-judges-"))
        self._outages = JudgeOutages(self._marks)
        for name in self._judges:
            self._outages.mark_gone(name)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise EngineError(f"the proxy to the judges cannot be opened: {self._error!r}")
        accesses = {name: JudgeAccess(f"{self._url}/{name}/v1", key, name) for name, key in self._tokens.items()}
        self.variables = write_variables(accesses) | {JUDGE_OUTAGES_VARIABLE: str(self._marks)}
        os.environ.update(self.variables)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for name in self.variables:
            os.environ.pop(name, None)
        shutil.rmtree(self._marks, ignore_errors=True)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - the thread that opens the proxy raises it
            self._error = error
            self._report(f"the proxy to the judges has failed: {error!r}")
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        async with make_client_session(self._certificate) as self._session:
            self._url, runner = await start_server(self._handle, host="127.0.0.1")
            self._ready.set()
            try:
                while not self._stopped.is_set():
                    await asyncio.gather(*(self._watch(judge) for judge in self._judges.values()))
                    await asyncio.sleep(PROBE_INTERVAL_S)
            finally:
                await runner.cleanup()

    async def _watch(self, judge: _JudgeState) -> None:
        """Follow which engines are announced, and which of them respond."""
        found = await asyncio.to_thread(judge.endpoints.poll)
        announced = {endpoint.token: endpoint for endpoint in found}
        judge.engines = {
            token: judge.engines.get(token) or _JudgeEngine(endpoint) for token, endpoint in announced.items()
        }
        await asyncio.gather(*(self._probe(engine) for engine in judge.engines.values() if not engine.is_up))
        self._mark(judge)

    async def _probe(self, engine: _JudgeEngine) -> None:
        timeout, headers = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S), _authorize(engine)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.get(engine.endpoint.url + "/health", headers=headers, timeout=timeout) as answer:
                engine.is_up = answer.status == 200

    def _mark(self, judge: _JudgeState) -> None:
        if judge.list_up():
            self._outages.mark_back(judge.name)
        else:
            self._outages.mark_gone(judge.name)

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        name, _, path = http.path_qs.removeprefix("/").partition("/")
        own = self._tokens.get(name)
        if not any(is_allowed(http, token) for token in (self._tokens.values() if own is None else [own])):
            return make_error(401, f"use the key in HPCRL_JUDGE_{name.upper()}_API_KEY", code="invalid_api_key")
        judge = self._judges.get(name)
        if judge is None:
            known = ", ".join(self._judges)
            return make_error(404, f"unknown judge {name!r}: the recipe has {known}", code="judge_not_found")
        try:
            return await self._ask(judge, http, "/" + path)
        except EngineError as error:
            return make_error(503, str(error), code="judge_gone")
        except asyncio.CancelledError:
            self._outages.note_failure(name)  # a caller that left, or was ended while it waited
            raise

    async def _ask(self, judge: _JudgeState, http: web.BaseRequest, path: str) -> web.StreamResponse:
        """Send a request to an engine of the judge, and to another one if that is gone."""
        for attempt in range(MAX_CALL_ATTEMPTS):
            engine = await self._await_engine(judge)
            engine.num_requests += 1
            try:
                url = engine.endpoint.url + path
                response = await relay_request(http, self._session, url=url, headers=_authorize(engine))
                if response.status == STATUS_GONE:
                    raise EngineError(f"the engine {engine.endpoint.worker} is gone")
                if response.status >= 500:
                    self._outages.note_failure(judge.name)
                return response
            except EngineError as error:
                engine.is_up = False
                self._outages.note_failure(judge.name)
                self._mark(judge)
                self._report(f"judge {judge.name}: {error}")
                if attempt == MAX_CALL_ATTEMPTS - 1:
                    raise
            finally:
                engine.num_requests -= 1
        raise AssertionError("the last attempt returns or raises")

    async def _await_engine(self, judge: _JudgeState) -> _JudgeEngine:
        """Return the engine with the fewest requests of this proxy, once there is one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CALL_HOLD_TIMEOUT_S
        while not (engines := judge.list_up()):
            if loop.time() > deadline:
                raise EngineError(
                    f"no engine of judge {judge.name!r} was up for {CALL_HOLD_TIMEOUT_S:g} s: see its logs"
                )
            await asyncio.sleep(WAIT_INTERVAL_S)
        fewest = min(engine.num_requests for engine in engines)
        return random.choice([engine for engine in engines if engine.num_requests == fewest])


def open_judge_proxy(
    recipe: Recipe,
    campaign: CampaignDir,
    *,
    job: int,
    report: Callable[[str], None],
    certificate: Path | None = None,
) -> contextlib.AbstractContextManager[JudgeProxy | None]:
    """Return the proxy of a worker, to be entered; it is None if the recipe has no judges."""
    if not recipe.judge:
        return contextlib.nullcontext()
    directories = {name: campaign.judge(name).endpoints for name in recipe.judge}
    return JudgeProxy(directories, job=job, report=report, certificate=certificate)


def _authorize(engine: _JudgeEngine) -> dict[str, str]:
    return {"Authorization": f"Bearer {engine.endpoint.token}"}
