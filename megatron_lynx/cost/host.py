"""Host time: how long Python takes to issue a half, or the layers of a stage.

A pass takes at least its host time; a *host-bound* stage waits for Python. Unknown host time counts as 0: the model's ends,
collectives, and profiles without host time. A captured half is one call, counted as 0. A half that replaces the usual one, such
as a gated delta net, takes at least its time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_lynx.anatomy import DENSE, Section
from megatron_lynx.config.cluster import Implementation, Setting
from megatron_lynx.config.job import Job
from megatron_lynx.cost.section import gathers
from megatron_lynx.kinds.opaque.section import NOTHING
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.timeline import Passes
from megatron_lynx.units import format_seconds

NO_HOST_TIME = Passes()

RUN_AGAIN: tuple[Setting, ...] = ("full", "recomputed", "gathered")
"""Settings whose backward issues the whole forward again. A half with experts takes an MLP's difference to stock none: in its
own proportion under these, as much under others."""


@dataclass(frozen=True)
class HostLoad:
    stage: int
    host_s: float
    device_s: float


def half_host_s(
    profile: Profile,
    section: Section,
    recompute: Collection[str],
    *,
    checkpointed: bool = False,
    offloads: bool = False,
    deferred: int = 0,
) -> Passes:
    """Return the host time of one half under a plan. `deferred`: number of delayed weight gradients and pieces. A checkpoint
    counts as a half recomputed whole."""
    if profile.host_time is None or section.captured:
        return NO_HOST_TIME
    setting = setting_of(section, recompute, gathered=not checkpointed and gathers(profile, section, recompute))
    treated = _of(profile, section, setting)
    if deferred:  # measured with all linears of a dense half
        treated += _beyond_kept(profile, section, "deferred") * (1 / len(DENSE[section.half].linears)) * deferred
    return treated + offloading_host_s(profile, section) if offloads else treated


def offloading_host_s(profile: Profile, section: Section) -> Passes:
    if profile.host_time is None:
        return NO_HOST_TIME
    return _beyond_kept(profile, section, "offloaded")


def _beyond_kept(profile: Profile, section: Section, setting: Setting) -> Passes:
    return _of(profile, section, setting) - _of(profile, section, "kept")


def setting_of(section: Section, recompute: Collection[str], *, gathered: bool) -> Setting:
    """Return the setting that a half is measured as; one that recomputes a GEMM or the attention counts as recomputed whole."""
    items = {item.role for item in section.items if item.name in recompute}
    if not items:
        return "kept"
    if gathered:
        return "gathered"
    return "recomputed" if items - {"norm", "inner_norm", "code", "residual"} else "partly"


def stage_host_s(job: Job, profile: Profile, stage: int, setting: Setting) -> Passes:
    """Return the host time of one micro-batch on a stage whose halves are all in one of Megatron's own settings."""
    if profile.host_time is None:
        return NO_HOST_TIME
    counted = job.halves_on(stage).items()
    halves = [_of(profile, section, setting) * count for section, count in counted if not section.captured]
    return sum(halves, start=NO_HOST_TIME)


def _of(profile: Profile, section: Section, setting: Setting) -> Passes:
    assert profile.host_time is not None, "callers look"
    half = profile.host_time.of(profile.shape.implementation).half(section.half)
    passes = half.under(setting).seconds
    if section.profiled_as in NOTHING:
        return NO_HOST_TIME
    if section.profiled_as != "experts":
        return passes
    if profile.host_time.experts is None or profile.shape.experts is None:
        return NO_HOST_TIME
    experts = profile.host_time.experts.of(profile.shape.experts.count // profile.shape.expert)
    again = experts.forward_us / half.none.forward_us if setting in RUN_AGAIN else 1.0
    return experts.seconds + (passes - half.none.seconds) * Passes(1.0, again)


@dataclass(frozen=True)
class HostReport:
    cpu: str | None
    layers: Implementation | None = None
    words: str = ""
    bound: Sequence[HostLoad] = ()

    @classmethod
    def of(cls, profile: Profile, bound: Sequence[HostLoad]) -> HostReport:
        known, implementation = profile.host_time, profile.shape.implementation
        if known is None:
            return cls(None, bound=tuple(bound))
        return cls(known.cpu, known.taken_for(implementation), known.words_for(implementation), tuple(bound))

    @property
    def as_json(self) -> dict[str, Any]:
        return {"cpu": self.cpu, "layers": self.layers, "host_bound": [asdict(load) for load in self.bound]}

    @property
    def lines(self) -> list[str]:
        if self.cpu is None:
            return ["host time: not known (megatron-lynx profile and doctor measure it); no pass is taken to wait for Python"]
        if not self.bound:
            return [f"host time: Python stays ahead of the device on every stage (host time of {self.words})"]
        stages = [
            f"host-bound: stage {load.stage}: in a step the host needs {format_seconds(load.host_s)} to issue what takes "
            f"the device {format_seconds(load.device_s)}"
            for load in self.bound
        ]
        todo = "hiding recomputations gains nothing there; a larger batch.micro or a smaller parallel.tensor does"
        return [*stages, f"host time of {self.words}; {todo}"]
