"""Publish weights: training pauses for one copy into its node's window; all else is done in the background.

    WeightPublisher  the publisher of a campaign's weights
      set_transport  set the transport from versions to engines
      publish        write a new version to the window, and to files too while engines read files
      persist        write the newest version to files, for resuming and for nodes that join later
      poll           between steps: check if an engine cannot read the window
      close          wait for the background work
    PublishTarget    what it publishes to

If the window fails, versions are written to files from then on: a campaign never ends because of its weight
transfer. Where each rank of a trainer holds a part, only then does `gather_tensors` collect them.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import TransportChanged, VersionPublished
from hpcrl.errors import WeightsError
from hpcrl.system.processes import do_nothing
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.stores.background import BackgroundWork
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.store import Tensors, iterate_bytes
from hpcrl.weights.versions import (
    Transport,
    VersionManifest,
    WeightVersion,
    announce_version,
    find_newest_version,
    read_transport,
    write_transport,
)

READERS_POLL_INTERVAL_S = 1.0


class PublishTarget(Protocol):
    """The place to publish versions: `WindowStore` takes all tensors by name, `ShardStore` the shards of a rank."""

    def stage(self, weights: Any, weight_version: WeightVersion, /) -> Any:
        """Copy the weights to where no process reads yet; they may change afterwards."""

    def commit(self, staged: Any, /) -> VersionManifest:
        """Make the version visible for which `stage` returned `staged`."""

    def newest(self) -> VersionManifest | None: ...

    def newest_started(self) -> int | None:
        """Return the newest version that was ever started, complete or not."""

    def make_saver(self, files: FileStore, weight_version: WeightVersion, /) -> Callable[[], object]:
        """Return what writes the last staged version to files: called between steps, run in the background."""

    def unlink(self) -> None: ...

    def close(self) -> None: ...


class WeightPublisher:
    """The publisher of a campaign's weights."""

    def __init__(
        self,
        files: FileStore,
        window: PublishTarget | None,
        *,
        events: EventLog,
        keep_versions: int,
        layout: TensorLayout | None = None,
        on_readable: Callable[[], object] = do_nothing,
    ) -> None:
        """Set `layout`, which is the window's too, to publish tensors in its types.

        `on_readable` is called when engines of this machine can read a new version.
        """
        self._on_readable = on_readable
        self._layout = layout
        self._files = files
        self._window = window
        self._events = events
        self._keep_versions = keep_versions
        self._version: WeightVersion | None = None
        self._saved_version: WeightVersion | None = None
        """The newest version that is in files, or is being written to them."""
        self._background = BackgroundWork(name="publisher")
        self._last_poll = time.monotonic()

    def newest_version(self) -> int | None:
        """Return the newest version that was ever made, wherever it is stored."""
        candidates = [
            find_newest_version(self._files.directory),
            None if self._window is None else self._window.newest_started(),
        ]
        return max((version for version in candidates if version is not None), default=None)

    def newest_readable(self) -> int | None:
        """Return the newest version that engines can load now: not whole weights where they are sent adapters."""
        manifests = [self._files.newest(), self._window.newest() if self._window is not None else None]
        found = [manifest for manifest in manifests if manifest is not None]
        names = None if self._layout is None else self._layout.tensors_by_name().keys()
        return max((one.version for one in found if names is None or one.checksums.keys() == names), default=None)

    def set_transport(self, transport: Transport) -> None:
        """Set the transport of all further versions, for every worker and in the event log."""
        write_transport(self._files.directory, transport)
        self._events.emit(TransportChanged(transport=transport.name, reason=transport.reason))

    def publish(
        self, weights: Any, weight_version: WeightVersion, *, gather_tensors: Callable[[], Tensors] | None = None
    ) -> None:
        """Publish the weights to every engine; the tensors may change when this returns.

        `gather_tensors` returns all tensors where `weights` are a rank's shards; without it files cannot be written.
        """
        self._background.wait()
        start = time.monotonic()
        commit = self._stage_version(weights, weight_version, can_gather=gather_tensors is not None)
        self._version = weight_version
        if commit is None:
            announce_version(self._files.directory, weight_version)
            tensors = weights if gather_tensors is None else gather_tensors()
            self._save(lambda: self._write_files(tensors, weight_version))
            self._report_published(weight_version, start=start, stall_s=time.monotonic() - start)
        else:
            stall_s = time.monotonic() - start
            self._background.run(lambda: self._commit(commit, weight_version))
            if self._engines_read_files():
                self.persist()
            self._background.run(lambda: self._report_published(weight_version, start=start, stall_s=stall_s))

    def persist(self) -> None:
        """Start to write the newest version to files; it is there once `close` or the next `publish` returns."""
        if self._window is None or self._version is None or self._version == self._saved_version:
            return
        save = self._window.make_saver(self._files, self._version)
        self._saved_version = self._version
        self._background.run(lambda: self._save(save))

    def poll(self) -> None:
        """Check, while the caller waits, if an engine has asked for files."""
        if self._window is None or time.monotonic() - self._last_poll < READERS_POLL_INTERVAL_S:
            return
        self._last_poll = time.monotonic()
        if self._engines_read_files() and self._saved_version != self._version:
            self._background.wait()
            self.persist()

    def close(self) -> None:
        """Wait for the background work, and remove the window: its readers keep what they have mapped."""
        self._background.wait()
        self._background.close()
        if self._window is not None:
            self._window.unlink()
            self._window.close()

    def _stage_version(
        self, weights: Any, weight_version: WeightVersion, *, can_gather: bool
    ) -> Callable[[], VersionManifest] | None:
        """Copy the weights into the window; return what makes them visible, or None if files are used from now on."""
        if self._window is None:
            return None
        window = self._window
        try:
            staged = window.stage(weights, weight_version)
        except WeightsError as error:
            if not (can_gather or isinstance(weights, dict)):  # no process has all of it to write to files
                raise
            window.close()
            self._window = None
            self.set_transport(Transport(name="files", reason=str(error)))
            return None
        return lambda: window.commit(staged)

    def _commit(self, commit: Callable[[], VersionManifest], weight_version: WeightVersion) -> None:
        announce_version(self._files.directory, weight_version)
        commit()
        self._on_readable()

    def _write_files(self, tensors: Tensors, weight_version: WeightVersion) -> None:
        layout = self._layout or TensorLayout.from_tensors(tensors)
        self._files.publish_each(layout, iterate_bytes(tensors, layout), weight_version)

    def _save(self, save: Callable[[], object]) -> None:
        """Write to files, out of the window: a slot keeps its version until the one after the next is started."""
        save()
        self._files.prune(keep=self._keep_versions)

    def _report_published(self, weight_version: WeightVersion, *, start: float, stall_s: float) -> None:
        version, step = weight_version.version, weight_version.step
        wall_s = round(time.monotonic() - start, 4)
        self._events.emit(VersionPublished(version=version, step=step, wall_s=wall_s, stall_s=round(stall_s, 4)))

    def _engines_read_files(self) -> bool:
        """Return True if engines need every version in files."""
        transport = read_transport(self._files.directory)
        return transport is None or transport.name == "files"
