"""The settings that stock Megatron offers a job, and the fastest that holds no more than given bytes on its fullest device.

family      less and less is held ──────────────>
            x   x   x   o   o   o                       o: fits. The first that fits is the family's fastest
families ── each one's first that fits ── the fastest of them

Settings come in families: each member holds less than the one before, and takes no less time.

    none
    block 1, block 2, ..., full                                         whole layers, as many as have to be
    mlp                                                                 a set of modules
    mlp, offload core_attn + attn_proj of the first 1, 2, ... layers    from 0.19 on; before, of all layers
    block 1, 2, ..., and offload core_attn + attn_proj of the others
    mlp, exchanges overlapped                                           each set, where experts exchange tokens

Left out: sets with a module of which the job's layers have none, or that another module of the set runs again anyway.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import host_shortage
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.layer_bytes import LayerBytes, layer_bytes
from megatron_lynx.stock.legality import FRACTION_SINCE, NEWEST, Facts, offered
from megatron_lynx.stock.modules import LEAST_ELEMENTS, OFFLOADED, RECOMPUTED
from megatron_lynx.stock.price import Priced, least_bytes, priced
from megatron_lynx.stock.setting import FULL, NONE, WHOLE, StockSetting, block


def best_rival(job: Job, profile: Profile, budget_bytes: int, release: str = NEWEST) -> Priced | None:
    """The fastest; None where nothing that stock offers fits. `release`: of megatron-core."""
    return min(rivals(job, profile, budget_bytes, release), key=lambda price: price.step_s, default=None)


def rivals(job: Job, profile: Profile, budget_bytes: int, release: str = NEWEST) -> Iterator[Priced]:
    """The fastest of every family, if one fits. Where a cluster's link to the host is not described, nothing is offloaded."""
    for family in families(job, release):
        if family[-1].offload and (not _has_host_link(job, profile) or _fits_without(job, family[-1], budget_bytes)):
            continue
        price = _first_that_fits(job, profile, family, budget_bytes)
        if price is not None and host_shortage(job, price.host_bytes) is None:
            yield price


def _fits_without(job: Job, setting: StockSetting, budget_bytes: int) -> bool:
    """Whether its recomputed modules are enough by themselves: then offloading gains nothing."""
    return setting.method is None and least_bytes(job, replace(setting, offload=(), fraction=WHOLE)) <= budget_bytes


def _has_host_link(job: Job, profile: Profile) -> bool:
    return job.cluster.pcie is not None or any(point.kind == "host" for point in profile.links)


def _first_that_fits(job: Job, profile: Profile, family: Family, budget_bytes: int) -> Priced | None:
    """Members are first passed over by what they hold at least, then priced; copies on their way take room as well."""
    if least_bytes(job, family[-1]) > budget_bytes:
        return None
    start = bisect_left(family, True, key=lambda setting: least_bytes(job, setting) <= budget_bytes)
    found: dict[int, Priced] = {}

    def fits(number: int) -> bool:
        found[number] = priced(job, profile, family[number])
        return found[number].most_bytes <= budget_bytes

    number = bisect_left(range(len(family)), True, lo=start, key=fits)
    if number == len(family):
        return None
    return found.get(number) or priced(job, profile, family[number])


Family = tuple[StockSetting, ...]

MILLION = 1_000_000


def families(job: Job, release: str = NEWEST) -> Iterator[Family]:
    """All of them. `release`: of megatron-core, such as `0.17`."""
    most, sets = max(job.partition), tuple(module_sets(job, release))
    yield (NONE,)
    yield (*(block(layers) for layers in range(1, most)), FULL)
    for layers in range(2, most + 1):
        if not any(count % layers for count in job.partition):  # releases before 0.18 need that
            yield (StockSetting(method="uniform", layers=layers),)
    for setting in sets:
        shares = _shares(most) if setting.offload and release >= FRACTION_SINCE else ()
        yield (*(_of_part(setting, share) for share in shares), setting)
        beside = tuple(StockSetting(method="block", layers=layers, offload=setting.offload) for layers in range(1, most))
        if beside and setting.offload and not setting.recompute and offered(beside[0], Facts.of(job, release)):
            yield beside
    facts = Facts.of(job, release)
    for setting in (NONE, *sets):
        overlapped = replace(setting, overlap=True)
        if offered(overlapped, facts) and "moe" not in setting.recompute:
            yield (overlapped,)


def module_sets(job: Job, release: str = NEWEST, least: int = LEAST_ELEMENTS) -> Iterator[StockSetting]:
    """Every set of recomputed and offloaded modules with which the job can train, and in which each makes a difference."""
    facts, shape, kinds = Facts.of(job, release), LayerShape.of(job), tuple(job.model.kinds_of(range(1, job.model.layers + 1)))

    def held(recompute: Modules, offload: Modules) -> list[LayerBytes]:
        setting = StockSetting(recompute=recompute, offload=offload)
        return [layer_bytes(shape, setting, kind, least) for kind in kinds]

    for recompute in _subsets([module.name for module in RECOMPUTED]):
        if not _each_differs(held, recompute, ()):
            continue
        for offload in _subsets([module.name for module in OFFLOADED]):
            setting = StockSetting(recompute=recompute, offload=offload)
            if setting != NONE and offered(setting, facts) and _each_differs(held, recompute, offload):
                yield setting


Modules = tuple[str, ...]


def _each_differs(held: Callable[[Modules, Modules], list[LayerBytes]], recompute: Modules, offload: Modules) -> bool:
    """Whether every module of a set changes what some layer holds."""
    whole = held(recompute, offload)
    return all(held(_without(name, recompute), offload) != whole for name in recompute) and all(
        held(recompute, _without(name, offload)) != whole for name in offload
    )


def _without(name: str, names: Modules) -> Modules:
    return tuple(other for other in names if other != name)


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every subset, the empty one first."""
    return chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))


def _shares(layers: int) -> Iterator[float]:
    """The share of a chunk's layers, for all but the last number of them. A little less than k of n, so that k are taken."""
    return (math.floor(MILLION * count / layers) / MILLION for count in range(1, layers))


def _of_part(setting: StockSetting, share: float) -> StockSetting:
    assert 0 < share < WHOLE, "all of it is the setting itself"
    return StockSetting(recompute=setting.recompute, offload=setting.offload, fraction=share)
