"""Settings that stock Megatron offers a job, and the fastest within given bytes on the fullest device.

family      bytes decrease, seconds increase ──────>
            x   x   x   o   o   o                       o: fits. The first that fits is the family's fastest
families ── the first of each that fits ── the fastest of them

Families:

    none
    block 1, block 2, ..., full                                         whole layers, as many as needed
    mlp                                                                 a set of modules
    mlp, offload core_attn + attn_proj of the first 1, 2, ... layers    from 0.19 on; before, of all layers
    block 1, 2, ..., and offload core_attn + attn_proj of the others
    mlp, exchanges overlapped                                           each set, if experts exchange tokens; with and without
                                                                        delayed weight gradients

Left out: sets with a module that the job's layers do not have, or that another module of the set recomputes anyway.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, combinations
from math import inf
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import host_shortage
from megatron_lynx.cost.stage import of_every_stage
from megatron_lynx.cost.step import StepRange
from megatron_lynx.cost.update import update_s
from megatron_lynx.once import once
from megatron_lynx.prediction import within_error
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.layer import LayerBytes, layer_bytes, layer_seconds
from megatron_lynx.stock.legality import FRACTION_SINCE, NEWEST, Facts, offered
from megatron_lynx.stock.price import Priced, priced
from megatron_lynx.stock.setting import FULL, NONE, OFFLOADED, RECOMPUTED, WHOLE, StockSetting, block
from megatron_lynx.stock.stage import StockStage
from megatron_lynx.units import format_bytes, speed_in_words


def rivals(job: Job, profile: Profile, budget_bytes: int, release: str = NEWEST) -> list[Priced]:
    """Return the families' fastest settings that were each the fastest so far, and the fastest of them with userbuffers if these
    can be enabled. Nothing is offloaded if the cluster has no link to the host."""
    running = _Rivals(job, profile, budget_bytes, Facts.of(job, release))
    for family in families(job, release, running.promising):
        running.take(family)
    if (best := fastest(running.priced)) is not None and not job.userbuffers and job.cluster.nvlink is not None:
        price = priced(job, profile, replace(best.setting, userbuffers=True))
        if offered(price.setting, running.facts) and price.fits(budget_bytes):
            running.priced.append(price)
    return running.priced


@dataclass
class _Rivals:
    job: Job
    profile: Profile
    budget_bytes: int
    facts: Facts
    priced: list[Priced] = field(default_factory=list)
    _known_s: dict[StockSetting, float] = field(default_factory=dict)
    """Steps of settings without copies."""

    def take(self, family: Family) -> None:
        last = family[-1]
        if last.method is None and self._is_slower(replace(last, offload=(), fraction=WHOLE)):
            return
        if (last.offload and not self._has_link) or not self._may_fit(last):
            return
        prices = [priced(self.job, self.profile, setting) for setting in family]
        first = bisect_left(prices, True, key=lambda price: price.fits(self.budget_bytes))
        self.priced += [price for price in prices[first : first + 1] if host_shortage(self.job, price.host_bytes) is None]

    def promising(self, sets: Iterable[Modules]) -> Iterator[Modules]:
        """Yield sets of recomputed modules, the shortest recomputation first, without those that are hopeless by then: they
        are slower, or do not fit with everything offloaded."""
        all_offloaded = tuple(name for name, module in OFFLOADED.items() if module.since <= self.facts.release and self._has_link)
        for recompute in sorted(sets, key=self._recomputed_s):
            ways = [StockSetting(recompute), *(setting for (setting,) in _overlapped(StockSetting(recompute), self.facts))]
            if self._may_fit(StockSetting(recompute, offload=all_offloaded)) and not all(map(self._is_slower, ways)):
                yield recompute

    @once
    def _may_fit(self, setting: StockSetting) -> bool:
        """Whether it fits if copies take no time."""
        return all(StockStage(self.job, setting, stage).parts.peak_bytes <= self.budget_bytes for stage in self._stages)

    @cached_property
    def _stages(self) -> frozenset[int]:
        """One of equal ones."""
        return frozenset(of_every_stage(self.job, int))

    def _recomputed_s(self, recompute: Modules) -> float:
        shape, setting = LayerShape.of(self.job), StockSetting(recompute)
        kinds = self.job.model.kinds_of(range(1, self.job.model.layers + 1))
        return sum(half.again_s for kind in kinds for half in layer_seconds(shape, self.profile, setting, kind))

    def _is_slower(self, setting: StockSetting) -> bool:
        """Whether a setting without copies is no faster than the best. More recomputation is never faster: a slower one with
        a part of it spares the price."""
        least_s = min((price.step_s for price in self.priced), default=inf) * (1 - WORTH_PRICING)
        if least_s == inf:
            return False
        slow = (known for known, seconds in self._known_s.items() if seconds >= least_s)
        alike = (known for known in slow if (known.overlap, known.delayed) == (setting.overlap, setting.delayed))
        if any({*known.recompute} <= {*setting.recompute} for known in alike):
            return True
        if setting not in self._known_s:
            self._known_s[setting] = priced(self.job, self.profile, setting).step_s
        return self._known_s[setting] >= least_s

    @property
    def _has_link(self) -> bool:
        return self.job.cluster.pcie is not None or any(point.kind == "host" for point in self.profile.links)


def by_speed(price: Priced) -> tuple[float, int]:
    return price.step_s, price.most_bytes


def fastest(prices: Iterable[Priced]) -> Priced | None:
    return min(prices, key=by_speed, default=None)


Family = tuple[StockSetting, ...]
Modules = tuple[str, ...]

WORTH_PRICING = 2e-3
"""Relative gain below which a setting is not priced; with a smaller one, some launches take minutes."""

Choose = Callable[[Iterable[Modules]], Iterable[Modules]]


def families(job: Job, release: str = NEWEST, choose: Choose = tuple) -> Iterator[Family]:
    """Yield all families with the chosen sets of recomputed modules. `release`: of megatron-core."""
    most_layers, facts = max(job.partition), Facts.of(job, release)
    # 1 to n - 1 of a chunk's n layers; slightly below k / n, so that k are taken
    fractions = [math.floor(1_000_000 * count / most_layers) / 1_000_000 for count in range(1, most_layers)]
    yield (NONE,)
    yield from _overlapped(NONE, facts)
    for setting in module_sets(job, release, choose):
        parted = fractions if setting.offload and release >= FRACTION_SINCE else ()
        yield (*(replace(setting, fraction=fraction) for fraction in parted), setting)
        beside = tuple(StockSetting(method="block", layers=layers, offload=setting.offload) for layers in range(1, most_layers))
        if beside and setting.offload and not setting.recompute and offered(beside[0], facts):
            yield beside
        yield from _overlapped(setting, facts)
    yield (*(block(layers) for layers in range(1, most_layers)), FULL)
    for layers in range(2, most_layers + 1):
        if not any(count % layers for count in job.partition):  # releases before 0.18 need that
            yield (StockSetting(method="uniform", layers=layers),)


def _overlapped(setting: StockSetting, facts: Facts) -> Iterator[Family]:
    for delayed in (False, True):
        overlapped = replace(setting, overlap=True, delayed=delayed)
        if offered(overlapped, facts) and "moe" not in setting.recompute:
            yield (overlapped,)


def module_sets(job: Job, release: str = NEWEST, choose: Choose = tuple) -> Iterator[StockSetting]:
    """Yield the legal sets of recomputed and offloaded modules in which each module makes a difference."""
    facts, shape, kinds = Facts.of(job, release), LayerShape.of(job), tuple(job.model.kinds_of(range(1, job.model.layers + 1)))

    @cache
    def held(recompute: Modules, offload: Modules) -> list[LayerBytes]:
        return [layer_bytes(shape, StockSetting(recompute, offload=offload), kind) for kind in kinds]

    def each_differs(recompute: Modules, offload: Modules) -> bool:
        fewer = [*((less, offload) for less in _without_one(recompute)), *((recompute, less) for less in _without_one(offload))]
        return all(held(*less) != held(recompute, offload) for less in fewer)

    sets = (recompute for recompute in _subsets(RECOMPUTED) if offered(StockSetting(recompute), facts))
    for recompute in choose(recompute for recompute in sets if each_differs(recompute, ())):
        for offload in _subsets(OFFLOADED):
            setting = StockSetting(recompute, offload=offload)
            if setting != NONE and offered(setting, facts) and each_differs(recompute, offload):
                yield setting


def _without_one(names: Modules) -> Iterator[Modules]:
    return (names[:at] + names[at + 1 :] for at in range(len(names)))


def _subsets(names: Collection[str]) -> Iterator[Modules]:
    return chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))


@dataclass(frozen=True)
class SimulatedRow:
    """One setting: seconds of a step, including the optimizer's update."""

    setting: str
    step: StepRange
    device_bytes: int
    """Bytes on the fullest device."""
    host_bytes: int = 0
    """Page-locked memory of the rank with the most."""
    flags: tuple[str, ...] = ()
    ours: bool = False
    ratio_to_none: float = 1.0

    @property
    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "step"} | self.step.as_json


def side_by_side(
    job: Job, profile: Profile, ours: SimulatedRow, rivals: Iterable[Priced], today: SimulatedRow | None = None
) -> list[SimulatedRow]:
    """Return the rows. `job`: as stock runs it. `ours`: the plan's row. `rivals`: settings that fit. `today`: the launch's row,
    which is the first whatever its bytes."""
    none, full = priced(job, profile, NONE), priced(job, profile, FULL)
    contenders = [price for price in sorted(rivals, key=by_speed) if price.setting not in (NONE, FULL)]
    added_s = update_s(job, profile)
    rows = [
        SimulatedRow(
            f"stock {price.setting.name}", price.step.plus(added_s), price.most_bytes, price.host_bytes, price.setting.flags
        )
        for price in (none, full, *contenders[:5])
    ]
    if today is not None:
        rows = [today, *(row for row in rows if f"today: {row.setting}" != today.setting)]
    none_s = none.step_s + added_s
    return [replace(row, ratio_to_none=row.step.expected_s / none_s) for row in (*rows, ours)]


def verdict(rows: list[SimulatedRow], budget_bytes: int, *, experts: bool) -> str:
    ours = next(row for row in rows if row.ours)
    small = [row for row in rows if not row.ours and row.device_bytes <= budget_bytes]
    best = min(small, key=lambda row: row.step.expected_s, default=None)
    if best is None:
        return f"No stock setting fits into {format_bytes(budget_bytes)}."
    how = speed_in_words(ours.step.expected_s, best.step.expected_s)
    flags = " ".join(best.flags) or "no flags"
    unsure = within_error(ours.step.expected_s, best.step.expected_s, experts=experts)
    fastest = f"the fastest stock setting that fits into {format_bytes(budget_bytes)} ({flags})"
    return f"ours is {how} {best.setting}, {fastest}. {unsure}".rstrip()
