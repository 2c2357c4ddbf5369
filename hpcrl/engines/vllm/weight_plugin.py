"""Weights for vLLM: a weight-transfer engine named "hpcrl", which vLLM finds by an entry point.

    register                            the entry point, called by vLLM in each of its processes
    open_source                         the source of versions on a node
    VersionEngine                       the weight-transfer engine
    UpdateThreads                       its threads
    VersionInitInfo, VersionUpdateInfo  its requests
    PLUGIN_NAME, RELEASE_DELAY_S        constants

The workers of vLLM map the window of their node, or read files, as the embedded engine does; vLLM's loader cuts out
the part of a tensor-parallel rank. An update has two halves:

    /init_weight_transfer_engine    start to prepare a version, in a thread beside the one that generates: check that
                                    it is whole and fits. On CPUs it is also loaded, into a twin of the model
    /hpcrl/switch                   between pause and resume: use it (hpcrl.engines.vllm.weight_route)

so that any fault of a version is found while the old one is still in use, and generation pauses as shortly as
possible.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.lora_model import LoRAModel
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.engines.vllm.adapter_model import AdapterOutline, make_lora_model, make_outline
from hpcrl.engines.vllm.answer_prefix import continue_answers
from hpcrl.engines.vllm.store_address import bind_stores
from hpcrl.engines.vllm.weight_twin import ModelTwin
from hpcrl.errors import WeightsError
from hpcrl.models.weight_files import read_stored_tensors
from hpcrl.system.files import publish_file
from hpcrl.system.variables import NODE_VARIABLE
from hpcrl.weights.model_update import check_fit, collect_parameters
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.store import NewestSource, Tensors, WeightSource
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.window.file import make_window_key

PLUGIN_NAME = "hpcrl"
RELEASE_DELAY_S = 1.0
"""The delay before the memory of the previous version is released, unless another is prepared: running requests are
recomputed first."""
log = logging.getLogger("vllm.hpcrl")


@dataclass
class VersionInitInfo(WeightTransferInitInfo):
    """The place of the versions, the version to prepare, and the path of the answer."""

    campaign: str
    job: int
    node: str
    version: int
    answer: str
    """Rank R writes a file ANSWER.R when it is done: empty, or with the fault of the version."""


@dataclass
class VersionUpdateInfo(WeightTransferUpdateInfo):
    """The version to load."""

    version: int


class UpdateThreads:
    """Work in threads beside the one that generates, one piece after the other.

    They have normal priority: a nicer thread could be descheduled while it holds the GIL.
    """

    def __init__(self) -> None:
        self._newest: tuple[threading.Thread, threading.Event] | None = None
        """The newest thread, and what ends its delay."""

    def run(self, work: Callable[[], None], *, delay_s: float = 0.0) -> None:
        """Run `work` after the piece before it, and a delay that the next piece ends."""
        before, is_next_there = self._newest, threading.Event()
        if before is not None:
            before[1].set()

        def run() -> None:
            if before is not None:
                before[0].join()
            is_next_there.wait(delay_s)
            work()

        thread = threading.Thread(target=run, name="weights", daemon=True)
        thread.start()
        self._newest = thread, is_next_there


def register() -> None:
    """Register the engine and replace functions of vLLM; some processes call this more than once."""
    continue_answers()
    bind_stores()
    if current_platform.is_cpu():
        from hpcrl.engines.vllm.cpu_experts import enable_divided_experts

        enable_divided_experts()
    if PLUGIN_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(PLUGIN_NAME, VersionEngine)


def open_source(place: WorkerPlace) -> WeightSource:
    """Return the source of versions on a node: its window, else files."""
    window = WindowStore(make_window_key(place.campaign, node=place.node), job=place.job)
    return NewestSource(window, FileStore(place.campaign.weights))


class VersionEngine(WeightTransferEngine[VersionInitInfo, VersionUpdateInfo]):
    """The receiver of weights in one worker process of vLLM."""

    init_info_cls = VersionInitInfo
    update_info_cls = VersionUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        self._rank = int(parallel.data_parallel_index * parallel.world_size + parallel.rank)
        self._has_room = torch.device(device).type == "cpu" and vllm_config.quant_config is None
        """True if there is memory for two copies of the weights; the memory of a GPU is full of KV."""
        self._lora_config = vllm_config.lora_config
        self._adapters = None if self._lora_config is None else _outline_adapters(self.model_config)
        """Set if versions are adapters."""
        self._expected = _outline_weights(self.model_config) if self._lora_config is None else None
        self._source: tuple[WorkerPlace, WeightSource] | None = None
        """Kept open, since mapping a window again would delay generation."""
        self._background = UpdateThreads()
        self._ready: tuple[int, Callable[[], Any]] | None = None
        """A version that has been checked, and a function that makes the model use it, or returns its adapters."""
        self._reading = ExitStack()
        """Open while the prepared version is read from where the trainer stored it."""

    def init_transfer_engine(self, init_info: VersionInitInfo) -> None:
        """Start to prepare a version; the answer is written to a file."""
        self._background.run(lambda: self._prepare_and_report(init_info))

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` does it all."""

    def receive_weights(self, update_info: VersionUpdateInfo) -> None:
        """Use the version that is ready."""
        use = self._take_ready(update_info.version)
        with self._reading:
            use()

    def take_adapters(self, version: int) -> LoRAModel:
        """Return the adapters of the version that is ready, which are a copy."""
        found: LoRAModel = self._take_ready(version)()
        return found

    def _take_ready(self, version: int) -> Callable[[], Any]:
        ready, self._ready = self._ready, None
        if ready is None or ready[0] != version:
            raise WeightsError(f"version {version} cannot be loaded: it has not been prepared")
        return ready[1]

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has done it all."""

    def shutdown(self) -> None:
        """Discard the prepared version; a window is released with its last reader."""
        self._ready = None
        with suppress(WeightsError):  # it was overwritten, and is not needed any more
            self._reading.close()

    def _prepare_and_report(self, info: VersionInitInfo) -> None:
        """Prepare a version and write the answer."""
        self.shutdown()
        problem = ""
        try:
            self._ready = info.version, self._prepare_version(info)
        except WeightsError as error:
            problem = str(error)
        except Exception as error:  # the engine waits for an answer in any case
            log.exception("version %d cannot be prepared", info.version)
            problem = repr(error)
        publish_file(Path(f"{info.answer}.{self._rank}"), problem.encode())

    def _prepare_version(self, info: VersionInitInfo) -> Callable[[], Any]:
        """Check a version and return a function that uses it, or returns its adapters.

        WeightsError names the tensor that is damaged, missing, extra or of another shape.
        """
        with ExitStack() as reading:
            tensors = reading.enter_context(self._open_source(info).read_version(info.version))
            if self._adapters is not None:
                lora = make_lora_model(tensors, self._adapters, model=self.model, lora_config=self._lora_config)
                return lambda: lora
            if self._expected is not None:
                check_fit({name: make_outline(tensor.shape) for name, tensor in tensors.items()}, self._expected)
            if self._has_room:
                twin = ModelTwin(self.model)
                twin.fill(tensors.items(), model_config=self.model_config)
                return partial(self._use_twin, twin)
            self._reading = reading.pop_all()
            return partial(self._load_tensors, tensors)

    def _open_source(self, info: VersionInitInfo) -> WeightSource:
        campaign = CampaignDir(Path(info.campaign))
        place = WorkerPlace(campaign.job(info.job), os.environ.get(NODE_VARIABLE) or info.node)
        if self._source is None or self._source[0] != place:
            self._source = place, open_source(place)
        return self._source[1]

    def _use_twin(self, twin: ModelTwin) -> None:
        twin.take_over()
        self._background.run(twin.release_memory, delay_s=RELEASE_DELAY_S)

    def _load_tensors(self, tensors: Tensors) -> None:
        """Load from where the tensors are stored. After an error the layers are usable again, but of two versions."""
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(iter(tensors.items()))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)


def _make_empty_model(model_config: Any) -> Any:
    """Make transformers' model, without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config.hf_config)


def _outline_weights(model_config: Any) -> Tensors | None:
    """Return the names and shapes that the trainer publishes; None if transformers has no causal LM for the model."""
    try:
        model = _make_empty_model(model_config)
    except (ValueError, KeyError) as error:
        log.warning("versions are not compared with the model before they are loaded: %s", error)
        return None
    parameters = collect_parameters(model, read_stored_tensors(model, Path(model_config.model)))
    return {name: make_outline(parameter.shape) for name, parameter in parameters.items()}


def _outline_adapters(model_config: Any) -> AdapterOutline:
    """Return the adapters that the trainer publishes."""
    model = _make_empty_model(model_config)
    return AdapterOutline.from_model(model, read_stored_tensors(model, Path(model_config.model)))
