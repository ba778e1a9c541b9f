"""Beside which of NCCL's kernels recomputation ran, from a trace of torch's profiler (CUPTI's times, on the device's clock).

host      ├─ annotation ─────────┤         what it launches is launched inside, on the same thread
              launch 17  launch 18
device              ├ kernel 17 ┤├ kernel 18 ┤         found by the launches' correlation
                 ├─── NCCL's kernel ──┤                recomputation ran beside it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scripts.gpu_check.overlap import Interval, hidden_share

ANNOTATION = "megatron-lynx: recomputation"
MICROSECOND = 1e-6


@dataclass(frozen=True)
class Beside:
    """What one step showed."""

    collectives: tuple[Interval, ...]
    """When each kernel of NCCL ran, in seconds."""
    recomputations: tuple[Interval, ...]
    """The same of kernels that recompute."""

    @property
    def accompanied(self) -> int:
        """How many of NCCL's kernels ran beside one that recomputes."""
        return sum(hidden_share([each], self.recomputations) > 0 for each in self.collectives)

    @property
    def share(self) -> float:
        """Their part of all of them."""
        return self.accompanied / len(self.collectives) if self.collectives else 0.0

    @property
    def hidden_share(self) -> float:
        """The part of the recomputing kernels' seconds that lay beside NCCL's."""
        return hidden_share(self.recomputations, self.collectives)


def beside(trace: Mapping[str, Any]) -> Beside:
    """`trace`: what `torch.profiler.profile.export_chrome_trace` writes."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    recomputing = _launched_in(events, [event for event in events if event.get("name") == ANNOTATION])
    kernels = [event for event in events if event.get("cat") == "kernel"]
    ours = [kernel for kernel in kernels if _correlation(kernel) in recomputing]
    nccl = [kernel for kernel in kernels if str(kernel["name"]).startswith("nccl")]
    return Beside(tuple(map(_interval, nccl)), tuple(map(_interval, ours)))


def _launched_in(events: Iterable[Mapping[str, Any]], annotations: Iterable[Mapping[str, Any]]) -> set[Any]:
    """The correlations of what the host launched inside annotations."""
    inside = [(each["tid"], each["ts"], each["ts"] + each["dur"]) for each in annotations if each.get("cat") == "user_annotation"]
    launches = [event for event in events if str(event.get("cat")).startswith("cuda_")]
    return {
        _correlation(launch)
        for launch in launches
        if any(thread == launch["tid"] and begin <= launch["ts"] <= end for thread, begin, end in inside)
    }


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"] * MICROSECOND, (event["ts"] + event["dur"]) * MICROSECOND
