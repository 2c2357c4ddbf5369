"""What prefill and decode share: an engine behind an HTTP door, kept at the newest version of the weights."""

import asyncio
import time

from hpcrl import endpoints
from hpcrl.endpoints import Endpoint
from hpcrl.engines.embedded import EmbeddedEngine, load_model
from hpcrl.engines.http import client_session, kv_fetcher, serve
from hpcrl.errors import WeightsError
from hpcrl.roles.context import Context
from hpcrl.slurm.allocation import this_node
from hpcrl.weights.store import FileStore, Manifest

POLL_S = 0.1


async def serve_engine(context: Context) -> None:
    """Wait for the first version, serve until the job ends."""
    store = FileStore(context.run.weights)
    first = await _first_version(context, store)
    if first is None:
        return
    model = load_model(context.run.model)
    async with (
        client_session() as session,
        EmbeddedEngine(
            model, store=store, max_batch=context.recipe.engine.max_batch, fetch_kv=kv_fetcher(session)
        ) as engine,
    ):
        await _load(engine, first, context)
        await _announced(engine, store, context, loaded=first.version)


async def _announced(engine: EmbeddedEngine, store: FileStore, context: Context, *, loaded: int) -> None:
    """Open the door, say where it is, keep up with the versions, close it."""
    token = endpoints.new_token()
    url, runner = await serve(engine, host=endpoints.address_of(context.site.network.interface), token=token)
    endpoint = Endpoint(
        role=context.role, worker=context.name, node=this_node(), url=url, token=token, job=context.job.number
    )
    endpoints.announce(context.run.endpoints, endpoint)
    try:
        await _follow_versions(engine, store, context, loaded=loaded)
    finally:
        endpoints.withdraw(context.run.endpoints, context.name)
        await runner.cleanup()


async def _first_version(context: Context, store: FileStore) -> Manifest | None:
    """The trainer publishes the initial weights; None if the job ends before."""
    while not context.draining:
        if (newest := store.newest()) is not None:
            return newest
        await asyncio.sleep(POLL_S)
    return None


async def _follow_versions(engine: EmbeddedEngine, store: FileStore, context: Context, *, loaded: int) -> None:
    """Until the job ends, or the engine does: then this worker ends with its reason, and is begun anew."""
    failed = asyncio.create_task(engine.failed(), name="engine failed")
    while not context.draining:
        if failed.done():
            failed.result()
        newest = store.newest()
        if newest is not None and newest.version > loaded:
            await _load(engine, newest, context)
            loaded = newest.version
        await asyncio.sleep(POLL_S)
    failed.cancel()


async def _load(engine: EmbeddedEngine, manifest: Manifest, context: Context) -> None:
    """Take a version over; if it cannot be had, the one in use stays."""
    began = time.monotonic()
    await engine.pause()
    try:
        await engine.load_version(manifest.version)
    except WeightsError as error:
        context.events.emit("fault", what="weights", detail=str(error))
    else:
        context.events.emit("loaded", version=manifest.version, wall_s=round(time.monotonic() - began, 4))
    finally:
        await engine.resume()
