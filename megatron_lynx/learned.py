"""What a run has taught, as jobs, plans and outcome files state it: the next plan is made with it.

learned: {seconds: 1.04, attention: 1.1, mlp: 0.98, beside_bytes: [92000000, -31000000], device_bytes: 80000000000}
"""

from __future__ import annotations

from pydantic import Field

from megatron_lynx.validation import Part


class Learned(Part):
    """How the figures of a profile, and the bytes that are counted, have to change to be what was measured."""

    seconds: float = Field(default=1.0, gt=0)
    """How many times longer passes take than the profile says: everything in layers, head and embedding, collectives and
    messages between stages. What follows comes on top."""
    attention: float = Field(default=1.0, gt=0)
    mlp: float = Field(default=1.0, gt=0)
    experts: float = Field(default=1.0, gt=0)
    """Computing of halves."""
    collectives: float = Field(default=1.0, gt=0)
    """Collectives of the tensor-parallel group."""
    exchanges: float = Field(default=1.0, gt=0)
    """Exchanges of experts."""
    beside_bytes: tuple[int, ...] = ()
    """By stage: what a device holds beside what is counted; below 0 where it holds less."""
    device_bytes: int | None = None
    """What a device has beside what others than PyTorch used of it, and what PyTorch reserved and nobody had. None: not known."""

    def beside(self, stage: int) -> int:
        """Of one stage; 0 where no run has had such a stage."""
        return self.beside_bytes[stage] if stage < len(self.beside_bytes) else 0
