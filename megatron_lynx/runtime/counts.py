"""What an engine did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counts:
    """What an engine did since its counts were last taken."""

    recorded: int = 0
    """Frames that let something go."""
    let_go_bytes: int = 0
    """Bytes of tensors that were let go. Those that share memory count each."""
    hidden: int = 0
    """Replays that ran inside a window."""
    on_demand: int = 0
    """Replays that backward waited for."""
    gathered: int = 0
    """Inputs gathered once."""
    live_ahead: int = 0
    """The most frames of one micro-batch that were regenerated before backward reached them."""
    deferred: int = 0
    """Weight gradients that their backward left for later."""
    filled: int = 0
    """Deferred weight gradients that ran in a wait."""
    flushed: int = 0
    """Deferred weight gradients that nothing hid: they ran because they had to be done, or because others did not fit."""
    deferred_bytes: int = 0
    """The most that operands of deferred weight gradients held at once."""
    offloaded_bytes: int = 0
    """Copied to the host."""
    reloaded_bytes: int = 0
    """Copied back."""
    host_bytes: int = 0
    """Host memory held for offloaded activations."""
    exposed_copy_s: float = 0.0
    """Seconds for which compute waited for copies, either way."""
    expert_load: float = 0.0
    """The most rows that experts of one layer got of one micro-batch, over what they would get if all were asked as often. 0:
    there are no experts."""

    @property
    def replayed(self) -> int:
        return self.hidden + self.on_demand

    def __add__(self, later: Counts) -> Counts:
        """The counts of both stretches: sums, and the larger of what is held at once."""
        most = ("live_ahead", "deferred_bytes", "host_bytes", "expert_load")
        both = {one.name: (getattr(self, one.name), getattr(later, one.name)) for one in fields(Counts)}
        return Counts(**{name: max(values) if name in most else sum(values) for name, values in both.items()})
