"""A trainer's state on disk: boxes of tensors by their canonical names, so that any parallelism reads any other's.

    Piece    one box of one tensor: a weight, or a part of the optimizer's state
    write    the pieces of one rank, in one file
    fill     pieces from the files of all ranks, whatever boxes those hold
    wholes   names and shapes of what the files hold

safetensors and JSON. (torch.distributed.checkpoint would do the same, but its metadata are a pickle.)
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hpcrl.errors import TrainError
from hpcrl.weights.layout import Shard

WEIGHT = "weight"
STATE_FILES = "state-*.safetensors"


def state_file(rank: int) -> str:
    return f"state-{rank:05d}.safetensors"


class Piece(NamedTuple):
    """A box of a tensor."""

    part: str
    """`weight`, or what the optimizer calls it."""
    shard: Shard
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    tensor: Tensor

    def copied(self) -> "Piece":
        """On the CPU, apart from what the next step changes."""
        return self._replace(tensor=self.tensor.detach().to("cpu", copy=True).contiguous())


class _Noted(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of one of its pieces."""

    part: str
    shard: Shard
    whole: tuple[int, ...]


def whole_piece(name: str, tensor: Tensor, *, part: str = WEIGHT) -> Piece:
    """A piece that is the whole tensor."""
    shape = tuple(tensor.shape)
    return Piece(part, Shard(name=name, start=(0,) * len(shape), shape=shape), shape, tensor)


def write(pieces: Iterable[Piece], path: Path) -> None:
    """All pieces of one rank."""
    tensors, noted = {}, []
    for number, piece in enumerate(pieces):
        tensors[str(number)] = piece.tensor.detach().cpu().contiguous()
        noted.append(_Noted(part=piece.part, shard=piece.shard, whole=piece.whole))
    try:
        save_file(tensors, path, metadata={"pieces": msgspec.json.encode(noted).decode()})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path.name}: {error}") from error


def wholes(directory: Path) -> dict[tuple[str, str], tuple[int, ...]]:
    """Shapes of the whole tensors that are there, by part and name."""
    return {(noted.part, noted.shard.name): noted.whole for path in _files(directory) for noted in _noted(path)}


def fill(pieces: Sequence[Piece], directory: Path) -> None:
    """Copy what the files hold into these tensors; TrainError if a value of one of them is nowhere."""
    wanted: dict[tuple[str, str], list[Piece]] = {}
    for piece in pieces:
        wanted.setdefault((piece.part, piece.shard.name), []).append(piece)
    missing = {id(piece): piece.tensor.numel() for piece in pieces}
    for path in _files(directory):
        with _opened(path) as file:
            for number, noted in enumerate(_noted(path)):
                for piece in wanted.get((noted.part, noted.shard.name), ()):
                    missing[id(piece)] -= _copy_common(piece, noted.shard, file.get_slice(str(number)), file, number)
    for piece in pieces:
        if missing[id(piece)] > 0:
            raise TrainError(
                f"{directory}: {missing[id(piece)]} values of {piece.shard.name!r} ({piece.part}) are in no file of "
                "this checkpoint: resume from an older one"
            )


def _copy_common(piece: Piece, held: Shard, view: Any, file: Any, number: int) -> int:
    """Copy the box that two boxes have in common; how many values that is."""
    mine = piece.shard
    if not mine.shape:
        piece.tensor.copy_(file.get_tensor(str(number)))
        return 1
    low = [max(a, b) for a, b in zip(mine.start, held.start, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(mine.start, mine.shape, held.start, held.shape, strict=True)]
    if any(first >= last for first, last in zip(low, high, strict=True)):
        return 0
    there = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, held.start, strict=True))
    here = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, mine.start, strict=True))
    common = view[there]
    piece.tensor[here].copy_(common)
    return int(common.numel())


def _files(directory: Path) -> list[Path]:
    found = sorted(directory.glob(STATE_FILES))
    if not found:
        raise TrainError(f"{directory} holds no trainer state ({STATE_FILES}): resume from another checkpoint")
    return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{path} cannot be read: {error}: resume from an older checkpoint") from error


def _noted(path: Path) -> list[_Noted]:
    with _opened(path) as file:
        described = (file.metadata() or {}).get("pieces", "[]")
    return msgspec.json.decode(described, type=list[_Noted])


def check_same(saved: dict[tuple[str, str], tuple[int, ...]], mine: dict[str, tuple[int, ...]], path: Path) -> None:
    """TrainError naming the first weight in which checkpoint and model differ."""
    there = {name: shape for (part, name), shape in saved.items() if part == WEIGHT}
    for wrong in _differences(there, mine):
        raise TrainError(
            f"{path}: its tensors are not those of this model ({wrong}): "
            "resume with the model that the campaign began with"
        )


def _differences(saved: dict[str, tuple[int, ...]], mine: dict[str, tuple[int, ...]]) -> Iterator[str]:
    for name in sorted(saved.keys() | mine.keys()):
        if name not in saved or name not in mine:
            yield f"{name!r} is only in {'the checkpoint' if name in saved else 'the model'}"
        elif saved[name] != mine[name]:
            yield f"{name!r} is {saved[name]} there and {mine[name]} here"


def whole_tensors(directory: Path, *, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Every weight that the files hold, whole, on the CPU."""
    saved = {name: shape for (part, name), shape in wholes(directory).items() if part == WEIGHT}
    chosen = list(saved if names is None else names)
    pieces = [whole_piece(name, torch.empty(saved[name])) for name in chosen]
    fill(pieces, directory)
    return {piece.shard.name: piece.tensor for piece in pieces}
