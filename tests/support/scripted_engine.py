"""An engine whose behaviour is chosen by the id of a request."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from hpcrl.engines.base import (
    LOCAL_URL_PREFIX,
    Completion,
    CompletionChunk,
    GenerateRequest,
    KvHandle,
    LoadFigures,
    convert_to_chunk,
)
from hpcrl.errors import EngineRequestError
from tests.support.completions import make_completion


class ScriptedEngine:
    """An engine whose behaviour is chosen by the id of a request."""

    def __init__(self) -> None:
        self.started, self.gone = asyncio.Event(), asyncio.Event()
        self.num_load_requests = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        match request.request_id:
            case "refuse":
                raise EngineRequestError("too long:\n513 tokens")
            case "bug":
                raise ZeroDivisionError("secret path /home/me")
            case "hang":
                self.started.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.gone.set()
        return make_completion([7], version=3, logprob=-0.5, finish_reason="length")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        yield convert_to_chunk(await self.generate(request))

    async def prefill(self, request: GenerateRequest) -> KvHandle:
        return KvHandle(url=LOCAL_URL_PREFIX + "abc", token="", version=3, num_tokens=1)

    async def abort(self, request_id: str) -> None:
        return None

    async def load_figures(self) -> LoadFigures:
        self.num_load_requests += 1
        return LoadFigures(version=3, num_running=0, num_waiting=0, num_generated_tokens=0)

    file: Path | None = None

    async def take_kv(self, name: str) -> bytes | Path | None:
        if name == "file":
            return self.file
        return b"kv" * 50 if name == "abc" else None
