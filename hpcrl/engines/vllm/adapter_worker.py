"""The switch to new adapters in vLLM's worker processes, where versions are adapters.

AdapterWorker   the base class that vLLM adds to its worker
make_request    the description of the adapters for vLLM: always the same, since a version replaces the one before

vLLM applies the adapters to each request that names them, without changing its weights. It would load them from a
directory; here they are in memory already, checked by the weight-transfer engine.
"""

from typing import Any

from vllm.lora.request import LoRARequest

from hpcrl.engines.vllm.adapter_model import ADAPTER_ID
from hpcrl.engines.vllm.protocol import ADAPTERS_MODEL


class AdapterWorker:
    """The methods that vLLM's worker gets."""

    weight_transfer_engine: Any
    model_runner: Any

    def use_adapters(self, version: int) -> None:
        """Use the adapters that are ready, for all requests, between two steps."""
        lora = self.weight_transfer_engine.take_adapters(version)
        cache = self.model_runner.lora_manager
        cache._load_adapter = lambda _: lora  # called again if vLLM has emptied its cache, as idle copies do
        cache.remove_adapter(ADAPTER_ID)
        cache.add_adapter(make_request())


def make_request() -> LoRARequest:
    """Return the description of the adapters for vLLM."""
    return LoRARequest(lora_name=ADAPTERS_MODEL, lora_int_id=ADAPTER_ID, lora_path=ADAPTERS_MODEL)
