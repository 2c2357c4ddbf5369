"""Imports and tables that every rank needs: the server of ranks imports this module before it forks any.

Megatron has torch compile small functions, such as the choice of experts. In tests that takes longer than all steps.
"""

import contextlib
import gc
import importlib
import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"

gc.disable()  # imports make little garbage
for _name in (
    "hpcrl.trainers.torch",
    "transformers.models.qwen2.modeling_qwen2",
    "hpcrl.trainers.megatron.trainer",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen2")  # compiles hundreds of patterns
gc.enable()
