"""Published results: every bound that is claimed holds."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from megatron_lynx.cli import app
from megatron_lynx.planner import fitting
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.published import all_rows, yuan
from megatron_lynx.published.pipeoffload import copy_to_compute_ratio
from megatron_lynx.published.row import Row, published_figures
from megatron_lynx.solver.stages import Stages
from tests.stock.parts import memory_of_stages

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Computed once, which takes its seconds."""
    return all_rows()


def test_rows_are_within_their_bound(rows: list[Row]) -> None:
    beyond = [row for row in rows if row.within is False]
    assert [(row.source, row.what, row.published, row.computed, row.error) for row in beyond] == []


def test_rows_cover_the_tables(rows: list[Row]) -> None:
    """Yuan: 11 ratios of figure 7, with their rest and without; 15 runs of figure 9 twice, their choices, mean and worst error;
    the demo's 3 x 2 utilisations, 2 figures of memory, 3 x 2 throughputs. Korthikanti: figures of 6 and 10, tables of 3 x 5 and
    3 x 4, two gains. PipeOffload: 6 x 4. Of four series of steps each row and the mean error; NVIDIA's recipes are
    5 + 6 + 3 runs, in bf16 and in FP8; 12 peaks. Two runs of overlapped exchanges,
    one of them with delayed weight gradients, the other with a peak: 3 + 2 steps, 2 + 1 ratios."""
    sources = ("Yuan", "Korthikanti", "PipeOffload", "Narayanan", "NVIDIA, dgxc", "Zero Bubble", "NVIDIA, Megatron-Bridge")
    counts = {source: sum(row.source.startswith(source) for row in rows) for source in sources}
    read = {"Yuan": 2 * 11 + 2 * 15 + 3 + 6 + 2 + 6, "Korthikanti": 6 + 10 + 3 * 5 + 3 * 4 + 2, "PipeOffload": 24}
    assert counts == read | {
        "Narayanan": 10 + 1,
        "NVIDIA, dgxc": 2 * (5 + 6 + 3 + 1),
        "Zero Bubble": 12 + 1 + 12,
        "NVIDIA, Megatron-Bridge": 3 + 2 + 2 + 1 + 1,
    }


def test_most_of_the_rest_that_yuan_et_al_measured_is_counted() -> None:
    """What one layer makes again and has in hand, messages, buffers, workspaces; the remainder of 1.2e9 B is their fork's."""
    config = published_figures()["yuan_atc24"]["figure7_max_memory_allocated_bytes"]["config"]
    job = yuan.endless(yuan.job_of({**config, "ckpt": "ours"}))
    memory = fitting(Stages(job, analytic_profile(job))).memory[0]
    counted = memory.recomputed + memory.in_hand + memory.messages + memory.buffers + memory.rest
    assert 0.9e9 < counted < yuan.REST_BYTES


def test_peaks_of_another_paper_are_those_of_its_second_stage_running_backward(rows: list[Row]) -> None:
    theirs = [row for row in rows if row.source.startswith("Zero Bubble")]
    jobs = [row.step.job for row in theirs if row.step is not None]
    peaks_of_rows = [row for row in theirs if "peak memory" in row.what]
    assert len(peaks_of_rows) == len(jobs) == 12
    assert not any(row.calibrates for row in peaks_of_rows)
    for job in jobs:
        stages = memory_of_stages(job)
        fullest = max(stages, key=lambda memory: memory.total)
        assert (stages.index(fullest), fullest.moment) == (1, "backward")


def test_k_without_shared_key_value_heads_is_their_formula() -> None:
    """10 / (3(6h + s)) x B_c / B_o, with 20sbh bytes of a layer: what the figure's caption refers to, and its figures are not."""
    hidden, seq = 4096, 8192
    forward = seq * hidden * (24 * hidden + 4 * seq)
    formula = 10 / (3 * (6 * hidden + seq)) * 220e12 / 15e9
    assert copy_to_compute_ratio(20 * seq * hidden, forward, 220e12) == pytest.approx(formula)


def test_the_rows_that_chose_a_constant_say_so_and_are_few(rows: list[Row]) -> None:
    """At most four runs of Yuan et al.: two throughputs of figure 9, its choices at 80 and at 128 GPUs, one run of the demo."""
    chose = {row.what: row.calibrates for row in rows if row.calibrates and row.source.startswith("Yuan")}
    assert list(chose.values()).count("h800-80g: matmul.efficiency") == 2
    assert "h800-80g: pcie.efficiency, on 80 and 128 GPUs" in chose.values()
    assert len(chose) == 4


def test_errors_and_bounds() -> None:
    assert Row("s", "w", 50.0, 51.0, "GiB", bound=2.0).within is True
    assert Row("s", "w", 50.0, 51.0, "GiB", bound=0.5, error_in="unit").within is False
    assert Row("s", "w", 50.0, 51.0, "GiB", bound=None).within is None


def test_validate_prints_every_row_and_says_no_where_a_bound_is_missed(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lynx.published.all_rows", lambda: rows)
    result = CliRunner().invoke(app, ["validate", "--json"], catch_exceptions=False)
    shown = json.loads(result.stdout)["rows"]
    assert [row["row"] for row in shown] == [row.what for row in rows]
    assert result.exit_code == int(any(row["within"] is False for row in shown))
    assert "figure 9" in CliRunner().invoke(app, ["validate"]).stdout


def test_no_step_of_the_four_series_chose_a_constant(rows: list[Row]) -> None:
    series = [row for row in rows if row.source.startswith(("Narayanan", "NVIDIA, dgxc", "Zero Bubble"))]
    assert not any(row.calibrates for row in series)
    assert [row.bound for row in series if row.what.startswith("mean")] == [5.0, 5.0, 6.0, 5.0]
