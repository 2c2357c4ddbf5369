"""KV outside the running batch: packed for another engine, held until it is fetched, or kept for the next turn.

    RowKv               the KV of one token sequence
    pack_kv, unpack_kv  to bytes and back
    HandoverStore       finished prefills until their decode engine fetches them, once
    PrefixCache         KV of finished turns, found by the tokens that the next turn starts with

Legend: K keys and values of all layers (2 * layers), H KV heads, T tokens, D head size, L layers with experts.
"""

import secrets
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from hpcrl.errors import EngineError


@dataclass(frozen=True, eq=False)
class RowKv:
    """The KV of one token sequence."""

    token_ids: list[int]
    kv_KHTD: torch.Tensor
    version: int
    """The version of the weights that computed it."""
    experts_TLK: NDArray[Any] | None = None
    """The experts of the tokens, in an engine that records them."""

    @property
    def num_bytes(self) -> int:
        return int(self.kv_KHTD.nbytes + (0 if self.experts_TLK is None else self.experts_TLK.nbytes))


def pack_kv(kv: RowKv) -> bytes:
    """Return KV as a safetensors file, with its tokens, by which the receiver identifies it."""
    tensors = {
        "kv": kv.kv_KHTD.cpu().contiguous(),
        "token_ids": torch.tensor(kv.token_ids, dtype=torch.int32),
        "version": torch.tensor(kv.version),
    }
    if kv.experts_TLK is not None:
        tensors["experts"] = torch.from_numpy(kv.experts_TLK)
    return bytes(save(tensors))


def unpack_kv(data: bytes) -> RowKv:
    """Read KV that another process sent; raises EngineError if it is torn, of another format, or not finite."""
    try:
        tensors = load(data)
        kv_KHTD, token_ids, version = tensors["kv"], tensors["token_ids"].tolist(), int(tensors["version"])
        experts_TLK = tensors["experts"].numpy() if "experts" in tensors else None
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise EngineError(
            f"handed-over KV of {len(data)} bytes cannot be read: {type(error).__name__}: {error}"
        ) from None
    if kv_KHTD.dim() != 4 or kv_KHTD.shape[2] != len(token_ids):
        raise EngineError(f"handed-over KV has shape {tuple(kv_KHTD.shape)} for {len(token_ids)} tokens")
    if not kv_KHTD.isfinite().all():
        raise EngineError("handed-over KV holds NaN or infinity")
    if experts_TLK is not None and len(experts_TLK) != len(token_ids):
        raise EngineError(f"handed-over KV has the experts of {len(experts_TLK)} of {len(token_ids)} tokens")
    return RowKv(token_ids=token_ids, kv_KHTD=kv_KHTD, version=version, experts_TLK=experts_TLK)


class HandoverStore:
    """Finished prefills; each is kept until it is taken, `ttl_s` have passed, or newer ones need the room."""

    def __init__(self, *, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._max_bytes, self._clock = ttl_s, max_bytes, clock
        self._held: OrderedDict[str, tuple[float, RowKv]] = OrderedDict()
        self._num_bytes = 0

    def put(self, kv: RowKv) -> str:
        """Store `kv`; returns the name to fetch it by, which cannot be guessed."""
        name = secrets.token_urlsafe(16)
        self._held[name] = (self._clock() + self._ttl_s, kv)
        self._num_bytes += kv.num_bytes
        self._drop_old()
        return name

    def take(self, name: str) -> RowKv | None:
        """Remove and return the KV of that name."""
        self._drop_old()
        return self._remove(name) if name in self._held else None

    def clear(self) -> None:
        """Drop all KV: whoever needs it computes it."""
        self._held.clear()
        self._num_bytes = 0

    def _drop_old(self) -> None:
        while self._held:
            name, (expires, _) = next(iter(self._held.items()))
            if expires > self._clock() and self._num_bytes <= self._max_bytes:
                return
            self._remove(name)

    def _remove(self, name: str) -> RowKv:
        _, kv = self._held.pop(name)
        self._num_bytes -= kv.num_bytes
        return kv


class PrefixCache:
    """The KV of finished turns; the next turn of a trajectory starts with one of them.

    The least recently used is evicted first, but KV that should still be kept only after all other.
    """

    def __init__(self, *, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._kept: OrderedDict[bytes, RowKv] = OrderedDict()
        self._keep_until: dict[bytes, float] = {}
        self._lengths: Counter[int] = Counter()
        self._num_bytes = 0

    def put(self, kv: RowKv, *, keep_s: float = 0.0) -> None:
        """Store `kv`, to be kept for `keep_s` if there is room."""
        key = _make_key(kv.token_ids)
        if key in self._kept:
            self._remove(key)
        self._kept[key], self._keep_until[key] = kv, self._clock() + keep_s
        self._lengths[len(key)] += 1
        self._num_bytes += kv.num_bytes
        while self._num_bytes > self._max_bytes:
            now = self._clock()
            expired = (key for key in self._kept if self._keep_until[key] <= now)
            self._remove(next(expired, next(iter(self._kept))))

    def find_longest(self, token_ids: list[int]) -> RowKv | None:
        """Return the KV of the longest stored sequence that `token_ids` starts with."""
        key = _make_key(token_ids)
        for length in sorted((n for n in self._lengths if n <= len(key)), reverse=True):
            if (kv := self._kept.get(key[:length])) is not None:
                self._kept.move_to_end(key[:length])
                return kv
        return None

    def clear(self) -> None:
        self._kept.clear()
        self._keep_until.clear()
        self._lengths.clear()
        self._num_bytes = 0

    def _remove(self, key: bytes) -> None:
        self._num_bytes -= self._kept.pop(key).num_bytes
        del self._keep_until[key]
        self._lengths[len(key)] -= 1
        if not self._lengths[len(key)]:
            del self._lengths[len(key)]


def _make_key(token_ids: list[int]) -> bytes:
    return array("i", token_ids).tobytes()
