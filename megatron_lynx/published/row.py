"""A published figure and ours, and published runs as jobs on catalogued models and clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_lynx.config import Job
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.validation import validated
from megatron_lynx.yaml_file import read_yaml


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


def catalogued_job(name: str, cluster: str, *, seq: int | None = None, model: dict[str, Any] | None = None, **fields: Any) -> Job:
    """A job on `models/NAME` and `clusters/CLUSTER`. `seq`, `model`: changes of the model; `fields`: the job's other keys."""
    shape = read_yaml(bundled_configs() / f"models/{name}.yaml") | (model or {}) | ({"seq": seq} if seq else {})
    return job_on(shape, cluster, **fields)


def job_on(model: dict[str, Any], cluster: str, **fields: Any) -> Job:
    """A job on `model` and `clusters/CLUSTER`."""
    described = cluster_data(bundled_configs() / f"clusters/{cluster}.yaml")
    return validated(Job, {"model": model, "cluster": described, **fields}, f"a published model on {cluster}")


def published_figures(name: str = "published") -> dict[str, Any]:
    return read_yaml(bundled_configs() / f"{name}.yaml")
