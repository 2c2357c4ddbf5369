"""Weights for vLLM, by its own means: a weight-transfer engine named "hpcrl", found through an entry point.

vLLM calls `register` in each of its processes. Its workers then map the window of their node, or read files, as the
embedded engine does; vLLM's own loader cuts out what a tensor-parallel rank wants. An update has two halves:

    /init_weight_transfer_engine    begin to make a version ready, in a thread beside the one that generates: is it
                                    whole, does it fit? On CPUs it is also loaded, into a twin of the model
    /hpcrl/switch                   between pause and resume: use it (hpcrl.engines.vllm.weight_route)

so that whatever is wrong with a version is found while the old one is still in use, and generation stands still for
as little as can be.
"""

import logging
import threading
import time
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
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.engines.vllm.weight_twin import ModelTwin
from hpcrl.errors import WeightsError
from hpcrl.system.files import publish_file
from hpcrl.weights.file_store import FileStore
from hpcrl.weights.model_update import check_fit, collect_parameters
from hpcrl.weights.store import NewestSource, Tensors, WeightSource
from hpcrl.weights.window.file import make_window_key
from hpcrl.weights.window_store import WindowStore

PLUGIN_NAME = "hpcrl"
RELEASE_DELAY_S = 1.0
"""How long the memory of the version before is left alone: running requests are computed anew first."""
log = logging.getLogger("vllm.hpcrl")


@dataclass
class VersionInitInfo(WeightTransferInitInfo):
    """Where versions are, which one is going to be loaded, and where to say that it can be."""

    campaign: str
    job: int
    node: str
    version: int
    answer: str
    """Rank R leaves a file ANSWER.R when it is done: empty, or what is wrong with the version."""


@dataclass
class VersionUpdateInfo(WeightTransferUpdateInfo):
    """Which version to load."""

    version: int


def register() -> None:
    """The entry point; vLLM calls it more than once in some processes."""
    if PLUGIN_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(PLUGIN_NAME, VersionEngine)


def open_source(place: WorkerPlace) -> WeightSource:
    """Where the engines of a node find versions: in its window, else in files."""
    window = WindowStore(make_window_key(place.campaign, node=place.node), job=place.job)
    return NewestSource(window, FileStore(place.campaign.weights))


class VersionEngine(WeightTransferEngine[VersionInitInfo, VersionUpdateInfo]):
    """The end of the weight plane in one worker process of vLLM."""

    init_info_cls = VersionInitInfo
    update_info_cls = VersionUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._rank = int(vllm_config.parallel_config.rank)
        self._has_room = torch.device(device).type == "cpu" and vllm_config.quant_config is None
        """For weights twice over; a GPU's memory is full of KV."""
        self._expected = _outline_model(self.model_config.hf_config)
        self._source: tuple[WorkerPlace, WeightSource] | None = None
        """A window that is mapped already is not mapped again: that holds up whoever generates."""
        self._newest_thread: threading.Thread | None = None
        """The newest of those that work beside the one that generates; each waits for the one before."""
        self._ready: tuple[int, Callable[[], None]] | None = None
        """A version that was found good, and what makes the model compute with it."""
        self._reading = ExitStack()
        """Open for as long as what is ready lies where the trainer left it."""

    def init_transfer_engine(self, init_info: VersionInitInfo) -> None:
        """Begin to make a version ready; the answer comes in a file."""
        self._run_in_background(lambda: self._prepare_and_report(init_info))

    def start_weight_update(self) -> None:
        """Nothing: all is done in one go, when the version is ready."""

    def receive_weights(self, update_info: VersionUpdateInfo) -> None:
        """Use the version that is ready."""
        ready, self._ready = self._ready, None
        if ready is None or ready[0] != update_info.version:
            raise WeightsError(f"version {update_info.version} cannot be loaded: it was not made ready before")
        with self._reading:
            ready[1]()

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` has finished."""

    def shutdown(self) -> None:
        """Forget what is ready; a window is let go with its last reader."""
        self._ready = None
        with suppress(WeightsError):  # it was overwritten, and nobody wants it
            self._reading.close()

    def _run_in_background(self, work: Callable[[], None]) -> None:
        """In a thread, when the work before it is done; no nicer than others, or it would be sent away with the GIL."""
        previous = self._newest_thread

        def run() -> None:
            if previous is not None:
                previous.join()
            work()

        self._newest_thread = threading.Thread(target=run, name="weights", daemon=True)
        self._newest_thread.start()

    def _prepare_and_report(self, info: VersionInitInfo) -> None:
        """Make a version ready and say so."""
        self.shutdown()
        problem = ""
        try:
            self._ready = info.version, self._prepare_version(info)
        except WeightsError as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the other end waits for an answer
            log.exception("version %d cannot be made ready", info.version)
            problem = repr(error)
        publish_file(Path(f"{info.answer}.{self._rank}"), problem.encode())

    def _prepare_version(self, info: VersionInitInfo) -> Callable[[], None]:
        """WeightsError names the tensor that is damaged, missing, extra or of another shape."""
        with ExitStack() as reading:
            tensors = reading.enter_context(self._open_source(info).read_version(info.version))
            if self._expected is not None:
                check_fit({name: _make_outline(tensor) for name, tensor in tensors.items()}, self._expected)
            if self._has_room:
                twin = ModelTwin(self.model)
                twin.fill(tensors.items(), model_config=self.model_config)
                return partial(self._use_twin, twin)
            self._reading = reading.pop_all()
            return partial(self._load_tensors, tensors)

    def _open_source(self, info: VersionInitInfo) -> WeightSource:
        run = CampaignDir(Path(info.campaign))
        place = WorkerPlace(run, run.job(info.job), info.node)
        if self._source is None or self._source[0] != place:
            self._source = place, open_source(place)
        return self._source[1]

    def _use_twin(self, twin: ModelTwin) -> None:
        def release_memory() -> None:
            time.sleep(RELEASE_DELAY_S)
            twin.release_memory()

        twin.take_over()
        self._run_in_background(release_memory)

    def _load_tensors(self, tensors: Tensors) -> None:
        """From where they lie. Whatever goes wrong, the layers are whole again, but of two versions."""
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(iter(tensors.items()))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)


def _outline_model(hf_config: Any) -> Tensors | None:
    """Names and shapes of what the trainer publishes; None for a model that transformers has no causal LM for."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
    except (ValueError, KeyError) as error:
        log.warning("versions are not compared with the model before they are loaded: %s", error)
        return None
    return {name: _make_outline(parameter) for name, parameter in collect_parameters(model).items()}


def _make_outline(tensor: torch.Tensor) -> torch.Tensor:
    """Its shape alone: vLLM converts to the type that the engine computes in."""
    return torch.empty(tensor.shape, dtype=torch.float32, device="meta")
