"""Published launches, with the steps and peaks that their owners measured: `configs/published_launches.yaml`.

    common, model, series, row      words of a launch, in this order      row      seconds or tokens/s, and bytes

A launch is read as a user's is, so that a row also tests the reader. Of a word given twice Megatron takes the later one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial

from pydantic import Field

from megatron_lynx.config.loader import bundled_configs
from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.published.row import Grade, Row, Step, stock_step_s
from megatron_lynx.stock import priced
from megatron_lynx.validation import Part, validated
from megatron_lynx.yaml_file import read_yaml

GB = 1e9


class Launch(Part):
    what: str
    model: str | None = None
    cluster: str | None = None
    gpus: int | None = Field(default=None, ge=1)
    add: str = ""
    step_s: float | None = Field(default=None, gt=0)
    tokens_per_s: float | None = Field(default=None, gt=0)
    """Rate of one GPU; replaces `step_s`."""
    peak_gb: float | None = Field(default=None, gt=0)
    """Most bytes allocated, in 1e9."""
    load: float | None = Field(default=None, gt=0)
    """Load of the fullest rank's experts, where a source states one."""
    build: str = ""
    """Commit of Megatron, if the rows of a series have several: steps of different builds are not compared."""
    note: str = ""

    def _problems(self) -> Iterator[str]:
        if (self.step_s is None) == (self.tokens_per_s is None):
            yield "needed step_s or tokens_per_s, one of the two"


class Series(Part):
    id: str
    source: str
    grade: Grade
    cluster: str
    gpus: int = Field(ge=1)
    compared: bool = False
    """Whether its rows are settings of one workload with ratios to compare."""
    noise_percent: float = Field(default=0.0, ge=0)
    """Difference of two steps that its source takes for equal."""
    model: str
    launch: str
    rows: tuple[Launch, ...] = Field(min_length=1)
    publication: str = ""
    """Name shared with other series that are left out together."""
    assumed: tuple[str, ...] = ()


class Launches(Part):
    common: str
    models: dict[str, str]
    series: tuple[Series, ...]

    def _problems(self) -> Iterator[str]:
        named = {(series.id, row.model or series.model) for series in self.series for row in series.rows}
        for series_id, model in sorted(named):
            if model not in self.models:
                yield f"{series_id}: model {model!r}, needed one of {', '.join(self.models)}"


def rows() -> Iterator[Row]:
    """Yield the step of each launch, and its peak. Raises `ConfigError` with every problem of the file or of a launch."""
    file = bundled_configs() / "published_launches.yaml"
    launches = validated(Launches, read_yaml(file), file)
    for series in launches.series:
        for launch in series.rows:
            model = launches.models[launch.model or series.model]
            yield from _of_launch(series, launch, f"{launches.common} {model} {series.launch} {launch.add}")


def _of_launch(series: Series, launch: Launch, words: str) -> Iterator[Row]:
    reading = read_launch(shlex.split(words), gpus=launch.gpus or series.gpus, planning=False)
    job = job_of(reading, launch.cluster or series.cluster, {} if launch.load is None else {"model.experts.load": launch.load})
    tokens = job.batch.global_ * job.model.seq
    measured_s = launch.step_s or tokens / (job.gpus * (launch.tokens_per_s or 1.0))
    price_s = partial(stock_step_s, setting=reading.today.setting, graphs=reading.today.graphs)
    workload = f"{series.id} {launch.build}" if series.compared else ""
    step = Step(job, measured_s, price_s, series.grade, workload, series.publication, series.noise_percent / 100)
    yield Row.of_step(series.id, f"{launch.what}: step", step, bound=None)
    if launch.peak_gb is not None:
        held = priced(job, analytic_profile(job), reading.today.setting).most_bytes / GB
        yield Row(series.id, f"{launch.what}: peak memory", launch.peak_gb, held, "GB", bound=None)
