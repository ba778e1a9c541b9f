"""Leave-one-out errors: each series of published steps, predicted with constants that were fitted to the other publications.

    steps of all series ──price──> errors, and how each constant changes each step          (log seconds, central differences)
    for each series:    least squares on the other series of its generation ──> constants ──price──> its steps

A constant is fitted as one factor for all clusters of a GPU generation, within physical bounds, and pulled towards the
catalogue: a factor of exp(`spread`) costs as much as an error of `NOISE` in one series. Steps of grade B count a quarter, C
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.beside import Watch
from megatron_lynx.config.cluster import Cluster
from megatron_lynx.published.row import Grade, Row, Step


class Constant(NamedTuple):
    part: str
    field: str
    least: float
    most: float
    spread: float
    """Logarithm of a usual factor between the catalogue's figure and a fitted one."""
    meaning: str

    @property
    def name(self) -> str:
        return f"{self.part}.{self.field}"

    def of(self, cluster: Cluster) -> float:
        part = getattr(cluster, self.part)
        return float(getattr(part, self.field) or 0.0) if part is not None else 0.0


FREE = (
    Constant("matmul", "efficiency", 0.4, 0.95, 0.1, "share of the peak that very large GEMMs reach"),
    Constant("matmul", "half_size", 200, 4000, 0.5, "size at which a GEMM reaches half of that"),
    Constant("fp8", "efficiency", 0.4, 0.9, 0.15, "share of the FP8 peak that very large GEMMs reach"),
    Constant("host_time", "counts_us", 50, 3000, 0.5, "wait of a device for the host between routing and exchange"),
    Constant("hbm", "efficiency", 0.5, 0.95, 0.15, "share of memory bandwidth that kernels between GEMMs reach"),
    Constant("nvlink", "efficiency", 0.4, 0.95, 0.2, "share of NVLink that collectives reach"),
    Constant("nic", "efficiency", 0.3, 0.95, 0.3, "share of the NIC that messages reach"),
)
GENERATIONS = {
    "Ampere": ("a100", "a800"),
    "Hopper": ("h100", "h800", "h200", "h20", "gh200"),
    "Blackwell": ("b200", "gb200"),
    "Blackwell Ultra": ("b300", "gb300"),
}
FAMILIES = ("dense", "with experts")
WEIGHTS: dict[Grade, float] = {"A": 1.0, "B": 0.25, "C": 0.0}
NOISE = 0.05
DIFFERENCE = 0.02
"""Logarithm of the factor by which a constant is changed to see its effect."""
SAME = 0.01
"""Settings whose published steps differ by less are not ordered, unless their source shows a larger noise."""

Floats = NDArray[np.float64]


def generation_of(cluster: Cluster) -> str:
    names = (name for name, prefixes in GENERATIONS.items() if cluster.name.startswith(prefixes))
    return next(names, cluster.name)


def with_factors(step: Step, factors: Sequence[float]) -> float:
    """Return the seconds of a step if its cluster's free constants are these times the catalogue's, within bounds."""
    cluster = step.job.cluster
    for constant, factor in zip(FREE, factors, strict=True):
        value, part = constant.of(cluster), getattr(cluster, constant.part)
        if value and factor != 1.0:
            bounded = min(max(factor * value, constant.least), constant.most)
            cluster = cluster.model_copy(update={constant.part: part.model_copy(update={constant.field: bounded})})
    return step.price_s(step.job if cluster is step.job.cluster else step.job.model_copy(update={"cluster": cluster}))


@dataclass(frozen=True)
class Predicted:
    row: Row
    step: Step
    catalogued_s: float
    left_out_s: float

    @property
    def series(self) -> str:
        return self.row.source

    @property
    def family(self) -> str:
        return FAMILIES[self.step.job.model.experts is not None]

    @property
    def catalogued_error(self) -> float:
        return 100 * (self.catalogued_s / self.step.measured_s - 1)

    @property
    def error(self) -> float:
        return 100 * (self.left_out_s / self.step.measured_s - 1)

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "series": self.series,
            "row": self.row.what,
            "grade": self.step.grade,
            "family": self.family,
            "published_s": self.step.measured_s,
            "catalogued_s": self.catalogued_s,
            "left_out_s": self.left_out_s,
            "error_percent": self.error,
        }


@dataclass(frozen=True)
class Ratio:
    """Two steps of one workload: how many times as long, by token, the second takes."""

    first: Predicted
    second: Predicted

    @property
    def of_settings(self) -> bool:
        """Whether both have the same GPUs, layout and batch. Otherwise layouts are compared."""
        jobs = self.first.step.job, self.second.step.job
        return len({(job.gpus, job.parallel, job.batch) for job in jobs}) == 1

    @property
    def published(self) -> float:
        return self._ratio([item.step.measured_s for item in (self.first, self.second)])

    @property
    def predicted(self) -> float:
        return self._ratio([item.left_out_s for item in (self.first, self.second)])

    def _ratio(self, seconds: Sequence[float]) -> float:
        first, second = (value / item.step.tokens for value, item in zip(seconds, (self.first, self.second), strict=True))
        return second / first

    @property
    def error(self) -> float:
        return 100 * (self.predicted / self.published - 1)

    @property
    def reversed(self) -> bool:
        same = max(SAME, log(1 + self.first.step.noise))
        return abs(log(self.published)) > same and (self.published > 1) != (self.predicted > 1)


@dataclass(frozen=True)
class Errors:
    steps: int
    catalogued: float
    left_out: float
    bias: float
    ratios: int
    ratio_error: float | None
    reversed: int

    @classmethod
    def of(cls, items: Sequence[Predicted], ratios: Sequence[Ratio]) -> Errors:
        return cls(
            steps=len(items),
            catalogued=mean_error(item.catalogued_error for item in items),
            left_out=mean_error(item.error for item in items),
            bias=sum(item.error for item in items) / len(items),
            ratios=len(ratios),
            ratio_error=mean_error(ratio.error for ratio in ratios) if ratios else None,
            reversed=sum(ratio.reversed for ratio in ratios),
        )


@dataclass(frozen=True)
class LeftOut:
    predicted: tuple[Predicted, ...]
    constants: dict[str, dict[str, float]]
    """By generation: the factors that fit all of its series."""
    byte_errors: tuple[float, ...]
    """Errors of published peaks, in percent; nothing is fitted to them."""

    @cached_property
    def ratios(self) -> tuple[Ratio, ...]:
        by_workload: dict[str, list[Predicted]] = {}
        for item in self.predicted:
            if item.step.workload:
                by_workload.setdefault(item.step.workload, []).append(item)
        return tuple(Ratio(*pair) for items in by_workload.values() for pair in combinations(items, 2))

    @cached_property
    def by_series(self) -> tuple[tuple[str, str, Grade, Errors], ...]:
        keys = dict.fromkeys((item.series, item.family, item.step.grade) for item in self.predicted)
        return tuple((*key, self._errors_of(key)) for key in keys)

    def _errors_of(self, key: tuple[str, str, Grade]) -> Errors:
        items = [item for item in self.predicted if (item.series, item.family, item.step.grade) == key]
        return Errors.of(items, [ratio for ratio in self.ratios if ratio.first in items])

    def total(self, family: str, grade: Grade) -> float | None:
        errors = [one.left_out for _, of, graded, one in self.by_series if (of, graded) == (family, grade)]
        return mean_error(errors) if errors else None

    @property
    def _ratios_by_kind(self) -> dict[str, list[Ratio]]:
        settings, layouts = ([ratio for ratio in self.ratios if ratio.of_settings == same] for same in (True, False))
        return {"settings of one layout": settings, "layouts": layouts}

    @property
    def in_words(self) -> Iterator[str]:
        for family in FAMILIES:
            totals = {grade: self.total(family, grade) for grade in WEIGHTS}
            graded = (f"{total:.1f} % of grade {grade}" for grade, total in totals.items() if total is not None)
            yield f"{family}: {', '.join(graded)} (means of series, left out)"
        yield f"bytes: {mean_error(self.byte_errors):.1f} % of {len(self.byte_errors)} peaks"
        for name, ratios in self._ratios_by_kind.items():
            wrong, error = [ratio for ratio in ratios if ratio.reversed], mean_error(ratio.error for ratio in ratios)
            yield f"ratios between {name}: {error:.1f} % of {len(ratios)}, {len(wrong)} in the wrong order"
            for ratio in wrong:
                found = f"{ratio.predicted:.2f} for {ratio.published:.2f}"
                yield f"  wrong order, {found}: {ratio.first.series}: {ratio.second.row.what} / {ratio.first.row.what}"
        for generation, factors in self.constants.items():
            changed = ", ".join(f"{name} x {factor:.2f}" for name, factor in factors.items())
            yield f"all series of {generation} would have {changed}"

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "rows": [item.as_json for item in self.predicted],
            "totals": {family: {grade: self.total(family, grade) for grade in WEIGHTS} for family in FAMILIES},
            "byte_error_percent": mean_error(self.byte_errors),
            "ratio_error_percent": {
                name: mean_error(ratio.error for ratio in ratios) for name, ratios in self._ratios_by_kind.items()
            },
            "wrong_order": [[ratio.first.row.what, ratio.second.row.what] for ratio in self.ratios if ratio.reversed],
            "constants": self.constants,
        }


def mean_error(errors: Iterable[float]) -> float:
    sizes = [abs(error) for error in errors]
    return sum(sizes) / len(sizes) if sizes else 0.0


def left_out(rows: Sequence[Row], watch: Watch) -> LeftOut:
    """Predict each step of `rows`. `watch`: called with the number of priced steps, and of all."""
    steps = [(row, row.step) for row in rows if row.step is not None]
    effects, total = [], 2 * len(steps)
    for done, (_, step) in enumerate(steps):
        effects.append(_effects(step))
        watch(done, total)
    catalogued_s = [step.price_s(step.job) for _, step in steps]
    residuals = np.array([log(step.measured_s / priced_s) for (_, step), priced_s in zip(steps, catalogued_s, strict=True)])
    slopes, predicted = np.array(effects), []
    for done, (row, step) in enumerate(steps):
        factors = fitted(slopes, residuals, _weights(steps, generation_of(step.job.cluster), publication_of(row, step)))
        predicted.append(Predicted(row, step, catalogued_s[done], with_factors(step, factors)))
        watch(len(steps) + done, total)
    constants = {}
    for name in dict.fromkeys(generation_of(step.job.cluster) for _, step in steps):
        factors = fitted(slopes, residuals, _weights(steps, name, without=None))
        constants[name] = dict(zip((one.name for one in FREE), factors, strict=True))
    peaks = tuple(row.error for row in rows if "peak memory" in row.what)
    return LeftOut(tuple(predicted), constants, peaks)


def _effects(step: Step) -> list[float]:
    """Return the change of log seconds with the logarithm of each constant."""
    effects = []
    for at in range(len(FREE)):
        longer, shorter = (
            with_factors(step, [exp(sign * DIFFERENCE) if other == at else 1.0 for other in range(len(FREE))]) for sign in (1, -1)
        )
        effects.append(log(longer / shorter) / (2 * DIFFERENCE))
    return effects


def _weights(steps: Sequence[tuple[Row, Step]], generation: str, without: str | None) -> Floats:
    """Return the weights of steps in the fit of a generation without one publication: each series counts once."""
    counts = Counter(row.source for row, _ in steps)
    return np.array(
        [
            WEIGHTS[step.grade] / counts[row.source]
            if generation_of(step.job.cluster) == generation and publication_of(row, step) != without
            else 0.0
            for row, step in steps
        ]
    )


def publication_of(row: Row, step: Step) -> str:
    return step.publication or row.source


def fitted(slopes: Floats, residuals: Floats, weights: Floats) -> list[float]:
    """Return the factors of the constants by weighted least squares, pulled towards 1."""
    pull = np.diag([(NOISE / constant.spread) ** 2 for constant in FREE])
    normal = slopes.T @ (weights[:, None] * slopes) + pull
    logs = np.linalg.solve(normal, slopes.T @ (weights * residuals))
    return [exp(float(value)) for value in logs]
