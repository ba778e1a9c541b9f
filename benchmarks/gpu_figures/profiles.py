"""One layer of a model, measured as `megatron-lynx profile` measures it, beside its analytic price; and Python's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_figures.figure import Figure
from megatron_lynx.anatomy import DENSE, HALVES, Section
from megatron_lynx.config.cluster import LayerHostTime
from megatron_lynx.config.job import Job
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import HalfProfile, Profile
from megatron_lynx.testbed.fusions import compiles
from megatron_lynx.testbed.links import Links
from megatron_lynx.testbed.profiling import measure_profile
from megatron_lynx.testbed.ranks import Hosts, run_ranks

SECONDS = {"forward": "forward_s", "backward": "backward_s", "dgrad": "dgrad_s", "wgrad": "wgrad_s"}


@dataclass(frozen=True)
class Bounded(Hosts):
    """One rank that must answer within a time."""

    limit_s: float = 300.0

    def run(
        self, function: Callable[..., Any], *args: Any, unshaped: bool = False, env: Mapping[str, str] | None = None
    ) -> list[Any]:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        environment = {**hidden, **(env or {})}
        return run_ranks(function, 1, *args, pin=False, env=environment, compiled=self.compiled, timeout_s=self.limit_s)


def measured_profile(job: Job, limit_s: float, *, dry: bool) -> Profile:
    """Raises `RankError` or `TimeoutError`."""
    compiled = not dry and compiles(job)
    hosts = Bounded(1, "cpu" if dry else "cuda", Links(), compiled, limit_s=limit_s)
    return measure_profile(job, hosts, lambda what: nullcontext())


def profile_figures(job: Job, measured: Profile) -> Iterator[Figure]:
    """Halves first, then their items, the model's ends, bytes, and Python."""
    stated = analytic_profile(job)
    for half in HALVES:
        yield from _half_figures(DENSE[half], stated.half(half), measured.half(half))
    for half in HALVES:
        yield from _item_figures(half, stated.half(half), measured.half(half))
    for end in ("embedding", "head"):
        for what in ("forward_s", "backward_s"):
            both = (getattr(getattr(profile, end), what) for profile in (stated, measured))
            yield _ms(end, what.removesuffix("_s"), *both)
    if stated.host_time is not None and measured.host_time is not None:
        whose = measured.shape.implementation
        yield from host_figures(stated.host_time.of(whose), measured.host_time.of(whose))


def _half_figures(section: Section, stated: HalfProfile, measured: HalfProfile) -> Iterator[Figure]:
    yield _ms(section.half, "forward", stated.forward_s, measured.forward_s)
    yield _ms(section.half, "backward", stated.backward_s, measured.backward_s)
    again = [sum(profile.items[item].forward_s for item in section.recomputable) for profile in (stated, measured)]
    yield _ms(section.half, "recompute of all that may be", *again)
    yield Figure(section.half, "saved", _saved_mb(stated), _saved_mb(measured), "MB")


def _saved_mb(profile: HalfProfile) -> float:
    return sum(tensor.bytes for tensor in profile.tensors if tensor.saved_by) / 1e6


def _item_figures(half: str, stated: HalfProfile, measured: HalfProfile) -> Iterator[Figure]:
    for name, item in stated.items.items():
        for what, key in SECONDS.items():
            both = getattr(item, key), getattr(measured.items[name], key)
            if any(both):
                yield _ms(f"{half}: {name}", what, *both)
    for name, item in stated.items.items():
        both = item.saved_bytes / 1e6, measured.items[name].saved_bytes / 1e6
        if any(both):
            yield Figure(f"{half}: {name}", "saved", *both, "MB")


def host_figures(stated: LayerHostTime, measured: LayerHostTime) -> Iterator[Figure]:
    """What Python takes for a half, setting by setting."""
    for half in HALVES:
        for setting in ("none", "full", "kept", "partly", "recomputed"):
            own, other = stated.half(half).under(setting), measured.half(half).under(setting)
            for what in ("forward_us", "backward_us"):
                words = f"{setting}, {what.removesuffix('_us')}"
                yield Figure(f"host time: {half}", words, getattr(own, what), getattr(other, what), "us")


def _ms(of: str, what: str, stated_s: float, measured_s: float) -> Figure:
    return Figure(of, what, 1e3 * stated_s, 1e3 * measured_s, "ms")
