"""What a device tells whoever keeps an account of its streams: who was given what, and who waits for whom."""

from __future__ import annotations

from typing import Any

from tests.instruments.streams.move import Move

COMPUTE = "compute"
"""The name of the stream that the calling thread computes on."""


class StreamListener:
    """Listens to nothing. Streams are known by their names; a point is whatever `recorded` returns."""

    def recorded(self, stream: str) -> Any:
        """An event was recorded: the point that its stream has then."""

    def stream_waits(self, stream: str, point: Any) -> None:
        """What this stream is given from now on comes behind the point."""

    def host_waits(self, point: Any) -> None:
        """The host has waited for the point: what it issues from now on comes behind it."""

    def host_knows(self, point: Any) -> bool:
        """Whether the host has waited for the point, so that it need not ask."""
        return True

    def host_waits_for_all(self) -> None:
        """The host has waited for everything."""

    def moves(self, stream: str, move: Move) -> None:
        """The stream was given a copy."""
