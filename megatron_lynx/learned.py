"""Corrections from a run, as jobs, plans and outcome files state them.

learned: {seconds: 1.04, attention: 1.1, mlp: 0.98, beside_bytes: [92000000, -31000000], device_bytes: 80000000000}
"""

from __future__ import annotations

from pydantic import Field

from megatron_lynx.validation import Part


class Learned(Part):
    """Factors and offsets from predicted to measured figures."""

    seconds: float = Field(default=1.0, gt=0)
    """Factor of all passes: layers, head and embedding, collectives and messages between stages. The factors below multiply with
    it."""
    attention: float = Field(default=1.0, gt=0)
    mlp: float = Field(default=1.0, gt=0)
    experts: float = Field(default=1.0, gt=0)
    """Factors of the computation of halves."""
    collectives: float = Field(default=1.0, gt=0)
    """Factor of the tensor-parallel group's collectives."""
    exchanges: float = Field(default=1.0, gt=0)
    """Factor of exchanges of experts."""
    beside_bytes: tuple[int, ...] = ()
    """By stage: measured minus predicted bytes of a device."""
    device_bytes: int | None = None
    """Memory of a device without its use outside PyTorch and without reserved, unallocated memory; None if unknown."""

    def beside(self, stage: int) -> int:
        """Offset of one stage; 0 for a stage that no run has had."""
        return self.beside_bytes[stage] if stage < len(self.beside_bytes) else 0
