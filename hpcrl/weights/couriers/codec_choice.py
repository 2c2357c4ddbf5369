"""Full or delta? What a site wants, what the link and the codec were measured to do, and what versions share.

Pace    one for a sender: told what every transfer took, asked before the next

A delta pays where coding is quicker than the link. With "auto", the first versions go in full and tell how quick the
link is; then a sample of a version tells how much of it changes and what coding takes; then every delta does.
"""

import time
from dataclasses import dataclass
from typing import Literal

from hpcrl.weights.couriers import delta_codec
from hpcrl.weights.couriers.delta_codec import Choice
from hpcrl.weights.layout import Layout

Codec = Literal["auto", "full", "delta"]
"""What a site may want."""
MEASURED_BY = 2
"""Versions in full that tell how quick the link is; with the first one, receivers make their windows."""
SAMPLE_EVERY = 16
"""So many versions in full, and it is looked anew whether a delta would pay."""


@dataclass
class Pace:
    """What was measured in this life of the couriers."""

    wants: Codec
    link_nbytes_per_s: float | None = None
    """The quickest that a version went in full."""
    delta_nbytes: int | None = None
    """What a delta has, by the newest look."""
    delta_s: float = 0.0
    """What coding it takes, on both sides."""
    _num_full: int = 0
    _full_since_look: int = SAMPLE_EVERY

    def choose(self, layout: Layout, old: memoryview, new: memoryview) -> Choice:
        """For a version whose base the receivers have."""
        if self.wants != "auto":
            return Choice(self.wants, f'site.mpi.codec = "{self.wants}"')
        if self.link_nbytes_per_s is None or self._num_full < MEASURED_BY:
            return Choice("full", "the link is not measured yet")
        if self._full_since_look >= SAMPLE_EVERY:
            self._look(layout, old, new)
        return delta_codec.choose(
            full_nbytes=layout.nbytes,
            delta_nbytes=self.delta_nbytes,
            delta_s=self.delta_s,
            link_nbytes_per_s=self.link_nbytes_per_s,
        )

    def was_full(self, nbytes: int, wall_s: float) -> None:
        """A version went in full."""
        self.link_nbytes_per_s = max(self.link_nbytes_per_s or 0.0, nbytes / wall_s)
        self._num_full += 1
        self._full_since_look += 1

    def was_delta(self, nbytes: int, wall_s: float) -> None:
        """A delta went; what the link does not account for, coding has taken."""
        self.delta_nbytes = nbytes
        self.delta_s = max(wall_s - nbytes / self.link_nbytes_per_s, 0.0) if self.link_nbytes_per_s else wall_s
        self._full_since_look = 0

    def was_too_large(self) -> None:
        """A delta would have had as many bytes as the version."""
        self.delta_nbytes = None
        self._full_since_look = 0

    def _look(self, layout: Layout, old: memoryview, new: memoryview) -> None:
        """At some pieces all over the version; the other side is taken to need as long as this one."""
        began = time.monotonic()
        share, looked_at = delta_codec.sample(old, new, layout)
        self.delta_nbytes = round(share * layout.nbytes) if share < 1 else None
        self.delta_s = 2 * (time.monotonic() - began) * layout.nbytes / max(looked_at, 1)
        self._full_since_look = 0
