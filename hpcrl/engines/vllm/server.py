"""A real vLLM server as a process of ours: started, waited for, asked, watched, ended.

    VllmLaunch                        what it is started with
    build_command, build_environment    the same as vLLM wants it. Pure
    VllmServer                        `async with VllmServer(launch) as server`: it has generated a token when the block begins

It listens on a socket in a directory that only this user can enter, and nowhere else: most of vLLM's routes for
reinforcement learning (pause, new weights, abort) ask nobody for a key.
"""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from hpcrl.engines.base import MAX_TOP_LOGPROBS
from hpcrl.engines.request_checks import check_tokenizer_fits
from hpcrl.engines.vllm import kv_connectors
from hpcrl.engines.vllm.protocol import read_events
from hpcrl.errors import EngineError
from hpcrl.system.files import make_private_dir, read_last_line
from hpcrl.system.processes import end_group

POLL_INTERVAL_S = 0.5
ANSWER_POLL_INTERVAL_S = 0.02
FIRST_TOKEN_TIMEOUT_S = 300.0
HEALTH_TIMEOUT_S = 60.0
"""How long a server may take to say that it is well."""
MAX_SILENCES = 3
STEP_TIMEOUT_S = 1800.0
"""How long vLLM waits for a step of its worker processes; its own 300 s have been too little on a crowded machine."""
END_GRACE_S = 15.0
MAX_SCRATCH_BYTES = 68
"""A socket's path has at most 107, and vLLM's own sockets have names of 36."""


@dataclass(frozen=True, kw_only=True)
class VllmLaunch:
    """What a server is started with."""

    model: Path
    log: Path
    program: tuple[str, ...] = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    version: int = 0
    """What the weights in the model directory are called."""
    dtype: str = "auto"
    max_model_len: int | None = None
    max_batch: int = 64
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    num_cpus: int = 1
    cpu_kv_gib: int = 1
    """KV memory where there is no GPU; with one, vLLM takes what is left of its memory."""
    kv_connector: str | None = None
    """None: KV is neither handed over nor taken."""
    kv_options: Mapping[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config` of connectors other than ours."""
    kv_dir: Path | None = None
    """Where our own connector leaves KV."""
    kv_address: kv_connectors.Address | None = None
    """Where a connector of vLLM's own is found by those of other engines."""
    start_timeout_s: float = 900.0
    """A large model is read from a shared file system, by many engines at once."""
    extra_args: tuple[str, ...] = ()


def build_command(launch: VllmLaunch, *, scratch: Path) -> list[str]:
    """The server's command line."""
    args = [*launch.program, "--model", str(launch.model), "--served-model-name", "policy", "--uds", str(scratch / "s")]
    args += ["--dtype", launch.dtype, "--max-num-seqs", str(launch.max_batch)]
    args += ["--tensor-parallel-size", str(launch.tensor_parallel)]
    args += ["--pipeline-parallel-size", str(launch.pipeline_parallel)]
    args += ["--enable-prefix-caching", "--enable-scale-out", "--enable-prompt-tokens-details"]
    args += ["--scheduling-policy", "priority", "--max-logprobs", str(MAX_TOP_LOGPROBS + 1)]
    args += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    args += ["--disable-uvicorn-access-log", "--weight-transfer-config", '{"backend": "hpcrl"}']
    if launch.max_model_len is not None:
        args += ["--max-model-len", str(launch.max_model_len)]
    if launch.kv_connector is not None:
        args += ["--disable-hybrid-kv-cache-manager", "--kv-transfer-config"]
        args += [json.dumps(_build_kv_transfer_config(launch, scratch=scratch))]
    return [*args, *launch.extra_args]


def _build_kv_transfer_config(launch: VllmLaunch, *, scratch: Path) -> dict[str, Any]:
    """A connector of vLLM's own by its name, or ours."""
    assert launch.kv_connector is not None
    if launch.kv_connector != kv_connectors.OUR_CONNECTOR:
        return kv_connectors.build_connector_config(
            launch.kv_connector, options=launch.kv_options, address=launch.kv_address
        )
    assert launch.kv_dir is not None
    return kv_connectors.build_files_config(launch.kv_dir, version_file=scratch / "version")


def build_environment(launch: VllmLaunch, *, scratch: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the server and its processes find in their environment."""
    return {
        **inherited,
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weights and abort are there only so
        "VLLM_PLUGINS": "hpcrl",
        "VLLM_RPC_BASE_PATH": str(scratch),
        **kv_connectors.build_connector_env(launch.kv_address),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(round(launch.start_timeout_s)),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(round(STEP_TIMEOUT_S)),
        "VLLM_CPU_KVCACHE_SPACE": str(launch.cpu_kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # which cores are ours is Slurm's to say
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(launch.num_cpus),
    }


class VllmServer:
    """One server process and the way to its routes."""

    def __init__(self, launch: VllmLaunch) -> None:
        self.launch = launch
        self._scratch: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._answer_numbers = itertools.count()

    async def __aenter__(self) -> Self:
        launch = self.launch
        if not (launch.model / "config.json").is_file():
            raise EngineError(f"{launch.model} holds no model (there is no config.json): see model.path in the recipe")
        await asyncio.to_thread(check_tokenizer_fits, launch.model)
        self._scratch = Path(tempfile.mkdtemp(prefix="vllm-"))  # 0700; short, since a socket's path is
        try:
            if len(bytes(self._scratch)) > MAX_SCRATCH_BYTES:
                raise EngineError(f"{self._scratch} is too long for sockets in it: set TMPDIR to a shorter path")
            self.write_version(launch.version)
            if launch.kv_dir is not None:
                make_private_dir(launch.kv_dir)
            self._process = self._spawn(self._scratch)
            connector = aiohttp.UnixConnector(path=str(self._scratch / "s"), limit=0)
            self._http = aiohttp.ClientSession(connector=connector, base_url="http://vllm")
            await self._wait_until_generating()
        except BaseException:
            await self._shut_down()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._shut_down()

    @property
    def pid(self) -> int:
        """Of the keeper, which leads the server's process group."""
        assert self._process is not None
        return self._process.pid

    def write_version(self, version: int) -> None:
        """Leave the version where our KV connector looks for it when caches are reset."""
        assert self._scratch is not None
        (self._scratch / "version").write_text(str(version))

    def make_answer_path(self) -> Path:
        """Where the server's worker processes can leave answers for `wait_for_answers`."""
        assert self._scratch is not None
        return self._scratch / f"answer-{next(self._answer_numbers)}"

    async def wait_for_answers(self, path: Path, *, limit_s: float) -> list[str]:
        """What they left, the one of rank R at PATH.R, as soon as all have."""
        num_ranks = self.launch.tensor_parallel * self.launch.pipeline_parallel
        rank_paths = [path.with_name(f"{path.name}.{rank}") for rank in range(num_ranks)]
        deadline = time.monotonic() + limit_s
        while missing := [rank_path for rank_path in rank_paths if not rank_path.exists()]:
            self._check_alive()
            if time.monotonic() > deadline:
                ranks = ", ".join(rank_path.suffix[1:] for rank_path in missing)
                raise EngineError(f"no answer from rank {ranks} in {limit_s:g} s: see {self.launch.log}")
            await asyncio.sleep(ANSWER_POLL_INTERVAL_S)
        answers = [rank_path.read_text() for rank_path in rank_paths]
        for rank_path in rank_paths:
            rank_path.unlink()
        return answers

    async def post(self, path: str, body: Any = None, *, limit_s: float | None = None, **query: str) -> Any:
        """Ask a route; EngineError with its own words if it refuses, or if nobody answers."""
        return await self._request_answer("POST", path, body=body, query=query, limit_s=limit_s)

    async def get(self, path: str, *, limit_s: float) -> Any:
        """The text of a route, or its JSON."""
        return await self._request_answer("GET", path, body=None, query={}, limit_s=limit_s)

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The events that a route answers with, as they come."""
        assert self._http is not None
        try:
            async with self._http.post(path, json=body, timeout=aiohttp.ClientTimeout(total=None)) as answer:
                if answer.status >= 400:
                    raise EngineError(f"vLLM answered {path} with {answer.status}: {_read_error(await answer.read())}")
                async for event in read_events(answer.content.iter_any()):
                    if "error" in event:
                        raise EngineError(f"vLLM answered {path} with {event['error']}")
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineError(f"vLLM did not answer {path}: {error!r}") from error

    async def wait_until_failed(self) -> None:
        """Wait until the server has ended or is silent, and raise why."""
        silences = 0
        while True:
            self._check_alive()
            try:
                await self.get("/health", limit_s=HEALTH_TIMEOUT_S)
                silences = 0
            except EngineError as error:
                silences += 1
                if silences >= MAX_SILENCES:
                    raise EngineError(f"the vLLM server is not well: {error}; its log is {self.launch.log}") from error
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _request_answer(
        self, method: str, path: str, *, body: Any, query: dict[str, str], limit_s: float | None
    ) -> Any:
        assert self._http is not None
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._http.request(method, path, json=body, params=query, timeout=timeout) as answer:
                data = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"vLLM did not answer {path}: {error!r}") from error
        if answer.status >= 400:
            raise EngineError(f"vLLM answered {path} with {answer.status}: {_read_error(data)}")
        try:
            return json.loads(data) if answer.content_type == "application/json" else data.decode()
        except ValueError as error:
            raise EngineError(f"vLLM's answer to {path} is not understood: {error}") from error

    def _spawn(self, scratch: Path) -> subprocess.Popen[bytes]:
        keeper = [sys.executable, "-m", "hpcrl.engines.vllm.supervisor", str(os.getpid())]
        fd = os.open(self.launch.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            return subprocess.Popen(
                [*keeper, *build_command(self.launch, scratch=scratch)],
                env=build_environment(self.launch, scratch=scratch, inherited=os.environ),
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                start_new_session=True,
            )
        finally:
            os.close(fd)

    async def _wait_until_generating(self) -> None:
        """A server that says it is well may still fail at its first token."""
        deadline = time.monotonic() + self.launch.start_timeout_s
        while True:
            self._check_alive()
            try:
                await self.get("/health", limit_s=HEALTH_TIMEOUT_S)
                break
            except EngineError as error:
                if time.monotonic() > deadline:
                    late = f"vLLM was not up after {self.launch.start_timeout_s:g} s"
                    raise EngineError(f"{late}: {error}; see {self.launch.log}") from error
            await asyncio.sleep(POLL_INTERVAL_S)
        await self.post("/update_weight_version", {"new_version": str(self.launch.version)}, limit_s=HEALTH_TIMEOUT_S)
        sampling = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "ignore_eos": True}
        body = {"token_ids": [0], "sampling_params": sampling}
        answer = await self.post("/inference/v1/generate", body, limit_s=FIRST_TOKEN_TIMEOUT_S)
        if len(answer["choices"][0]["token_ids"]) != 1:
            raise EngineError(f"vLLM was asked for one token and answered {answer}: see {self.launch.log}")

    def _check_alive(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            log = self.launch.log
            raise EngineError(f"the vLLM server ended with {code}: {read_last_line(log)}; all of it is in {log}")

    async def _shut_down(self) -> None:
        """Close the way to it, end all its processes, remove what they kept on disk."""
        if self._http is not None:
            await self._http.close()
        if self._process is not None:
            await asyncio.shield(asyncio.to_thread(end_group, self._process, grace_s=END_GRACE_S))
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _read_error(data: bytes) -> str:
    """The error in vLLM's answer, or the start of whatever it is."""
    try:
        value = json.loads(data)
        return str(value["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data[:500].decode(errors="replace")
