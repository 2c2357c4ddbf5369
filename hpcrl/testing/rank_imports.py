"""Imports and tables that every rank needs: the server of ranks imports this module before it forks any.

Megatron has torch compile small functions, such as the choice of experts. In tests that takes longer than all steps.
"""

import contextlib
import importlib
import os

from hpcrl.system.garbage import pause_collection

MODULES = ("hpcrl.trainers.torch", "transformers.models.qwen2.modeling_qwen2", "hpcrl.trainers.megatron.trainer")

os.environ["TORCHDYNAMO_DISABLE"] = "1"
with pause_collection(), contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen2")  # compiles hundreds of patterns
    for name in MODULES:
        importlib.import_module(name)
