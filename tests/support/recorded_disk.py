"""Record the disk operations of a writer, and replay what a power cut could leave of them.

All that was fsynced is there, and any part of the rest. Data that were not fsynced are complete, torn or zero; a new
name that was not made durable by an fsync of its directory exists or not, independently of the others.
"""

import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECTOR = 512


@dataclass(frozen=True)
class Create:
    name: str
    file: int


@dataclass(frozen=True)
class Write:
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Rename:
    old: str
    new: str
    file: int


@dataclass(frozen=True)
class Sync:
    file: int | None
    """The file, or None for the directory."""


@dataclass(frozen=True)
class Acknowledge:
    """The ids that the writer reported as durable."""

    ids: tuple[str, ...]


@dataclass
class Recording:
    """The operations in one directory, in order."""

    directory: Path
    operations: list[Any] = field(default_factory=list)
    _files: dict[str, int] = field(default_factory=dict)
    _open: dict[int, int | None] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def patch(self, monkeypatch: Any) -> None:
        """Record the calls of `os` that writers make."""
        for name in ("open", "close", "write", "pwritev", "fsync", "rename"):
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name)))

    def acknowledge(self, ids: list[str]) -> None:
        with self._lock:
            self.operations.append(Acknowledge(tuple(ids)))

    def _recording(self, name: str, call: Any) -> Any:
        def recording(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                result = call(*args, **kwargs)
                getattr(self, f"_record_{name}")(result, *args)
                return result

        return recording

    def _record_open(self, fd: int, path: Any, *_: Any) -> None:
        path = Path(os.fspath(path))
        if path == self.directory:
            self._open[fd] = None
        elif path.parent == self.directory:
            if path.name not in self._files:
                self._files[path.name] = len(self.operations)
                self.operations.append(Create(path.name, self._files[path.name]))
            self._open[fd] = self._files[path.name]

    def _record_close(self, _: None, fd: int) -> None:
        self._open.pop(fd, None)

    def _record_write(self, num: int, fd: int, data: bytes) -> None:
        file = self._open.get(fd)
        if file is not None:
            end = sum(len(op.data) for op in self.operations if isinstance(op, Write) and op.file == file)
            self.operations.append(Write(file, end, bytes(data[:num])))

    def _record_pwritev(self, num: int, fd: int, buffers: Any, offset: int) -> None:
        file = self._open.get(fd)
        if file is not None:
            self.operations.append(Write(file, offset, b"".join(buffers)[:num]))

    def _record_fsync(self, _: None, fd: int) -> None:
        if fd in self._open:
            self.operations.append(Sync(self._open[fd]))

    def _record_rename(self, _: None, old: Any, new: Any) -> None:
        old, new = Path(old), Path(new)
        if old.parent == self.directory:
            file = self._files.pop(old.name)
            self._files[new.name] = file
            self.operations.append(Rename(old.name, new.name, file))


def after_power_loss(operations: list[Any], target: Path, rng: random.Random) -> None:
    """Fill `target` with what could be left after a power cut after `operations`."""
    names: dict[str, int] = {}
    contents: dict[int, bytearray] = {}
    for number, operation in enumerate(operations):
        later = operations[number + 1 :]
        match operation:
            case Create(name=name, file=file) if Sync(None) in later or rng.random() < 0.5:
                names[name] = file
            case Rename(old=old, new=new, file=file) if Sync(None) in later or rng.random() < 0.5:
                names.pop(old, None)
                names[new] = file
            case Write(file=file, offset=offset, data=data):
                kept = data if Sync(file) in later else _torn(data, rng)
                content = contents.setdefault(file, bytearray())
                content.extend(bytes(max(offset + len(data) - len(content), 0)))
                content[offset : offset + len(data)] = kept
    target.mkdir()
    for name, file in names.items():
        (target / name).write_bytes(contents.get(file, b""))


def _torn(data: bytes, rng: random.Random) -> bytes:
    """Return data with random sectors zero, as if they were not written yet."""
    kept = bytearray(data)
    for start in range(0, len(data), SECTOR):
        if rng.random() < 0.5:
            kept[start : start + SECTOR] = bytes(len(kept[start : start + SECTOR]))
    return bytes(kept)


def acknowledged(operations: list[Any]) -> list[str]:
    return [name for operation in operations if isinstance(operation, Acknowledge) for name in operation.ids]
