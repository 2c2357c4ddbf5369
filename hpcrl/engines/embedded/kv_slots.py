"""KV of the running rows: one slot per row, one column per position; the model writes into it in place.

    KvShape, probe_kv_shape  the shape of a model's KV
    KvSlots                  the memory
    name_cache_argument      how a model's forward names it

Rows start at column 0, so nothing moves when rows join or grow, and the causal mask is a comparison of column
numbers. Columns to the right of a row's last token hold old values, which are finite and masked.

Legend: K keys and values of all layers (2 * layers), S slots, H KV heads, T columns, D head size, B rows,
Q new tokens of a row.
"""

import inspect
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from hpcrl.errors import EngineError


class KvShape(NamedTuple):
    """The shape and type of the KV of a model."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def has_shape_of(self, kv_KHTD: torch.Tensor) -> bool:
        K, H, _, D = kv_KHTD.shape
        return (K, H, D, kv_KHTD.dtype) == (2 * self.num_layers, self.num_heads, self.head_dim, self.dtype)


def name_cache_argument(module: Any) -> str:
    """Return the name under which a model takes its KV: releases of transformers 5 after 5.19 renamed it."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def probe_kv_shape(model: Any) -> KvShape:
    """Return the shape of a model's KV, found by running one token; for any architecture with full attention."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise EngineError(
            f"model {model.config.model_type!r} has layers of kind {', '.join(sorted(kinds))}: the embedded engine "
            "supports full attention only; choose another model or engine.backend"
        )
    cache = DynamicCache()
    with torch.inference_mode():
        ids_11 = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model(input_ids=ids_11, use_cache=True, **{name_cache_argument(model): cache})
    shapes = {tuple(t.shape) for layer in cache.layers for t in (layer.keys, layer.values)}
    if len(shapes) != 1:
        raise EngineError(
            f"model {model.config.model_type!r} has KV of several shapes {sorted(shapes)}: choose another model or "
            "engine.backend"
        )
    _, num_heads, _, head_dim = shapes.pop()
    keys = cache.layers[0].keys
    return KvShape(len(cache.layers), num_heads, head_dim, keys.dtype, keys.device)


class KvSlots:
    """A block of memory that grows by doubling and never shrinks."""

    def __init__(self, shape: KvShape) -> None:
        self.shape = shape
        self._kv_KSHTD = self._zeros(num_slots=0, num_columns=0)

    def reserve(self, *, num_slots: int, num_columns: int) -> None:
        """Make room for `num_slots` rows of `num_columns` tokens."""
        old_KSHTD = self._kv_KSHTD
        _, S, _, T, _ = old_KSHTD.shape
        if num_slots <= S and num_columns <= T:
            return
        self._kv_KSHTD = self._zeros(
            num_slots=S if num_slots <= S else max(num_slots, 2 * S),
            num_columns=T if num_columns <= T else max(num_columns, 2 * T),
        )
        self._kv_KSHTD[:, :S, :, :T] = old_KSHTD

    def put(self, slot: int, kv_KHTD: torch.Tensor) -> None:
        self._kv_KSHTD[:, slot, :, : kv_KHTD.shape[2]] = kv_KHTD

    def copy_slot(self, slot: int, length: int) -> torch.Tensor:
        return self._kv_KSHTD[:, slot, :, :length].clone()

    def move(self, *, source: int, target: int, length: int) -> None:
        self._kv_KSHTD[:, target, :, :length] = self._kv_KSHTD[:, source, :, :length]

    def wipe(self) -> None:
        """Delete all KV: an old value that is not finite would spoil the result even if it is masked."""
        self._kv_KSHTD = self._zeros(num_slots=0, num_columns=0)

    def make_cache(self, *, first: int, num_rows: int, columns_BQ: torch.Tensor, width: int) -> Cache:
        """Return a view for transformers that writes new tokens of the rows from slot `first` to `columns_BQ`.

        One row of columns is used for all rows.
        """
        kv_KBHTD = self._kv_KSHTD[:, first : first + num_rows, :, :width]
        pairs = zip(kv_KBHTD[0::2], kv_KBHTD[1::2], strict=True)
        return Cache(layers=[_SlotLayer(keys, values, columns_BQ) for keys, values in pairs])

    def _zeros(self, *, num_slots: int, num_columns: int) -> torch.Tensor:
        num_layers, H, D, dtype, device = self.shape
        return torch.zeros(2 * num_layers, num_slots, H, num_columns, D, dtype=dtype, device=device)


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of some slots, as transformers' attention updates it."""

    def __init__(self, keys_BHTD: torch.Tensor, values_BHTD: torch.Tensor, columns_BQ: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._columns_BQ = keys_BHTD, values_BHTD, columns_BQ
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns_BQ = self._columns_BQ
        if len(columns_BQ) == 1:  # the same for all rows: the last ones, since the width ends with them
            Q = columns_BQ.shape[1]
            self.keys[:, :, -Q:] = key_states
            self.values[:, :, -Q:] = value_states
        else:
            rows_B1 = torch.arange(len(columns_BQ), device=columns_BQ.device)[:, None]
            self.keys[rows_B1, :, columns_BQ] = key_states.transpose(1, 2)
            self.values[rows_B1, :, columns_BQ] = value_states.transpose(1, 2)
        return self.keys, self.values
