"""The fastest setting of stock Megatron that holds no more than given bytes on its fullest device.

family      less and less is held ──────────────>
            x   x   x   o   o   o                       o: fits. The first that fits is the family's fastest
families ── each one's first that fits ── the fastest of them
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import host_shortage
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.stock.legality import NEWEST
from megatron_lynx.stock.offered import Family, families
from megatron_lynx.stock.price import Priced, least_bytes, priced
from megatron_lynx.stock.setting import StockSetting


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
    return setting.method is None and least_bytes(job, StockSetting(recompute=setting.recompute)) <= budget_bytes


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
