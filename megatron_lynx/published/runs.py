"""Published series of runs of stock Megatron, with the steps and peaks that their owners measured.

    configs/published_launches.yaml   a run is a launch: words that all share, of its model, its series and its own, in this order
    configs/published_more.yaml       a run is a job: that of its series, with the values of its model and its own by their place

A launch is read as a user's is, so that a row also tests the reader. If a word is given twice, Megatron takes the later one. The
speed-up of overlapped exchanges chose the rate of an exchange during compute; other steps of jobs chose no constant.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import bundled_configs, job_from
from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.published.row import Grade, Row, Step, stock_step_s
from megatron_lynx.stock import NONE, OF_POLICY, StockSetting, priced
from megatron_lynx.validation import Part, validated
from megatron_lynx.yaml_file import read_yaml

GB = 1e9


class Run(Part):
    what: str
    model: str | None = None
    cluster: str | None = None
    gpus: int | None = Field(default=None, ge=1)
    add: str = ""
    """Words of a launch."""
    job: dict[str, Any] = Field(default_factory=dict)
    setting: dict[str, Any] = Field(default_factory=dict)
    """Fields of stock's setting (`stock.setting`) in place of those of a job's policy; a launch states its own."""
    graphs: bool = False
    """Whether parts of a job's layers run as CUDA graphs."""
    step_s: float | None = Field(default=None, gt=0)
    tokens_per_s: float | None = Field(default=None, gt=0)
    """Rate of one GPU; replaces `step_s`."""
    peak_gb: float | None = Field(default=None, gt=0)
    """Most bytes allocated, in 1e9."""
    load: float | None = Field(default=None, gt=0)
    """Load of the fullest rank's experts, where a source states one."""
    build: str = ""
    """Commit of Megatron, or its dispatcher, if the rows of a series have several: steps of different ones are not compared."""
    note: str = ""

    def _problems(self) -> Iterator[str]:
        if (self.step_s is None) == (self.tokens_per_s is None):
            yield "needed step_s or tokens_per_s, one of the two"


class Bounds(Part):
    """On errors, in percent."""

    step: float | None = None
    mean: float | None = None
    """On the mean of the steps of all series with this id."""
    ratio: float | None = None
    """On how many times as fast a step is as the first one that it is compared with."""
    peak: float | None = None


class Series(Part):
    id: str
    source: str
    grade: Grade
    cluster: str = ""
    gpus: int = Field(default=1, ge=1)
    compared: bool = False
    """Whether its rows are settings of one workload with ratios to compare."""
    noise_percent: float = Field(default=0.0, ge=0)
    """Difference of two steps that its source takes for equal."""
    model: str = ""
    launch: str = ""
    job: dict[str, Any] | None = None
    bounds: Bounds = Bounds()
    ratios_chose: str | None = None
    """The constant that its ratios calibrated."""
    rows: tuple[Run, ...] = Field(min_length=1)
    publication: str = ""
    """Name shared with other series that are left out together."""
    assumed: tuple[str, ...] = ()
    oddities: tuple[str, ...] = ()


class Published(Part):
    common: str = ""
    models: dict[str, Any] = Field(default_factory=dict)
    series: tuple[Series, ...]

    def _problems(self) -> Iterator[str]:
        named = {(series.id, row.model or series.model) for series in self.series for row in series.rows}
        for series_id, model in sorted(named):
            if model and model not in self.models:
                yield f"{series_id}: model {model!r}, needed one of {', '.join(self.models)}"


def rows(name: str) -> Iterator[Row]:
    """Yield the step of each run of a bundled file, its ratio and its peak, and the mean error of its series.

    Raises `ConfigError` with every problem of the file or of a run.
    """
    file = bundled_configs() / f"{name}.yaml"
    published = validated(Published, read_yaml(file), file)
    for series in published.series:
        yield from _of_series(published, series, file)


def _of_series(published: Published, series: Series, file: Path) -> Iterator[Row]:
    first, errors = dict[str, Row](), list[float]()
    for run in series.rows:
        job, setting, graphs = _run(published, series, run, file)
        measured_s = run.step_s or job.batch.global_ * job.model.seq / (job.gpus * (run.tokens_per_s or 1.0))
        price_s = partial(stock_step_s, setting=setting, graphs=graphs)
        workload = f"{series.id} {run.build}" if series.compared else ""
        step = Step(job, measured_s, price_s, series.grade, workload, series.publication, series.noise_percent / 100)
        row = Row.of_step(series.id, f"{run.what}: step", step, series.bounds.step)
        yield row
        errors.append(abs(row.error))
        base = first.setdefault(run.build, row)
        if series.bounds.ratio is not None and row is not base:
            faster, what = (base.published / row.published, base.computed / row.computed), f"{run.what}: times as fast"
            yield Row(series.id, what, *faster, "", series.bounds.ratio, calibrates=series.ratios_chose)
        if run.peak_gb is not None:
            held = priced(job, analytic_profile(job), setting).most_bytes / GB
            yield Row(series.id, f"{run.what}: peak memory", run.peak_gb, held, "GB", series.bounds.peak)
    if series.bounds.mean is not None:
        what, mean = f"mean error of {len(errors)} steps", sum(errors) / len(errors)
        yield Row(series.id, what, 0.0, mean, "%", series.bounds.mean, error_in="unit")


def _run(published: Published, series: Series, run: Run, file: Path) -> tuple[Job, StockSetting, bool]:
    """A run's job, its setting of stock Megatron, and whether it captures graphs."""
    model = published.models.get(run.model or series.model, {})
    if series.job is not None:
        job = job_from(_merged(_merged(series.job, model), run.job), file)
        return job, replace(OF_POLICY.get(job.policy, NONE), **run.setting), run.graphs
    words = f"{published.common} {model} {series.launch} {run.add}"
    reading = read_launch(shlex.split(words), gpus=run.gpus or series.gpus, planning=False)
    job = job_of(reading, run.cluster or series.cluster, {} if run.load is None else {"model.experts.load": run.load})
    return job, reading.today.setting, reading.today.graphs


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `values` with `changes` in them, mapping by mapping."""
    both = {key: _merged(value, {}) if isinstance(value, dict) else value for key, value in values.items()}
    for key, value in changes.items():
        both[key] = _merged(both.get(key, {}), value) if isinstance(value, dict) else value
    return both
