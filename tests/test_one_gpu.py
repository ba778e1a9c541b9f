"""The benchmark for one GPU, as far as a CPU rank can run it: predictions beside measurements; what goes wrong is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_figures.__main__ import main as figures_main
from benchmarks.gpu_figures.figure import Figure, Part, page
from benchmarks.gpu_figures.rates import fitted
from benchmarks.one_gpu.__main__ import PAGE, main
from benchmarks.one_gpu.figures import covered_s, fingerprint
from benchmarks.one_gpu.results import Results
from benchmarks.one_gpu.running import _left_behind
from benchmarks.one_gpu.settings import settings_of
from benchmarks.one_gpu.subjects import Subject, subjects
from megatron_lynx.config.cluster import Matmul
from megatron_lynx.profiler.profile import load_profile
from megatron_lynx.testbed.candidates import FULL, NONE, SELECTIVE
from megatron_lynx.testbed.ranks import RankError


def subject(name: str, *, dry: bool) -> Subject:
    return next(each for each in subjects(dry=dry) if each.name == name)


@pytest.mark.slow
def test_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings are measured beside their predictions, with stock's bits. Stock's layernorm, which Megatron cannot run without
    Transformer Engine, is recorded with its error, and what comes behind it is measured."""
    only = ["everything recomputed", "planned, between", "layernorm"]
    status = main(["llama", "--dry-run", "--steps", "1", "--out", str(tmp_path), "--only", *only])
    assert status == 0, capsys.readouterr().out
    results = json.loads((tmp_path / "one-gpu-llama.json").read_text())
    rows = {row["setting"]: row for row in results["rows"]}
    assert next(iter(rows)) == "stock none"
    assert [*rows][-1] == "again: stock none"
    for name in ("stock none", "ours, everything recomputed", "ours, planned, between", "again: stock none"):
        row = rows[name]
        assert row["error"] is None
        assert (row["losses_equal"], row["gradients_equal"]) == (True, True)
        assert min(row["passes_s"], row["issued_s"], row["update_s"], row["peak_bytes"]) > 0
    layernorm = rows["stock layernorm"]
    assert layernorm["error"] or layernorm["gradients_equal"]
    assert rows["ours, everything recomputed"]["recomputations"] == 2 * 2 * 2, "two halves of two layers of two micro-batches"
    assert rows["stock none"]["recomputations"] is None
    assert rows["ours, everything recomputed"]["forward_bytes"] < rows["stock none"]["forward_bytes"]
    assert set(results["predicted"]) == set(rows) - {"again: stock none"}
    assert "| ours, planned, between |" in (written := (tmp_path / PAGE).read_text())
    capsys.readouterr()
    assert main(["--read", str(tmp_path)]) == 0
    assert capsys.readouterr().out == written


def test_what_ends_its_process_is_named(tmp_path: Path) -> None:
    """A fresh process goes on with what comes behind it."""
    Results("llama", "", under_way=FULL.name, rows=[{"setting": NONE.name}]).write(tmp_path)
    error = RankError(0, "ended without an answer (exit status -9)", lost=True)
    left, results = _left_behind([NONE, FULL, SELECTIVE], tmp_path, subject("llama", dry=True), error)
    assert left == [SELECTIVE]
    assert results.rows[-1]["setting"] == FULL.name
    assert "exit status -9" in results.rows[-1]["error"]
    assert Results.read(tmp_path, "llama").under_way is None


@pytest.mark.parametrize("name", ["llama", "small", "gpt", "stage", "bits"])
def test_what_is_predicted_fits_one_gpu(name: str) -> None:
    settings, refused = settings_of(subject(name, dry=False))
    predicted = {each.name: each.predicted for each in settings}
    none, full = predicted[NONE.name], predicted[FULL.name]
    assert not refused
    assert max(each.peak_bytes for each in predicted.values()) < 70e9
    between = predicted["ours, planned, between"]
    assert full.peak_bytes < between.peak_bytes <= none.peak_bytes
    assert none.device_s <= between.device_s < full.device_s


def test_fingerprints_differ_by_one_bit_and_by_order() -> None:
    one = torch.randn(5, 7)
    other, turned = one.clone(), one.clone()
    other[3, 2] = torch.nextafter(one[3, 2], torch.tensor(9.0))
    turned[[0, 1]] = one[[1, 0]]
    assert fingerprint(one) == fingerprint(one.clone())
    assert len({tuple(fingerprint(each)) for each in (one, other, turned)}) == 3


def test_time_that_two_kernels_share_counts_once() -> None:
    assert covered_s([(0, 1e6), (5e5, 2e6), (3e6, 4e6), (3.5e6, 3.6e6)]) == pytest.approx(3.0)


@pytest.mark.long
def test_figures_are_compared_with_what_is_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run; steps are predicted anew from the layer that it measures."""
    assert figures_main(["rates", "llama", "--dry-run", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    rates, llama = json.loads((tmp_path / "gpu-figures.json").read_text())
    assert {figure["what"] for figure in rates["figures"]} >= {"cube 1024", "both", "copy, read and written"}
    named = {(figure["of"], figure["what"]): figure for figure in llama["figures"]}
    forward = named["mlp", "forward"]
    assert forward["measured"] == pytest.approx(
        sum(figure["measured"] for (of, what), figure in named.items() if of.startswith("mlp: ") and what == "forward")
    )
    assert forward["ratio"] == pytest.approx(forward["measured"] / forward["stated"])
    assert ("host time: attention", "recomputed, backward") in named
    profile = load_profile(tmp_path / "profile-llama.yaml")
    dry = subject("llama", dry=True)
    priced, measured = (settings_of(dry, each)[0][0].predicted for each in (None, profile))
    layers = sum(half.forward_s + half.backward_s for half in (profile.attention, profile.mlp))
    assert measured.device_s > dry.job.microbatches * dry.job.model.layers * layers > priced.device_s


def test_a_cluster_file_is_found_again() -> None:
    """From seconds that follow its formula, the fit takes the efficiency and the half size that were put in."""
    matmul = Matmul(bf16_tflop_per_s=900, fp32_tflop_per_s=60, efficiency=0.7, half_size=1234, attention_efficiency=0.5)
    timed = [(2.0 * size**3, matmul.gemm_s(2.0 * size**3, "bf16")) for size in (1024, 2048, 4096, 8192)]
    assert fitted(timed, matmul.peak_flop_per_s("bf16")) == pytest.approx((0.7, 1234))


def test_what_differs_comes_first() -> None:
    near, far = Figure("a", "near", 100.0, 107.0, "ms"), Figure("a", "far", 100.0, 70.0, "ms")
    assert (near.differs, far.differs) == (False, True)
    said = page([Part("one", [near, far])], {})
    assert said.index("| a | far") < said.index("## one") < said.index("| a | near")
