"""A vLLM server as a child process: start it, send requests, watch it, end it.

    VllmLaunch                        the options it is started with
    build_command, build_environment  its command line and environment. Pure
    VllmServer                        `async with VllmServer(launch) as server`; it has generated a token by then
    spawn_supervised                  start the server's processes, or those of one part of it
    check_version                     refuse a version of vLLM that hpcrl is not tested with
    find_cause                        why a server ended, from its log

It listens only on a socket in a directory that no other user can enter: most of vLLM's routes for reinforcement
learning (pause, new weights, abort) require no key.
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from hpcrl.config.recipe import EngineConfig
from hpcrl.config.site import OUR_CONNECTOR
from hpcrl.engines.base import MAX_TOP_LOGPROBS
from hpcrl.engines.request_checks import check_tokenizer_fits
from hpcrl.engines.vllm import kv_connectors
from hpcrl.engines.vllm.engine_group import EngineGroup, GroupMeeting, GroupWatch
from hpcrl.engines.vllm.protocol import read_events
from hpcrl.errors import EngineError, EngineRequestError
from hpcrl.hardware.architecture import read_architecture, read_max_context
from hpcrl.hardware.memory_model import BYTES_FP32
from hpcrl.models.model_config import read_model_config
from hpcrl.plan.plan import RolePlan
from hpcrl.system.files import make_private_dir, measure_file, read_last_line
from hpcrl.system.network import LOOPBACK_INTERFACE
from hpcrl.system.package_range import VLLM, find_range_problem
from hpcrl.system.processes import end_group
from hpcrl.system.variables import NODE_VARIABLE

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
HEADLESS_MODULE = "hpcrl.engines.vllm.headless"
ADAPTER_WORKER = "hpcrl.engines.vllm.adapter_worker.AdapterWorker"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM makes room."""
ADAPTED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers for whose adapters it makes room; a trainer has none on the embeddings and the output layer."""
QUANTIZATIONS = {"none": None, "fp8": "fp8_per_tensor"}
"""vLLM's names of engine.quantization; its "fp8" is for checkpoints that are rounded already."""
KV_OPTIONS = ("--kv-cache-memory", "--kv_cache_memory", "--gpu-memory-util", "--gpu_memory_util", "--num-gpu-blocks")
"""The beginnings of vLLM's options by which a user sizes KV."""
KV_ROOM = 4
"""The requests whose KV there is room for, over those that run: prefixes of others stay."""
MIN_KV, MAX_SMALL_KV = 256 << 20, 4 << 30
"""A model that needs more than the second is not a small one."""
HEALTH_INTERVAL_S = 0.5
ANSWER_POLL_INTERVAL_S = 0.02
FIRST_TOKEN_TIMEOUT_S = 300.0
HEALTH_TIMEOUT_S = 60.0
"""The time limit of one health check."""
MAX_SILENCES = 3
ENGINE_STEP_TIMEOUT_S = 1800.0
"""vLLM's time limit for a step of its worker processes; its default of 300 s is too short on a crowded machine."""
CLIENT_KEEP_ALIVE_S, SERVER_KEEP_ALIVE_S = 15.0, 60.0
"""The time for which idle connections are kept: no request may meet one that the server just closes."""
SERVER_END_GRACE_S = 15.0
LOGGED_ERROR = re.compile(r"^\(.+ pid=\d+\) ERROR .*?\] ([\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)
"""The last line of a traceback that a process of vLLM logs."""
MAX_LOG_BYTES = 4 << 20
"""The most of a log that is searched for it."""
MAX_SCRATCH_BYTES = 68
"""The path of a socket has at most 107 bytes, and vLLM's sockets have names of 36."""


@dataclass(frozen=True, kw_only=True)
class VllmLaunch:
    """The options that a server is started with."""

    model: Path
    log: Path
    program: tuple[str, ...] = (sys.executable, "-m", SERVER_MODULE)
    version: int = 0
    """The version of the weights in the model directory."""
    dtype: str = "auto"
    max_model_len: int | None = None
    max_batch: int = 64
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    quantization: str | None = None
    """vLLM's name of a method that rounds weights when they are loaded."""
    lora_rank: int = 0
    """The rank of the adapters that the server gets as versions; 0: it gets whole weights."""
    data_parallel: int = 1
    """Copies of the model, among which the server shares its requests."""
    expert_parallel: bool = False
    """The ranks of a stage have whole experts each."""
    group: EngineGroup | None = None
    """The parts of an engine over several nodes; None: it is on one."""
    node_rank: int = 0
    host: str = "127.0.0.1"
    """The address of this node for other parts."""
    interface: str | None = None
    """The network interface with this address; None: torch chooses one."""
    node: str = ""
    """The name of this node, whose window has the weights."""
    num_cpus: int = 1
    cpu_kv_gib: int = 1
    """KV memory without a GPU; with one, vLLM uses the rest of its memory."""
    kv_connector: str | None = None
    """None: KV is neither handed over nor received."""
    kv_options: Mapping[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config` of connectors other than ours."""
    kv_dir: Path | None = None
    """This engine's directory of our own connector, beside those of the node's other engines."""
    kv_disk_bytes: int = 4 << 30
    """The space that it may use there."""
    kv_address: kv_connectors.Address | None = None
    """The address at which one of vLLM's connectors is reached by other engines."""
    reports_experts: bool = False
    """Answers have the experts that tokens were sent to."""
    seed: int = 0
    """The start of the engine's random numbers, from which tokens of requests without a seed are sampled."""
    has_seeds: bool = False
    """Sample every request by its seed."""
    keeps_old_kv: bool = False
    """KV of older weights stays in use after an update."""
    start_timeout_s: float = 900.0
    """Long enough for a large model that many engines read at once from a shared file system."""
    extra_args: tuple[str, ...] = ()
    shift_fd: int | None = None
    """The lock of GPUs that the trainer has at other times: processes of the server hold it until they have ended.
    None: the GPUs are its own."""
    has_gpus: bool = False
    kv_bytes: int | None = None
    """The KV memory of a GPU; None: vLLM uses the rest of the GPU's memory."""
    any_version: bool = False
    """Start also a version of vLLM that hpcrl is not tested with."""
    judge: str | None = None
    """The name of a judge, whose weights never change and whose server has only vLLM's own routes; None: the policy."""

    @property
    def served_name(self) -> str:
        """The name of the model in requests."""
        return self.judge or "policy"

    @classmethod
    def from_config(cls, engine: EngineConfig, *, role: RolePlan, model: Path, log: Path, lora_rank: int = 0) -> Self:
        """Return the options of a worker's server by its table in the recipe and the resources of its role."""
        num_gpus = role.gpus_per_engine
        return cls(
            model=model,
            log=log,
            dtype=engine.dtype,
            max_model_len=engine.max_model_len,
            max_batch=engine.max_batch,
            tensor_parallel=max(num_gpus // (engine.pipeline_parallel * engine.data_parallel), 1),
            pipeline_parallel=engine.pipeline_parallel,
            data_parallel=engine.data_parallel,
            expert_parallel=engine.expert_parallel,
            quantization=QUANTIZATIONS[engine.quantization],
            lora_rank=lora_rank,
            num_cpus=role.cpus_per_worker,
            cpu_kv_gib=engine.cpu_kv_gib,
            has_seeds=engine.seeds,
            keeps_old_kv=engine.keep_old_kv,
            start_timeout_s=engine.start_timeout_s,
            extra_args=tuple(engine.vllm_args),
            has_gpus=num_gpus > 0,
            kv_bytes=find_small_kv(model, engine) if num_gpus else None,
            any_version=engine.any_vllm_version,
        )


def find_small_kv(model: Path, engine: EngineConfig) -> int | None:
    """Return the KV memory that a small model needs; None for one that can use all of a GPU.

    vLLM keeps an object for every block of KV. A tiny model on a large GPU would get millions: on an H200 they took a
    minute at the start, and two seconds at each version.
    """
    if any(argument.startswith(KV_OPTIONS) for argument in engine.vllm_args):
        return None
    try:
        fields = read_model_config(model / "config.json").fields
        context = engine.max_model_len or read_max_context(fields)
        per_token = BYTES_FP32 * read_architecture(fields).kv_values_per_token
    except (OSError, KeyError, TypeError, ValueError):
        return None  # vLLM finds out whether it can use the model
    needed = KV_ROOM * engine.max_batch * (context or MAX_SMALL_KV) * per_token
    return max(needed, MIN_KV) if needed <= MAX_SMALL_KV else None


def build_command(launch: VllmLaunch, *, scratch: Path, meeting: GroupMeeting | None = None) -> list[str]:
    """Return the command line of the server, or of one part of an engine over several nodes."""
    is_first = launch.node_rank == 0
    args = [*(launch.program if is_first else (sys.executable, "-m", HEADLESS_MODULE)), "--model", str(launch.model)]
    args += ["--served-model-name", launch.served_name, *(("--uds", str(scratch / "s")) if is_first else ())]
    args += ["--dtype", launch.dtype, "--max-num-seqs", str(launch.max_batch)]
    args += ["--tensor-parallel-size", str(launch.tensor_parallel)]
    args += ["--pipeline-parallel-size", str(launch.pipeline_parallel), "--disable-uvicorn-access-log"]
    args += ["--seed", str(launch.seed), *(["--enable-expert-parallel"] if launch.expert_parallel else [])]
    args += [] if launch.quantization is None else ["--quantization", launch.quantization]
    args += _build_group_args(launch, meeting)
    if launch.max_model_len is not None:
        args += ["--max-model-len", str(launch.max_model_len)]
    args += [] if launch.kv_bytes is None else ["--kv-cache-memory-bytes", str(launch.kv_bytes)]
    if launch.judge is None:
        args += _build_policy_args(launch, scratch=scratch)
    return [*args, *launch.extra_args]


def _build_group_args(launch: VllmLaunch, meeting: GroupMeeting | None) -> list[str]:
    """Return the arguments of an engine with several copies of the model, or parts on several nodes."""
    args = [] if launch.data_parallel == 1 else ["--data-parallel-size", str(launch.data_parallel)]
    if launch.group is None or meeting is None:
        return args
    args += ["--nnodes", str(launch.group.num_nodes), "--node-rank", str(launch.node_rank)]
    args += ["--master-addr", meeting.host, "--master-port", str(meeting.port), "--distributed-executor-backend", "mp"]
    if launch.data_parallel > 1:
        args += ["--data-parallel-address", meeting.host, "--data-parallel-rpc-port", str(meeting.rpc_port)]
    return args


def _build_policy_args(launch: VllmLaunch, *, scratch: Path) -> list[str]:
    """Return the arguments of a server that is sent token ids and new weights."""
    args = ["--enable-prefix-caching", "--enable-scale-out", "--enable-prompt-tokens-details"]
    args += ["--scheduling-policy", "priority", "--max-logprobs", str(MAX_TOP_LOGPROBS + 1)]
    args += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    args += ["--enable-sleep-mode"] * (launch.shift_fd is not None and launch.has_gpus)
    args += ["--weight-transfer-config", '{"backend": "hpcrl"}']
    args += _build_adapter_args(launch.lora_rank)
    args += ["--enable-return-routed-experts"] * launch.reports_experts
    args += ["--structured-outputs-config", '{"backend": "guidance"}']  # it reads our grammars
    if launch.kv_connector is not None:
        args += ["--disable-hybrid-kv-cache-manager", "--kv-transfer-config"]
        args += [json.dumps(_build_kv_transfer_config(launch, scratch=scratch))]
    return args


def _build_adapter_args(lora_rank: int) -> list[str]:
    """Return the arguments of a server with room for one set of adapters of a rank."""
    if not lora_rank:
        return []
    room = next((rank for rank in LORA_RANKS if rank >= lora_rank), lora_rank)  # vLLM refuses what is above all
    args = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(room)]
    return [*args, "--worker-extension-cls", ADAPTER_WORKER, "--lora-target-modules", *ADAPTED_LAYERS]


def _build_kv_transfer_config(launch: VllmLaunch, *, scratch: Path) -> dict[str, Any]:
    """Return the configuration of one of vLLM's connectors by its name, or of ours."""
    assert launch.kv_connector is not None
    if launch.kv_connector != OUR_CONNECTOR:
        return kv_connectors.build_connector_config(
            launch.kv_connector, options=launch.kv_options, address=launch.kv_address
        )
    assert launch.kv_dir is not None
    return kv_connectors.build_files_config(launch.kv_dir, version_file=scratch / "version")


def build_environment(launch: VllmLaunch, *, scratch: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the server and its processes."""
    policy = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "hpcrl"}  # the mode enables pause, weights and abort
    return {
        **inherited,
        **({"VLLM_SERVER_DEV_MODE": "0"} if launch.judge is not None else policy),
        "VLLM_RPC_BASE_PATH": str(scratch),
        **kv_connectors.build_connector_env(launch.kv_address),
        **_choose_addresses(launch, inherited=inherited),
        NODE_VARIABLE: launch.node,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(round(SERVER_KEEP_ALIVE_S)),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(round(launch.start_timeout_s)),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(round(ENGINE_STEP_TIMEOUT_S)),
        "VLLM_CPU_KVCACHE_SPACE": str(launch.cpu_kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # Slurm assigns the cores
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(launch.num_cpus),
        **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if launch.reports_experts else {}),  # no other reports experts
    }


def _choose_addresses(launch: VllmLaunch, *, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which the processes of an engine listen only where its other processes are."""
    if launch.group is None:  # NCCL may connect it to other engines
        return {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    names = () if launch.interface is None else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    interfaces = {name: inherited.get(name, str(launch.interface)) for name in names}
    return {"VLLM_HOST_IP": launch.host, **interfaces}


def check_version(launch: VllmLaunch) -> None:
    """Raise an EngineError if the installed vLLM is not one that hpcrl is tested with, unless the recipe wants it."""
    if SERVER_MODULE not in launch.program or launch.any_version:
        return
    if (problem := find_range_problem(VLLM, setting="engine.any_vllm_version = true")) is not None:
        raise EngineError(problem)


def find_cause(log: Path, *, start: int) -> str:
    """Find why a server ended whose output starts there: the first error of its processes, else the last line.

    The last line is mostly that of the process for requests, which only reports that another one failed.
    """
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(start)
        found = LOGGED_ERROR.search(file.read(MAX_LOG_BYTES).decode(errors="replace"))
        if found is not None:
            return found[1].strip()[:500]
    return read_last_line(log)


def spawn_supervised(launch: VllmLaunch, *, scratch: Path, meeting: GroupMeeting | None) -> "subprocess.Popen[bytes]":
    """Start the processes of a server, or of one part of it, under a supervisor that ends them all."""
    supervisor = [sys.executable, "-m", "hpcrl.engines.vllm.supervisor", str(os.getpid())]
    fd = os.open(launch.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        return subprocess.Popen(
            [*supervisor, *build_command(launch, scratch=scratch, meeting=meeting)],
            env=build_environment(launch, scratch=scratch, inherited=os.environ),
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            start_new_session=True,
            pass_fds=() if launch.shift_fd is None else (launch.shift_fd,),
        )
    finally:
        os.close(fd)


class VllmServer:
    """One server process and a client of its routes."""

    def __init__(self, launch: VllmLaunch) -> None:
        self.launch = launch
        self._scratch: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._answer_numbers = itertools.count()
        self._watch: GroupWatch | None = None
        self._log_start = 0

    async def __aenter__(self) -> Self:
        launch = self.launch
        if not (launch.model / "config.json").is_file():
            raise EngineError(f"{launch.model} holds no model (it has no config.json): see model.path in the recipe")
        check_version(launch)
        await asyncio.to_thread(check_tokenizer_fits, launch.model)
        self._scratch = Path(tempfile.mkdtemp(prefix="vllm-"))  # 0700; short, since paths of sockets must be
        try:
            if len(bytes(self._scratch)) > MAX_SCRATCH_BYTES:
                raise EngineError(f"{self._scratch} is too long for sockets in it: set TMPDIR to a shorter path")
            self.write_version(launch.version)
            if launch.kv_dir is not None:
                make_private_dir(make_private_dir(launch.kv_dir.parent) / launch.kv_dir.name)
            if launch.group is not None:
                self._watch = GroupWatch(launch.group, launch.group.open_meeting(launch.host))
            meeting = None if self._watch is None else self._watch.meeting
            self._log_start = measure_file(launch.log)
            self._process = spawn_supervised(launch, scratch=self._scratch, meeting=meeting)
            path = str(self.socket_path)
            connector = aiohttp.UnixConnector(path=path, limit=0, keepalive_timeout=CLIENT_KEEP_ALIVE_S)
            self._http = aiohttp.ClientSession(connector=connector, base_url="http://vllm")
            await self._wait_until_well()
            if launch.judge is None:  # a reward model generates nothing
                await self._generate_first_token()
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
        """The process id of the supervisor, which leads the server's process group."""
        assert self._process is not None
        return self._process.pid

    @property
    def socket_path(self) -> Path:
        """The socket file at which it listens."""
        assert self._scratch is not None
        return self._scratch / "s"

    async def is_well(self) -> bool:
        """Return whether it passes a health check."""
        try:
            await self.get("/health", limit_s=HEALTH_TIMEOUT_S)
        except EngineError:
            return False
        return True

    def write_version(self, version: int) -> None:
        """Write the version to the file that our KV connector reads when caches are reset."""
        assert self._scratch is not None
        (self._scratch / "version").write_text(str(version))

    def make_answer_path(self) -> Path:
        """Return a path at which the server's worker processes can write answers for `wait_for_answers`."""
        assert self._scratch is not None
        name = f"answer-{next(self._answer_numbers)}"
        if self._watch is None:
            return self._scratch / name
        group = self._watch.group
        return group.directory / f"{group.name}.{self._watch.meeting.id}.{name}"

    @property
    def num_ranks(self) -> int:
        """The number of processes that each hold a part of one copy of the model and of its KV."""
        return self.launch.tensor_parallel * self.launch.pipeline_parallel

    async def wait_for_answers(self, path: Path, *, limit_s: float) -> list[str]:
        """Wait for the answers of all ranks and return them; that of rank R is at PATH.R."""
        rank_paths = [
            path.with_name(f"{path.name}.{rank}") for rank in range(self.num_ranks * self.launch.data_parallel)
        ]
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
        """Post to a route; raises EngineError with the server's reason, or if it does not answer."""
        return await self._request_answer("POST", path, body=body, query=query, limit_s=limit_s)

    async def get(self, path: str, *, limit_s: float) -> Any:
        """Return the text of a route, or its JSON."""
        return await self._request_answer("GET", path, body=None, query={}, limit_s=limit_s)

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """Post to a route and yield the events of its answer as they are received."""
        assert self._http is not None
        try:
            async with self._http.post(path, json=body, timeout=aiohttp.ClientTimeout(total=None)) as answer:
                if answer.status >= 400:
                    raise _make_error(path, answer.status, await answer.read())
                async for event in read_events(answer.content.iter_any()):
                    if "error" in event:
                        raise EngineError(f"vLLM answered {path} with {event['error']}")
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineError(f"vLLM did not answer {path}: {error!r}") from error

    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token after the first, as vLLM scores a prompt: at temperature 1."""
        if len(token_ids) < 2:
            return []
        body = {
            "model": self.launch.served_name,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        answer = await self.post("/v1/completions", body)
        try:
            scored = zip(token_ids, answer["choices"][0]["prompt_logprobs"], strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in scored if entry is not None]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"vLLM scored {len(token_ids)} tokens with an invalid answer: {error!r}") from error

    async def wait_until_failed(self) -> None:
        """Wait until the server has ended or fails its health checks, and raise the reason."""
        silences = 0
        while True:
            self._check_alive()
            try:
                await self.get("/health", limit_s=HEALTH_TIMEOUT_S)
                silences = 0
            except EngineError as error:
                silences += 1
                if silences >= MAX_SILENCES:
                    raise EngineError(
                        f"the vLLM server fails its health checks: {error}; its log is {self.launch.log}"
                    ) from error
            await asyncio.sleep(HEALTH_INTERVAL_S)

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
            raise _make_error(path, answer.status, data)
        try:
            return json.loads(data) if answer.content_type == "application/json" else data.decode()
        except ValueError as error:
            raise EngineError(f"vLLM sent an invalid answer to {path}: {error}") from error

    async def _wait_until_well(self) -> None:
        """Wait until the server passes a health check."""
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
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _generate_first_token(self) -> None:
        """Generate a token with the first weights: a server that passes health checks may fail at its first."""
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
            cause = find_cause(log, start=self._log_start)
            raise EngineError(f"the vLLM server ended with {code}: {cause}; all of it is in {log}")
        if self._watch is not None:
            self._watch.check()

    async def _shut_down(self) -> None:
        """Close the connection, end all processes of the server, and remove their scratch directory."""
        if self._http is not None:
            await self._http.close()
        if self._process is not None:
            await asyncio.shield(asyncio.to_thread(end_group, self._process, grace_s=SERVER_END_GRACE_S))
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self.launch.kv_dir is not None:
            shutil.rmtree(self.launch.kv_dir, ignore_errors=True)
            with contextlib.suppress(OSError):  # that of another engine may be there
                self.launch.kv_dir.parent.rmdir()


def _make_error(path: str, status: int, data: bytes) -> EngineError:
    kind = EngineRequestError if status in (400, 422) else EngineError
    return kind(f"vLLM answered {path} with {status}: {_read_error(data)}")


def _read_error(data: bytes) -> str:
    """Return the error in vLLM's answer, or the start of the answer."""
    try:
        value = json.loads(data)
        return str(value["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data[:500].decode(errors="replace")
