"""Slots of a window in pinned memory, to which a GPU writes by itself; into other memory it writes a sixth as fast."""

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class PinnedSlots:
    """The slots that this process has pinned, by address; they are released before they are unmapped."""

    def __init__(self) -> None:
        self._is_pinned: dict[int, bool] = {}

    def pin(self, slot: memoryview, *, device: "torch.device") -> None:
        """Pin a slot, once, if weights come from a GPU; if CUDA refuses, copies take longer."""
        import torch

        if device.type != "cuda" or not slot.nbytes or torch.version.hip:
            return
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = torch.frombuffer(slot, dtype=torch.uint8).data_ptr()
        if address in self._is_pinned:
            return
        self._is_pinned[address] = cuda.cudaHostRegister(address, slot.nbytes, 0) == cuda.cudaError.success
        if not self._is_pinned[address]:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)  # CUDA reports the refusal once more, with the next kernel

    def release(self) -> None:
        """Release all slots."""
        for address, is_pinned in self._is_pinned.items():
            if is_pinned:
                import torch

                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._is_pinned.clear()
