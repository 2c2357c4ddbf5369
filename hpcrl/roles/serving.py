"""What prefill and decode share: an engine behind an HTTP door, kept at the newest version of the weights."""

import asyncio
import time

from hpcrl import endpoints
from hpcrl.endpoints import Endpoint, this_node
from hpcrl.engines.base import Updatable
from hpcrl.engines.embedded import EmbeddedEngine, load_model
from hpcrl.engines.http import client_session, kv_fetcher, serve
from hpcrl.errors import WeightsError
from hpcrl.roles.context import Context
from hpcrl.weights.store import FileStore, Newest, WeightSource, WindowStore
from hpcrl.weights.versions import Manifest, Rung, newest_version, read_rung, set_rung
from hpcrl.weights.window import window_key

POLL_S = 0.1
FAULT_PAUSE_S = 1.0
BEHIND_S = 30.0
"""How long an engine may lag behind a version that exists before it asks for files."""


async def serve_engine(context: Context) -> None:
    """Wait for the first version, serve until the job ends."""
    weights = context.run.weights
    window = WindowStore(window_key(context.run, node=this_node()), job=context.job)
    source = Newest(window, FileStore(weights))
    first = await _first_version(context, source)
    if first is None:
        return
    model = load_model(context.run.model)
    async with (
        client_session() as session,
        EmbeddedEngine(
            model, store=source, max_batch=context.recipe.engine.max_batch, fetch_kv=kv_fetcher(session)
        ) as engine,
    ):
        follower = Follower(engine, source, context)
        await follower.take(first)
        await _announced(engine, follower, context)


async def _announced(engine: EmbeddedEngine, follower: "Follower", context: Context) -> None:
    """Open the door, say where it is, keep up with the versions, close it."""
    token = endpoints.new_token()
    url, runner = await serve(engine, host=endpoints.address_of(context.site.network.interface), token=token)
    endpoint = Endpoint(
        role=context.role, worker=context.name, node=this_node(), url=url, token=token, job=context.job.number
    )
    endpoints.announce(context.run.endpoints, endpoint)
    try:
        await follower.follow(until_failed=engine)
    finally:
        endpoints.withdraw(context.run.endpoints, context.name)
        await runner.cleanup()


async def _first_version(context: Context, source: WeightSource) -> Manifest | None:
    """The trainer publishes the initial weights; None if the job ends before."""
    while not context.draining:
        if (newest := await asyncio.to_thread(source.newest)) is not None:
            return newest
        await asyncio.sleep(POLL_S)
    return None


class Follower:
    """Keeps an engine at the newest version."""

    def __init__(self, engine: Updatable, source: WeightSource, context: Context) -> None:
        self._engine = engine
        self._source = source
        self._context = context
        self._loaded = -1
        self._behind_since: float | None = None

    async def follow(self, *, until_failed: EmbeddedEngine) -> None:
        """Until the job ends, or the engine does: then this worker ends with its reason, and is begun anew."""
        failed = asyncio.create_task(until_failed.failed(), name="engine failed")
        while not self._context.draining:
            if failed.done():
                failed.result()
            newest = await asyncio.to_thread(self._source.newest)
            if newest is not None and newest.version > self._loaded:
                await self.take(newest)
            await asyncio.to_thread(self._heed_lag)
            await asyncio.sleep(POLL_S)
        failed.cancel()

    async def take(self, manifest: Manifest) -> None:
        """Take a version over; if it cannot be had, the one in use stays, and the newest is tried next."""
        began = time.monotonic()
        try:
            stall_s = await self._engine.load_version(manifest.version)
        except WeightsError as error:
            newest = await asyncio.to_thread(self._source.newest)
            if newest is None or newest.version <= manifest.version:  # else it was only overtaken
                self._context.events.emit("fault", what="weights", detail=str(error))
                await asyncio.sleep(FAULT_PAUSE_S)
            return
        self._loaded = manifest.version
        wall_s = round(time.monotonic() - began, 4)
        self._context.events.emit("loaded", version=manifest.version, wall_s=wall_s, stall_s=round(stall_s, 4))

    def _heed_lag(self) -> None:
        """An engine that does not see what the trainer has long made asks for files, which everybody sees."""
        weights = self._context.run.weights
        made = newest_version(weights)
        if made is None or made <= self._loaded:
            self._behind_since = None
            return
        self._behind_since = self._behind_since or time.monotonic()
        rung = read_rung(weights)
        if time.monotonic() - self._behind_since > BEHIND_S and rung is not None and rung.rung != "files":
            reason = f"{self._context.name} has waited {BEHIND_S:g} s for version {made} on rung {rung.rung}"
            set_rung(weights, Rung(rung="files", reason=reason))
            self._context.events.emit("rung", rung="files", reason=reason)
