"""What one saved tensor was, kept on the host, and whether backward got the same bits.

    saved       ──copy──> host
    backward    asks ──> [1] what it gets is copied on the device, on the stream that will use it: a reload that nobody waited for
                             is copied as unfinished as it is
                         [2] the host's copy comes to the device, both are compared there
    step ends   [3] only now does the host ask the device how that went

The device keeps a few numbers of each comparison, and the two copies of the tensor at hand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lynx.launch.check.outcome import bits, unlike


class _Compared(NamedTuple):
    """On the device: how many elements differ, the first that does, and its bits in what backward got and in what was saved."""

    differing: Tensor
    first: Tensor
    returned: Tensor
    saved: Tensor


class Original:
    """One saved tensor of a drawn frame. `made_by` in words: `replayed`, `reloaded`, `gathered`."""

    def __init__(self, tensor: Tensor, made_by: str) -> None:
        self.made_by = made_by
        self.size_bytes = tensor.nbytes
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._kept: Tensor | None = tensor.detach().to("cpu", copy=True)
        self._compared: _Compared | None = None
        self._unlike = ""

    @torch.no_grad()
    def compare(self, returned: Tensor) -> None:
        """Backward gets this in the tensor's place. A second time is not looked at."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        self._unlike = unlike(returned, kept, (f"what was {self.made_by}", "what was saved"))
        if self._unlike or kept.numel() == 0:
            return
        mine = bits(returned).clone().flatten()  # [1]
        saved = bits(kept).to(mine.device).flatten()  # [2]
        differ = mine != saved
        first = differ.to(torch.uint8).argmax().view(1)
        self._compared = _Compared(differ.sum(), first, mine.index_select(0, first), saved.index_select(0, first))

    @property
    def over(self) -> bool:
        """Whether backward has asked for it."""
        return self._kept is None

    def found(self) -> str:
        """What differs, in words; empty where all bits are equal. [3]"""
        if self._unlike or self._compared is None:
            return self._unlike
        count = int(self._compared.differing)
        if count == 0:
            return ""
        returned, saved = (float(side.cpu().view(self._dtype)) for side in (self._compared.returned, self._compared.saved))
        at = [int(index) for index in torch.unravel_index(self._compared.first.cpu(), self._shape)]
        return (
            f"{count} of {self._shape.numel()} values that differ, the first at {at}: {returned:.9g} {self.made_by} and "
            f"{saved:.9g} saved"
        )
