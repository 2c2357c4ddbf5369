"""The KV connector of our vLLM engines where no faster one is available: files in a directory of each engine.

    FilesConnector  the connector
    KvTransfer      KV of some tokens of one request, to be read or written
    TransferOrders  the transfers of one step

vLLM makes one connector in its scheduler, which decides, and one in every worker process, which reads and writes. As
with vLLM's own connectors, the `kv_transfer_params` of a request are:

    "do_remote_decode"     store the KV of the prompt under `name`, without the blocks of its first `num_held` tokens,
                           which the other engine has; the answer reports whether it is stored
    "do_remote_prefill"    start with the KV of that name; the answer reports how many tokens of it were used

Unlike in a cache, KV is requested by name and KV of old weights is never used: both ends compare the version of the
weights, which the connector reads again, from a file, whenever vLLM's caches are reset after an update. If anything
is wrong with a file, the prompt is computed here instead.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from hpcrl.engines.vllm.kv_files import digest_tokens, is_handover_name, shard_path

log = logging.getLogger("vllm.hpcrl")  # below vLLM's own logger, so that it goes to the same handlers
UNREADABLE_ERRORS = (OSError, SafetensorError, KeyError, ValueError, RuntimeError)


@dataclass
class KvTransfer:
    """KV of consecutive tokens of one request, to be written from or read into its blocks."""

    name: str
    block_ids: list[int]
    start: int
    stop: int
    label: dict[str, str] = field(default_factory=dict)
    """Written beside the KV, and compared when it is read."""

    def blocks(self, block_size: int) -> torch.Tensor:
        """Return all blocks that hold these tokens, whole: some kernels mix the tokens of a block in memory."""
        return torch.tensor(self.block_ids)[self.start // block_size : -(-self.stop // block_size)]


@dataclass
class TransferOrders(KVConnectorMetadata):
    """The scheduler's orders to the workers for one step."""

    loads: list[KvTransfer] = field(default_factory=list)
    saves: list[KvTransfer] = field(default_factory=list)


@dataclass
class _LeavingPrompt:
    """A prompt whose KV is to be stored."""

    name: str
    prompt: list[int]
    num_held: int = 0
    block_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """All but the last: the decode engine computes that one anyway, to sample."""
        return len(self.prompt) - 1

    def first_token(self, block_size: int) -> int:
        """Return the start of the first block to store; at least one is."""
        return max(0, min(self.num_held, self.num_tokens - 1)) // block_size * block_size


class FilesConnector(KVConnectorBase_V1):
    """The connector; vLLM's `kv_transfer_config` names its class and module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._directory = Path(extra["directory"])
        self._version_file = Path(extra["version_file"])
        self._block_size = int(vllm_config.cache_config.block_size)
        self._rank = int(vllm_config.parallel_config.rank)
        self._num_ranks = int(vllm_config.parallel_config.world_size)
        self._version = self._read_version()
        # used in the scheduler
        self._leaving: dict[str, _LeavingPrompt] = {}
        self._loading: dict[str, KvTransfer] = {}
        self._ordered_loads: dict[str, KvTransfer] = {}
        """Loads ordered for requests that still run."""
        # used in a worker
        self._to_save: dict[str, dict[str, torch.Tensor]] = {}
        self._not_loaded: set[int] = set()

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens can be loaded beyond those that this engine has."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill") or request.num_preemptions or not is_handover_name(params.get("name")):
            return 0, False
        prompt = list(request.prompt_token_ids or [])
        stop = len(prompt) - 1
        start = None if stop <= num_computed_tokens else self._read_start(params["name"], prompt[:stop])
        if start is None or start > num_computed_tokens:  # blocks that it should hold are gone
            return 0, False
        return stop - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load or store of a request that has got its blocks and is about to run."""
        params = request.kv_transfer_params or {}
        prompt = list(request.prompt_token_ids or [])
        if num_external_tokens:
            stop = len(prompt) - 1
            load = KvTransfer(
                name=params["name"],
                block_ids=list(blocks.get_block_ids()[0]),
                start=stop - num_external_tokens,
                stop=stop,
                label=self._label(prompt[:stop]),
            )
            self._loading[request.request_id] = self._ordered_loads[request.request_id] = load
        if params.get("do_remote_decode") and is_handover_name(params.get("name")) and len(prompt) > 1:
            num_held = int(params.get("num_held") or 0)
            self._leaving.setdefault(request.request_id, _LeavingPrompt(params["name"], prompt, num_held))

    def build_connector_meta(self, scheduler_output: Any) -> TransferOrders:
        """Return the orders of this step: all loads, and stores of the prompts that it completes."""
        saves = []
        for request_id, block_ids, is_whole, num_computed in _iterate_scheduled(scheduler_output):
            leaving = self._leaving.get(request_id)
            if leaving is None:
                continue
            leaving.block_ids = block_ids if is_whole else leaving.block_ids + block_ids
            done = num_computed + scheduler_output.num_scheduled_tokens[request_id]
            if num_computed < len(leaving.prompt) and done >= leaving.num_tokens:
                start, stop = leaving.first_token(self._block_size), leaving.num_tokens
                label = self._label(leaving.prompt[:stop]) | {"start": str(start)}
                saves.append(KvTransfer(leaving.name, list(leaving.block_ids), start, stop, label))
        loads, self._loading = list(self._loading.values()), {}
        return TransferOrders(loads=loads, saves=saves)

    def update_connector_output(self, connector_output: Any) -> None:
        """Forget the loads that failed."""
        failed = connector_output.invalid_block_ids
        if failed:
            self._ordered_loads = {
                request_id: load for request_id, load in self._ordered_loads.items() if not failed & set(load.block_ids)
            }

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return the outcome for the answer to the request; its blocks may be freed."""
        del block_ids
        leaving = self._leaving.pop(request.request_id, None)
        if leaving is not None:
            is_saved = self._read_start(leaving.name, leaving.prompt[:-1]) is not None
            return False, {"name": leaving.name, "saved": is_saved}
        load = self._ordered_loads.pop(request.request_id, None)
        return False, {"num_loaded": 0 if load is None else load.stop - load.start}

    def reset_cache(self) -> bool:
        """Read the version of the weights again, which have changed."""
        self._version = self._read_version()
        return True

    def _read_start(self, name: str, tokens: list[int]) -> int | None:
        """Return the token from which KV of these tokens and the current weights is stored for every rank."""
        paths = [shard_path(self._directory, name, rank=rank) for rank in range(self._num_ranks)]
        try:
            with safe_open(paths[0], framework="pt") as file:
                label, start = _split_label(file)
        except UNREADABLE_ERRORS:
            return None
        return start if label == self._label(tokens) and all(path.exists() for path in paths) else None

    def _label(self, tokens: list[int]) -> dict[str, str]:
        shape = f"{self._num_ranks} ranks, {self._block_size} tokens a block"
        return {"tokens": digest_tokens(tokens), "version": self._version, "shape": shape}

    def _read_version(self) -> str:
        return self._version_file.read_text().strip()

    # ---- worker

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Fill blocks from files before the step that needs them."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, TransferOrders)
        caches = _find_caches(forward_context)
        for load in orders.loads:
            path = shard_path(self._directory, load.name, rank=self._rank)
            try:
                self._fill_blocks(caches, load, path)
            except UNREADABLE_ERRORS as error:
                log.warning("KV in %s is not used, the prompt is computed here: %s", path, error)
                self._not_loaded |= set(load.block_ids[load.start // self._block_size :])
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _fill_blocks(self, caches: dict[str, torch.Tensor], load: KvTransfer, path: Path) -> None:
        """Fill all blocks of a load; after a ValueError none has changed."""
        with safe_open(path, framework="pt") as file:
            label, start = _split_label(file)
            first = load.start // self._block_size - start // self._block_size  # it is asked for from whole blocks on
            if label != load.label or set(file.keys()) != caches.keys() or first < 0:
                raise ValueError("it is of another prompt, version or model")
            read = {layer: file.get_slice(layer)[first:] for layer in caches}
        block_ids = load.blocks(self._block_size)
        for layer, kv_BHNC in read.items():
            if kv_BHNC.shape != (len(block_ids), *caches[layer].shape[1:]) or kv_BHNC.dtype != caches[layer].dtype:
                raise ValueError(f"layer {layer} has {kv_BHNC.dtype} of shape {tuple(kv_BHNC.shape)}")
        for layer, kv_BHNC in read.items():
            cache_BHNC = caches[layer]
            cache_BHNC[block_ids.to(cache_BHNC.device)] = kv_BHNC.to(cache_BHNC.device)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Copy the KV that is to be stored from one layer."""
        del attn_metadata
        orders = self._get_connector_metadata()
        assert isinstance(orders, TransferOrders)
        for save in orders.saves:
            block_ids = save.blocks(self._block_size).to(kv_layer.device)
            self._to_save.setdefault(save.name, {})[layer_name] = kv_layer[block_ids].detach().cpu().contiguous()

    def wait_for_save(self) -> None:
        """Write the files of this step, which appear complete; a failure is logged, and the KV is then not stored."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, TransferOrders)
        tensors, self._to_save = self._to_save, {}
        for save in orders.saves:
            path = shard_path(self._directory, save.name, rank=self._rank)
            temporary = path.with_name(f".{path.name}.tmp")
            try:
                save_file(tensors.get(save.name, {}), temporary, metadata=save.label)
                temporary.chmod(0o600)
                os.rename(temporary, path)  # noqa: PTH104 - atomic, replaces a file
            except UNREADABLE_ERRORS as error:
                log.warning("KV cannot be stored in %s: %s", path, error)
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end before the step starts."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._not_loaded = self._not_loaded, set()
        return failed


def _split_label(file: Any) -> tuple[dict[str, str], int]:
    """Return the label of a file without its first token, and this token."""
    label = dict(file.metadata() or {})
    return label, int(label.pop("start"))


def _iterate_scheduled(scheduler_output: Any) -> Iterator[tuple[str, list[int], bool, int]]:
    """Yield for every request in a step: its id, blocks, whether these are all of them or only new, tokens computed."""
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, list(new.block_ids[0]), True, new.num_computed_tokens
    continuing = scheduler_output.scheduled_cached_reqs
    for index, request_id in enumerate(continuing.req_ids):
        added = continuing.new_block_ids[index]
        block_ids = [] if added is None else list(added[0])
        is_whole = request_id in continuing.resumed_req_ids
        yield request_id, block_ids, is_whole, continuing.num_computed_tokens[index]


def _find_caches(forward_context: Any) -> dict[str, torch.Tensor]:
    """Return the KV memory of every attention layer: blocks, heads, tokens of a block, values."""
    layers = forward_context.no_compile_layers.items()
    return {name: cache for name, layer in layers if (cache := getattr(layer, "kv_cache", None)) is not None}
