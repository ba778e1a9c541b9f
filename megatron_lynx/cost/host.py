"""Host time of passes: how long Python takes to issue a half, a stage's layers, or stock Megatron's.

A pass cannot be shorter, whatever its device does: a *host-bound* stage waits for Python. What is not known counts as no time:
the ends of the model, collectives, experts, and everything where the profile knows no host time. A captured half costs the host
one call, which is not counted either.

What there is to say of host time: whether it is known, on which CPU, and which stages wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_lynx.anatomy import DENSE, Section
from megatron_lynx.config.host_time import Implementation, Setting
from megatron_lynx.config.job import Job, Policy
from megatron_lynx.cost.section import gathers
from megatron_lynx.cost.stage import StageSeconds
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.units import format_seconds


@dataclass(frozen=True)
class HostSeconds:
    """Seconds of the host for one micro-batch: of a half, or of many together."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s

    def __add__(self, other: HostSeconds) -> HostSeconds:
        return HostSeconds(self.forward_s + other.forward_s, self.backward_s + other.backward_s)

    def __mul__(self, count: float) -> HostSeconds:
        return HostSeconds(count * self.forward_s, count * self.backward_s)

    def beyond(self, forward_s: float, backward_s: float) -> float:
        """By how much passes of so many seconds on the device are longer because of the host."""
        return max(0.0, self.forward_s - forward_s) + max(0.0, self.backward_s - backward_s)


NO_HOST_TIME = HostSeconds()

BY_POLICY: dict[Policy, Setting] = {"none": "none", "selective": "none", "balanced": "partly", "full": "full"}
"""A policy's setting. `selective` issues the core attention again, which is not measured: `none` is less than it takes."""


@dataclass(frozen=True)
class HostLoad:
    """One stage that is host-bound: seconds of a step."""

    stage: int
    host_s: float
    """What the host needs to issue its passes."""
    device_s: float
    """What the device would need to run them, if it never waited for the host."""


def half_host_s(
    profile: Profile,
    section: Section,
    replay: Collection[str],
    *,
    checkpointed: bool = False,
    offloads: bool = False,
    deferred: int = 0,
) -> HostSeconds:
    """One half under a plan that replays these items of it, and defers the weight gradients of so many of its linears. A
    checkpoint takes what a half takes that is replayed whole: it gathers its input as forward did."""
    if profile.host_time is None or section.in_some_layers or section.captured:
        return NO_HOST_TIME
    setting = setting_of(section, replay, gathered=not checkpointed and gathers(profile, section, replay))
    treated = _of(profile, section, setting) + _deferring(profile, section) * deferred
    return treated + offloading_host_s(profile, section) if offloads else treated


def _deferring(profile: Profile, section: Section) -> HostSeconds:
    """What a half takes longer for one linear whose weight gradient runs in a wait: measured of all linears of a dense half."""
    return _beyond_kept(profile, section, "deferred") * (1 / len(DENSE[section.half].linears))


def offloading_host_s(profile: Profile, section: Section) -> HostSeconds:
    """What a half takes longer because some of it goes to host memory and comes back."""
    if profile.host_time is None or section.in_some_layers:
        return NO_HOST_TIME
    return _beyond_kept(profile, section, "offloaded")


def _beyond_kept(profile: Profile, section: Section, setting: Setting) -> HostSeconds:
    """What a half takes longer under a setting than if it is kept."""
    return _of(profile, section, setting) + _of(profile, section, "kept") * -1


def setting_of(section: Section, replay: Collection[str], *, gathered: bool) -> Setting:
    """What becomes of a half whose items are replayed so: with a GEMM or the attention among them it counts as replayed whole."""
    items = {item.role for item in section.items if item.name in replay}
    if not items:
        return "kept"
    if gathered:
        return "gathered"
    return "replayed" if items - {"norm", "inner_norm", "code", "residual"} else "partly"


def issued(device: StageSeconds, job: Job, profile: Profile, stage: int) -> StageSeconds:
    """A stage's passes under the job's policy: as long as on the device, and no shorter than the host needs for them."""
    host = policy_host_s(job, profile, stage)
    return StageSeconds(max(device.forward_s, host.forward_s), max(device.backward_s, host.backward_s))


def policy_host_s(job: Job, profile: Profile, stage: int) -> HostSeconds:
    """All layers of a stage under the job's policy, which is stock Megatron's (or Yuan et al.'s) and not `planned`."""
    if profile.host_time is None:
        return NO_HOST_TIME
    counted = job.halves_on(stage)
    usual = job.model.halves.values()
    halves = [_of(profile, each, BY_POLICY[job.policy]) * counted[each] for each in usual if not each.captured]
    return sum(halves, start=NO_HOST_TIME)


def _of(profile: Profile, section: Section, setting: Setting) -> HostSeconds:
    """The figures of the profile's layers. Called where the profile knows host time."""
    assert profile.host_time is not None, "callers look"
    passes = profile.host_time.of(profile.shape.implementation).half(section.half).under(setting)
    return HostSeconds(passes.forward_s, passes.backward_s)


@dataclass(frozen=True)
class HostReport:
    """Host time in an answer about a whole step."""

    cpu: str | None
    """What the host time was measured on; None where it is not known."""
    layers: Implementation | None = None
    """Whose layers it was measured of."""
    words: str = ""
    """Both, for people; and where other layers had to be taken, for which."""
    bound: Sequence[HostLoad] = ()
    """The stages that are host-bound."""

    @classmethod
    def of(cls, profile: Profile, bound: Sequence[HostLoad]) -> HostReport:
        """`bound`: what was found with the figures of this profile."""
        known, own = profile.host_time, profile.shape.implementation
        if known is None:
            return cls(None, bound=tuple(bound))
        return cls(known.cpu, known.taken_for(own), known.words_for(own), tuple(bound))

    @property
    def as_json(self) -> dict[str, Any]:
        return {"cpu": self.cpu, "layers": self.layers, "host_bound": [asdict(load) for load in self.bound]}

    @property
    def lines(self) -> list[str]:
        """For a terminal: one line, or one for each stage that is host-bound and what to do about it."""
        if self.cpu is None:
            return ["host time: not known (megatron-lynx profile and doctor measure it); no pass is taken to wait for Python"]
        if not self.bound:
            return [f"host time: Python stays ahead of the device on every stage (host time of {self.words})"]
        stages = [
            f"host-bound: stage {load.stage}: in a step the host needs {format_seconds(load.host_s)} to issue what takes "
            f"the device {format_seconds(load.device_s)}"
            for load in self.bound
        ]
        todo = "hiding replays gains nothing there; a larger batch.micro or a smaller parallel.tensor does"
        return [*stages, f"host time of {self.words}; {todo}"]
