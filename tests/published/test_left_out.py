"""Leave-one-out errors of published steps."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_lynx.cli import app
from megatron_lynx.errors import ConfigError
from megatron_lynx.prediction import DENSE, WITH_EXPERTS
from megatron_lynx.published import all_rows, runs
from megatron_lynx.published.left_out import FREE, Ratio, left_out, mean_error, with_factors
from megatron_lynx.published.row import Row, Step, catalogued_job, stock_step_s
from megatron_lynx.stock import FULL
from megatron_lynx.yaml_file import read_yaml, write_yaml
from tests.json_answers import ANSWERS

SLOWER = [0.9 if constant.name == "matmul.efficiency" else 1.0 for constant in FREE]


def series(name: str, cluster: str, factors: list[float] | None = None, **fields: Any) -> list[Row]:
    """Steps of a cluster whose constants are these times the catalogue's, at three micro-batch sizes."""
    rows = []
    for micro in (1, 2, 4):
        layout = {"tensor": 2, "sequence_parallel": True}
        job = catalogued_job("llama-7b", cluster, gpus=8, parallel=layout, batch={"micro": micro, "global": 64}, policy="full")
        step = Step(job, 1.0, partial(stock_step_s, setting=FULL), **fields)
        measured_s = with_factors(step, factors or [1.0] * len(FREE))
        rows.append(Row.of_step(name, f"micro-batch {micro}", replace(step, measured_s=measured_s), bound=None))
    return rows


def ignored(done: int, of: int) -> None:
    assert 0 <= done <= of


def test_a_constant_that_other_series_show_improves_the_series_left_out() -> None:
    rows = [row for name in ("one", "another", "a third") for row in series(name, "a100-80g", SLOWER)]
    answer = left_out(rows, ignored)
    assert all(abs(item.catalogued_error) > 4 for item in answer.predicted)
    assert all(abs(item.error) < 0.6 * abs(item.catalogued_error) for item in answer.predicted)
    assert answer.constants["Ampere"]["matmul.efficiency"] < 0.96


def test_a_series_does_not_fit_the_constants_that_predict_it() -> None:
    others = series("others", "a100-80g")
    usual, slow = (left_out([*others, *series("one", "a100-80g", factors)], ignored) for factors in (None, SLOWER))
    of_one = [[item.left_out_s for item in answer.predicted if item.series == "one"] for answer in (usual, slow)]
    assert of_one[0] == of_one[1]


def test_series_of_one_publication_are_left_out_together() -> None:
    rows = [row for name in ("in bf16", "in FP8") for row in series(name, "a100-80g", SLOWER, publication="both")]
    assert all(item.error == item.catalogued_error for item in left_out(rows, ignored).predicted)


def test_another_generation_of_gpus_does_not_count() -> None:
    rows = [*series("one", "a100-80g", SLOWER), *series("another", "h100-80g")]
    assert all(item.left_out_s == item.catalogued_s for item in left_out(rows, ignored).predicted)


def test_factors_stay_within_the_bounds_of_their_constant() -> None:
    step = series("one", "a100-80g")[0].step
    assert step is not None
    beyond, at_most = ([factor if one.name == "matmul.efficiency" else 1.0 for one in FREE] for factor in (9.0, 0.95 / 0.835))
    assert with_factors(step, beyond) == pytest.approx(with_factors(step, at_most))


def test_a_pair_predicted_in_the_wrong_order_is_named() -> None:
    rows = series("one", "a100-80g", workload="llama")
    swapped = [
        replace(row, step=replace(row.step, measured_s=seconds)) for row, seconds in zip(rows, (1.0, 2.0, 1.001), strict=True)
    ]  # type: ignore[type-var]
    answer = left_out(swapped, ignored)
    assert len(answer.ratios) == 3
    wrong = [ratio for ratio in answer.ratios if ratio.reversed]
    assert [(ratio.first.row.what, ratio.second.row.what) for ratio in wrong] == [("micro-batch 1", "micro-batch 2")]
    assert isinstance(wrong[0], Ratio)
    assert any(line.startswith("  wrong order") and "micro-batch 2 / micro-batch 1" in line for line in answer.in_words)


def test_a_pair_within_the_noise_of_its_source_has_no_order() -> None:
    rows = series("one", "a100-80g", workload="llama", noise=0.08)[:2]
    orders = []
    for pair in ((1.0, 1.07), (1.0, 1.09)):
        steps = [replace(row.step, measured_s=seconds) for row, seconds in zip(rows, pair, strict=True)]  # type: ignore[type-var]
        answer = left_out([replace(row, step=step) for row, step in zip(rows, steps, strict=True)], ignored)
        orders.append([ratio.reversed for ratio in answer.ratios])
    assert orders == [[False], [True]]


def test_settings_of_one_layout_are_told_from_layouts() -> None:
    first, second, _ = series("one", "a100-80g", workload="llama")
    again = replace(first, what="the same batch again")
    answer = left_out([first, again, second], ignored)
    assert [ratio.of_settings for ratio in answer.ratios] == [True, False, False]
    assert any(line.startswith("ratios between settings of one layout: 0.0 % of 1, 0 in") for line in answer.in_words)
    assert set(answer.as_json["ratio_error_percent"]) == {"settings of one layout", "layouts"}


def test_validate_leaves_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*series("one", "a100-80g", SLOWER, workload="llama"), *series("another", "a100-80g", SLOWER)]
    monkeypatch.setattr("megatron_lynx.published.all_rows", lambda: rows)
    shown = CliRunner().invoke(app, ["validate", "--leave-one-out"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "dense: " in shown.stdout
    answer = json.loads(CliRunner().invoke(app, ["validate", "--leave-one-out", "--json"], catch_exceptions=False).stdout)
    assert ANSWERS["validate"].model_validate(answer, strict=True).model_dump(exclude_unset=True) == answer
    assert [row["series"] for row in answer["rows"]] == ["one"] * 3 + ["another"] * 3
    assert answer["totals"]["dense"]["A"] > 0


def test_an_unknown_key_of_a_published_launch_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = read_yaml(runs.bundled_configs() / "published_launches.yaml")
    data["series"][0]["rows"][0] |= {"steps_s": 1.0}
    data["series"][1]["model"] = "qwen4"
    (tmp_path / "published_launches.yaml").write_text(write_yaml(data))
    monkeypatch.setattr(runs, "bundled_configs", lambda: tmp_path)
    with pytest.raises(ConfigError) as raised:
        list(runs.rows("published_launches"))
    assert any("series.0.rows.0.steps_s" in str(problem) for problem in raised.value.problems)


def test_a_published_launch_of_an_unknown_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = read_yaml(runs.bundled_configs() / "published_launches.yaml")
    data["series"][1]["model"] = "qwen4"
    (tmp_path / "published_launches.yaml").write_text(write_yaml(data))
    monkeypatch.setattr(runs, "bundled_configs", lambda: tmp_path)
    with pytest.raises(ConfigError, match="qwen4"):
        list(runs.rows("published_launches"))


@pytest.mark.long
def test_the_errors_that_answers_state_are_those_of_grade_a() -> None:
    """All series that are published, each step priced sixteen times: minutes."""
    answer = left_out(all_rows(), ignored)
    for stated, family in ((DENSE, "dense"), (WITH_EXPERTS, "with experts")):
        total = answer.total(family, "A")
        ratios = [ratio for ratio in answer.ratios if ratio.first.family == family]
        layouts = [ratio.error for ratio in ratios if not ratio.of_settings]
        settings = [ratio.error for ratio in ratios if ratio.of_settings and ratio.first.step.grade == "A"]
        assert total is not None
        assert abs(total - 100 * stated.steps) < 0.5
        assert mean_error(settings) <= 100 * stated.ratios
        assert abs(mean_error(layouts) - 100 * (stated.layouts or stated.ratios)) < 1
