"""A trainer's state on disk: shards of tensors by their canonical names, so that any parallelism can read them.

    StateShard          one shard of one tensor: a weight, or a part of the optimizer's state
    make_whole_shard    a shard that is the whole tensor
    list_local_shards   this rank's shard of a tensor
    write_state         write the shards of one rank to one file
    fill_shards         fill shards from the files of all ranks, however those are split
    read_whole_shapes   the names and shapes in the files
    check_same_shapes   refuse a checkpoint of another model
    STATE_FILE_PATTERN, MOMENTS_PATTERN   the names of the files of ranks: weights and the rest, and the rest alone
    state_file_name     the file name of a rank's weights
    moments_file_name   that of the state of its optimizer

The format is safetensors and JSON. (torch.distributed.checkpoint would do the same, but its metadata are a pickle.)
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpcrl.errors import TrainError
from hpcrl.weights.layout import TensorShard

WEIGHT_PART = "weight"
STATE_FILE_PATTERN = "state-*.safetensors"
MOMENTS_PATTERN = "state-*-moments.safetensors"


def state_file_name(rank: int) -> str:
    return f"state-{rank:05d}.safetensors"


def moments_file_name(rank: int) -> str:
    return f"state-{rank:05d}-moments.safetensors"


class StateShard(NamedTuple):
    """A shard of a tensor."""

    part: str
    """The name `weight`, or the optimizer's name."""
    shard: TensorShard
    whole_shape: tuple[int, ...]
    """The shape of the whole tensor."""
    tensor: Tensor

    def copy_to_cpu(self, moments_dtype: torch.dtype = torch.float32) -> "StateShard":
        """Return a copy on the CPU, which the next step does not change; moments of the optimizer in this precision."""
        tensor = self.tensor.detach()
        is_moment = self.part != WEIGHT_PART and tensor.dtype == torch.float32 and bool(self.whole_shape)
        dtype = moments_dtype if is_moment else tensor.dtype
        return self._replace(tensor=tensor.to("cpu", dtype, copy=True).contiguous())


class _StoredShard(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one shard in a file."""

    part: str
    shard: TensorShard
    whole: tuple[int, ...]


def make_whole_shard(name: str, tensor: Tensor, *, part: str = WEIGHT_PART) -> StateShard:
    """Make a shard that is the whole tensor."""
    shape = tuple(tensor.shape)
    return StateShard(part, TensorShard(name=name, start=(0,) * len(shape), shape=shape), shape, tensor)


def list_local_shards(name: str, tensor: Tensor, *, part: str) -> Iterator[StateShard]:
    """Yield this rank's shard of a tensor, unless it is empty."""
    if not isinstance(tensor, DTensor):
        yield make_whole_shard(name, tensor, part=part)
        return
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if local.numel():
        shard = TensorShard(name=name, start=tuple(map(int, start)), shape=tuple(map(int, shape)))
        yield StateShard(part, shard, tuple(tensor.shape), local)


def write_state(state_shards: Iterable[StateShard], path: Path) -> None:
    """Write all shards of one rank to one file."""
    tensors, stored = {}, []
    for number, state_shard in enumerate(state_shards):
        tensors[str(number)] = state_shard.tensor.detach().cpu().contiguous()
        stored.append(_StoredShard(part=state_shard.part, shard=state_shard.shard, whole=state_shard.whole_shape))
    try:
        save_file(tensors, path, metadata={"pieces": msgspec.json.encode(stored).decode()})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path.name}: {error}") from error


def read_whole_shapes(directory: Path) -> dict[tuple[str, str], tuple[int, ...]]:
    """Read the shapes of the whole tensors, by part and name."""
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for path in _list_state_files(directory):
        with _open_state_file(path) as file:
            shapes |= {(stored.part, stored.shard.name): stored.whole for stored in _read_stored_shards(file)}
    return shapes


def fill_shards(state_shards: Sequence[StateShard], directory: Path) -> None:
    """Copy the stored values into these tensors; TrainError if any value is missing."""
    wanted: dict[tuple[str, str], list[StateShard]] = {}
    for state_shard in state_shards:
        wanted.setdefault((state_shard.part, state_shard.shard.name), []).append(state_shard)
    missing = {id(state_shard): state_shard.tensor.numel() for state_shard in state_shards}
    only_weights = all(part == WEIGHT_PART for part, _ in wanted)
    for path in _list_state_files(directory):
        if only_weights and path.match(MOMENTS_PATTERN):
            continue
        with _open_state_file(path) as file:
            for number, stored in enumerate(_read_stored_shards(file)):
                for state_shard in wanted.get((stored.part, stored.shard.name), ()):
                    missing[id(state_shard)] -= _copy_overlap(
                        state_shard, stored.shard, file.get_slice(str(number)), file, number
                    )
    for state_shard in state_shards:
        if missing[id(state_shard)] > 0:
            raise TrainError(
                f"{directory}: {missing[id(state_shard)]} values of {state_shard.shard.name!r} ({state_shard.part}) "
                "are in no file of this checkpoint: resume from an older one"
            )


def _copy_overlap(state_shard: StateShard, stored: TensorShard, view: Any, file: Any, number: int) -> int:
    """Copy the overlap of two shards and return its number of values."""
    own = state_shard.shard
    if not own.shape:
        state_shard.tensor.copy_(file.get_tensor(str(number)))
        return 1
    low = [max(a, b) for a, b in zip(own.start, stored.start, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(own.start, own.shape, stored.start, stored.shape, strict=True)]
    if any(first >= last for first, last in zip(low, high, strict=True)):
        return 0
    stored_slices = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, stored.start, strict=True))
    own_slices = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, own.start, strict=True))
    common = view[stored_slices]
    state_shard.tensor[own_slices].copy_(common)
    return int(common.numel())


def _list_state_files(directory: Path) -> list[Path]:
    found = sorted(directory.glob(STATE_FILE_PATTERN))
    if not found:
        raise TrainError(f"{directory} holds no trainer state ({STATE_FILE_PATTERN}): resume from another checkpoint")
    return found


def _open_state_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{path} cannot be read: {error}: resume from an older checkpoint") from error


def _read_stored_shards(file: Any) -> list[_StoredShard]:
    described = (file.metadata() or {}).get("pieces", "[]")
    return msgspec.json.decode(described, type=list[_StoredShard])


def check_same_shapes(
    saved: dict[tuple[str, str], tuple[int, ...]], expected: dict[str, tuple[int, ...]], path: Path
) -> None:
    """Raise TrainError with the first weight in which checkpoint and model differ."""
    saved_weights = {name: shape for (part, name), shape in saved.items() if part == WEIGHT_PART}
    for wrong in _find_differences(saved_weights, expected):
        raise TrainError(
            f"{path}: its tensors are not those of this model ({wrong}): "
            "resume with the model that the campaign started from"
        )


def _find_differences(saved: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> Iterator[str]:
    for name in sorted(saved.keys() | expected.keys()):
        if name not in saved or name not in expected:
            yield f"{name!r} is only in {'the checkpoint' if name in saved else 'the model'}"
        elif saved[name] != expected[name]:
            yield f"{name!r} is {saved[name]} in the checkpoint and {expected[name]} in the model"
