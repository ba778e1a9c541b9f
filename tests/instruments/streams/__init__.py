"""Makes a GPU's streams visible on a CPU: copies that run late in raw memory, and a record of what comes before what."""

from __future__ import annotations

from tests.instruments.streams.watch import Watched, watched_streams

__all__ = ["Watched", "watched_streams"]
