"""Weights for vLLM, by its own means: a weight-transfer engine named "hpcrl", found through an entry point.

vLLM calls `register` in each of its processes. Its workers then map the window of their node, or read files, as the
embedded engine does; vLLM's own loader cuts out what a tensor-parallel rank wants. An update has two halves:

    /init_weight_transfer_engine    look at a version while tokens are generated: is it whole, does it fit?
    /update_weights                 between pause and resume: load it

so that whatever is wrong with a version is found while the old one is still in use.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hpcrl.errors import WeightsError
from hpcrl.rundir import JobDir, RunDir
from hpcrl.weights.fit import check_fit, parameters_of
from hpcrl.weights.store import FileStore, Newest, Tensors, WeightSource, WindowStore
from hpcrl.weights.window import window_key

NAME = "hpcrl"
log = logging.getLogger("vllm.hpcrl")


@dataclass
class Look(WeightTransferInitInfo):
    """Where versions are, and which one is going to be loaded."""

    campaign: str
    job: int
    node: str
    version: int


@dataclass
class Load(WeightTransferUpdateInfo):
    """Which version to load."""

    version: int


def register() -> None:
    """The entry point; vLLM calls it more than once in some processes."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, VersionEngine)


def source_of(campaign: Path, *, job: int, node: str) -> WeightSource:
    """Where the engines of a node find versions: in its window, else in files."""
    run = RunDir(campaign)
    window = WindowStore(window_key(run, node=node), job=JobDir(run.job(job).root))
    return Newest(window, FileStore(run.weights))


class VersionEngine(WeightTransferEngine[Look, Load]):
    """The end of the weight plane in one worker process of vLLM."""

    init_info_cls = Look
    update_info_cls = Load
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._source: WeightSource | None = None
        self._where: tuple[str, int, str] | None = None
        self._expected = _expected(self.model_config.hf_config)

    def init_transfer_engine(self, init_info: Look) -> None:
        """Look at a version: WeightsError names the tensor that is damaged, missing, extra or of another shape."""
        where = (init_info.campaign, init_info.job, init_info.node)
        if where != self._where:
            self._source = source_of(Path(init_info.campaign), job=init_info.job, node=init_info.node)
            self._where = where
        assert self._source is not None
        with self._source.reading(init_info.version) as tensors:
            self._check(tensors)

    def start_weight_update(self) -> None:
        """Nothing: the layers are taken apart and put together again in one go, when the tensors are at hand."""

    def receive_weights(self, update_info: Load) -> None:
        """Load a version; whatever goes wrong from here on, the layers are whole again, but of two versions."""
        if self._source is None:
            raise WeightsError(f"version {update_info.version} cannot be loaded: it was not looked at before")
        with self._source.reading(update_info.version) as tensors:
            self._check(tensors)
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(iter(tensors.items()))
            finally:
                finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` has finished."""

    def shutdown(self) -> None:
        """Forget the source; a window is let go with its last reader."""
        self._source = self._where = None

    def _check(self, tensors: Tensors) -> None:
        if self._expected is not None:
            check_fit({name: _outline(tensor) for name, tensor in tensors.items()}, self._expected)


def _expected(hf_config: Any) -> Tensors | None:
    """Names and shapes of what the trainer publishes; None for a model that transformers has no causal LM for."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
    except (ValueError, KeyError) as error:
        log.warning("versions are not compared with the model before they are loaded: %s", error)
        return None
    return {name: _outline(parameter) for name, parameter in parameters_of(model).items()}


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    """Its shape alone: vLLM converts to the type that the engine computes in."""
    return torch.empty(tensor.shape, dtype=torch.float32, device="meta")
