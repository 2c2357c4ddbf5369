"""Megatron-core, which is looked for without an import of it: that takes seconds, and only its ranks need it."""

from importlib.util import find_spec

import pytest


def skip_without_megatron() -> None:
    """Skip a test, or a module of tests, where megatron-core is not installed."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        pytest.skip("needs megatron-core", allow_module_level=True)
