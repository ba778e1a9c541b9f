"""A published figure and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from megatron_lynx.config import Job
from megatron_lynx.config.loader import bundled_configs, job_from
from megatron_lynx.cost.update import update_s
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.stock import StockSetting, priced
from megatron_lynx.yaml_file import read_yaml

Grade = Literal["A", "B", "C"]
"""A: nearly all settings are stated; B: one is not; C: routing, host or layout are unknown."""


@dataclass(frozen=True)
class Step:
    job: Job
    measured_s: float
    price_s: Callable[[Job], float]
    """Takes the job, so that a caller can change constants of its cluster."""
    grade: Grade = "A"
    workload: str = ""
    """Equal for steps that differ in their settings only, so that their ratio is a prediction, too. Empty: compared with none."""
    publication: str = ""
    """Equal for series of one publisher and machine, which are left out together. Empty: the row's source."""
    noise: float = 0.0
    """Relative difference of two steps that their source takes for the same."""

    @property
    def tokens(self) -> int:
        return self.job.batch.global_ * self.job.model.seq


@dataclass(frozen=True)
class Row:
    """A published figure and ours. `bound`: on the error's absolute value, in its unit; None if there is no claim."""

    source: str
    what: str
    published: float
    computed: float
    unit: str
    bound: float | None
    error_in: Literal["percent", "unit"] = "percent"
    """Whether the error is relative, or the difference."""
    calibrates: str | None = None
    """The constant that this row calibrated, so that its error proves nothing."""
    step: Step | None = None

    @classmethod
    def of_step(cls, source: str, what: str, step: Step, bound: float | None, calibrates: str | None = None) -> Row:
        return cls(source, what, step.measured_s, step.price_s(step.job), "s", bound, calibrates=calibrates, step=step)

    @property
    def error(self) -> float:
        """Ours minus theirs."""
        difference = self.computed - self.published
        return 100 * difference / self.published if self.error_in == "percent" else difference

    @property
    def within(self) -> bool | None:
        """Whether the error is within its bound, if it has one. Bounds are printed figures, so rounding is allowed for."""
        return None if self.bound is None else abs(self.error) <= self.bound + 1e-9

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "row": self.what,
            "published": self.published,
            "computed": self.computed,
            "unit": self.unit,
            "error": self.error,
            "error_unit": "%" if self.error_in == "percent" else self.unit,
            "bound": self.bound,
            "within": self.within,
            "calibrates": self.calibrates,
        }


def stock_step_s(job: Job, setting: StockSetting, *, graphs: bool = False) -> float:
    """Return the longest step of stock Megatron's setting, simulated, with its update."""
    costs = analytic_profile(job).issued(graphs=graphs)
    return priced(job, costs, setting).step.most_s + update_s(job, costs)


def catalogued_job(name: str, cluster: str, *, model: Mapping[str, Any] = MappingProxyType({}), **fields: Any) -> Job:
    """`model`: values in place of the catalogue's."""
    data = {"model": {"like": f"models/{name}", **model}, "cluster": f"clusters/{cluster}", **fields}
    return job_from(data, bundled_configs() / "published.yaml")


def published_figures() -> dict[str, Any]:
    return read_yaml(bundled_configs() / "published.yaml")
