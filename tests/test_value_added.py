"""The table of what plans gain over stock's best: parts are a whole step, no bound is above its plan, rows have 80 columns."""

from __future__ import annotations

import pytest

from benchmarks.value_added import PARTS, RATIOS, main, parts_of, row, subject_of, value_of
from megatron_lynx.config.loader import bundled_configs
from megatron_lynx.cost.update import update_s
from megatron_lynx.stock.price import priced
from tests.long import long

pytestmark = pytest.mark.slow

JOBS = bundled_configs() / "jobs"


@pytest.mark.parametrize("name", ["llama3-8b-a100-80g", *long("mixtral-8x7b-h800-80g", "llama3-70b-h800-80g")])
def test_parts_are_a_whole_step_and_each_mechanism_helps(name: str) -> None:
    subject = subject_of(JOBS / f"{name}.yaml")
    answer, value = subject.answer(), value_of(subject)
    assert answer.stock is not None
    assert value is not None
    setting, parts = answer.stock.setting, value.parts
    assert parts == parts_of(subject.job, subject.profile, setting)
    assert parts.step_s == pytest.approx(priced(subject.job, subject.profile, setting).step.most_s + update_s(*subject[1:3]))
    assert 0 < parts.wgrad < parts.rest
    assert (parts.TP > 0) == (subject.job.parallel.tensor > 1)
    assert (parts.exchanges > 0) == (subject.job.parallel.expert > 1)
    for choice, pieces, first, waits, pipe in zip(*(value.ratios[name] for name in RATIOS), strict=True):
        assert pipe <= waits <= pieces <= choice
        assert first <= pieces


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["value_added", str(JOBS / "llama3-8b-a100-80g.yaml"), "--layouts"])
    main()
    out, progress = capsys.readouterr()
    assert {len(line) for line in out.splitlines()} == {0, 80}
    assert progress.startswith("1 of 1, ")


def test_names_that_are_too_long_stay_different() -> None:
    names = [f"llama3-70b-64b200-{recipe}-bridge" for recipe in ("bf16", "mxfp8", "fp8cs")]
    rows = [row(name, ["1.0"] * len(PARTS), PARTS) for name in names]
    assert {len(line) for line in rows} == {80}
    assert len(set(rows)) == len(names)
