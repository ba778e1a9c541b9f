"""The real `pretrain_gpt.py` of a Megatron-LM checkout, 0.16 to 0.19, as it is.

MEGATRON_LM_DIR names the checkout. Local layers and Transformer Engine's, mock data, dropout 0.1, five iterations: what is
printed under a plan equals stock's, and in the first two, which are checked, so does every gradient; also behind a checkpoint
that is resumed under another plan. A broken replay is found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megatron_lynx.plan.plan import Plan

from ..engines import folder_of
from .launched import ENGINE, MODEL, flags_of, launch, offloading, plan_of, saved
from .test_patches import apply

VERSION, MINOR = "megatron/core/package_info.py", re.compile(r"^MINOR = (\d+)", re.MULTILINE)
MODULES_OF_0_16 = ("six", "regex")
"""Imported by its scripts, beside what megatron-core requires."""


@pytest.fixture(scope="module")
def script() -> Path:
    checkout = Path(os.environ.get("MEGATRON_LM_DIR", "")).resolve()
    if not (checkout / "pretrain_gpt.py").is_file():
        pytest.skip(f"no pretrain_gpt.py in {checkout} (MEGATRON_LM_DIR: a checkout of Megatron-LM, 0.16 to 0.19)")
    if MINOR.search((checkout / VERSION).read_text())[1] == "16":
        for module in MODULES_OF_0_16:
            pytest.importorskip(module, reason=f"scripts of 0.16 import {module}")
    return checkout / "pretrain_gpt.py"


FOUR = "tensor 2 x pipeline 2, sequence parallel"
INTERLEAVED = f"{FOUR}, two chunks on each stage"
ENGINES = {"16": "2.9", "17": "2.14", "18": "2.20", "19": "2.17"}
"""Releases of Transformer Engine that are tried, by megatron-core's minor release."""


@pytest.mark.parametrize("layout", ["1", FOUR, INTERLEAVED])
def test_every_printed_digit_is_stocks(script, layout, tmp_path):
    check_every_digit(script, [*MODEL, "--mock-data"], layout, tmp_path)


@pytest.mark.parametrize("layout", [FOUR, INTERLEAVED])
def test_with_transformer_engine(script, layout, tmp_path):
    """Its own Python, its compiled extension stood in for."""
    release = ENGINES[MINOR.search((script.parent / VERSION).read_text())[1]]
    folder = folder_of("TRANSFORMER_ENGINE", release, "transformer_engine")
    flags = [*MODEL, *ENGINE, "--mock-data"]
    check_every_digit(script, flags, layout, tmp_path, path=[folder], implementation="transformer_engine")


def check_every_digit(script, flags, layout, folder, *, path=(), implementation="local"):
    ranks = 1 if layout == "1" else 4
    flags = [*flags, *flags_of(layout)]
    stock = launch(script, flags, ranks=ranks, path=path)
    assert stock.status == 0, stock.text
    assert len(stock.iterations) == 5
    for number, plan in enumerate(plans_of(layout, implementation)):
        file = saved(plan, folder / f"{number}.yaml")
        planned = launch(script, [*flags, "--lynx-plan", file, "--lynx-check", "2"], ranks=ranks, path=path)
        assert planned.status == 0, planned.text
        assert planned.iterations == stock.iterations
        assert planned.ours[1].startswith("megatron-lynx: checked 2 steps against stock without recomputation: in each, ")
        assert planned.ours[-1].startswith("megatron-lynx: rank 0 replayed ")
        assert ("copied to the host" in planned.ours[-1]) == (plan.stages[0].offload is not None)


@pytest.mark.timeout(900)
def test_a_run_resumes_under_another_plan(script, tmp_path):
    """Saved under a plan at step 3, against stock that resumes what stock saved."""
    flags = [*MODEL, "--mock-data", *flags_of(INTERLEAVED)]
    once, keep = plan_of(INTERLEAVED, gather="once"), plan_of(INTERLEAVED)
    plans = {"once": once, "keep": keep, "offload": offloading(keep, 200_000)}
    under = {name: ["--lynx-plan", saved(plan, tmp_path / f"{name}.yaml")] for name, plan in plans.items()} | {"stock": []}
    until_3 = ["--save-interval", "3", "--exit-interval", "3"]
    for name in ("stock", "once"):
        begun = launch(script, [*flags, *under[name], "--save", tmp_path / name, *until_3], ranks=4)
        assert [number for number, _, _ in begun.iterations] == ["1", "2", "3"], begun.text
    expected = launch(script, [*flags, "--load", tmp_path / "stock"], ranks=4).iterations
    assert [number for number, _, _ in expected] == ["4", "5"]
    for name in ("keep", "offload", "stock"):
        resumed = launch(script, [*flags, *under[name], "--load", tmp_path / "once"], ranks=4)
        assert resumed.iterations == expected, resumed.text


def test_a_broken_replay_is_named(script, tmp_path):
    plan = saved(plan_of(FOUR, gather="once"), tmp_path / "plan.yaml")
    flags = [*MODEL, "--mock-data", *flags_of(FOUR), "--lynx-plan", plan, "--lynx-check", "2"]
    faulty = Path(__file__).with_name("pretrain_faulty.py")
    broken = launch(faulty, flags, ranks=4, path=[script.parent], env={"FAULT": "replay", "SCRIPT": str(script)})
    assert broken.status == 1
    assert broken.ours[-1].startswith("  - decoder.layers.2.self_attention.linear_proj.weight on stage 1 (rank "), broken.text
    assert broken.iterations == []


def test_patched_and_without_the_launcher(script, tmp_path):
    """Applied and taken back, twice; in between it trains, under a plan and without."""
    twin = twin_of(script.parent, tmp_path / "twin")
    published = script.read_text()
    run = partial(launch, twin, module="tests.launch.without_launcher")
    flags = [*MODEL, "--mock-data"]
    stock = run(flags)
    assert len(stock.iterations) == 5, stock.text
    plan = saved(plan_of("1"), tmp_path / "plan.yaml")
    for ours in (["--lynx-plan", plan], []):
        assert apply(twin.parent)[0] == 0
        patched = run([*flags, *ours])
        assert patched.iterations == stock.iterations, patched.text
        assert [line.split(":")[0] for line in patched.ours[-1:]] == ["megatron-lynx"] * bool(ours)
        assert apply("--reverse", twin.parent)[0] == 0
        assert twin.read_text() == published


def twin_of(checkout: Path, folder: Path) -> Path:
    """The script of a checkout that looks the same, and may be patched."""
    folder.mkdir()
    for entry in checkout.iterdir():
        (folder / entry.name).symlink_to(entry)
    script = folder / "pretrain_gpt.py"
    script.unlink()
    script.write_text((checkout / script.name).read_text())
    return script


def test_without_flushes(script):
    """Every printed digit is that of the version rule, applied to the flushing loop by hand."""
    flags = [*MODEL, "--mock-data", "--pipeline-model-parallel-size", "2", "--rerun-mode", "disabled"]
    versions = Path(__file__).with_name("pretrain_versions.py")
    expected = launch(versions, flags, ranks=2, path=[script.parent], env={"SCRIPT": str(script), "DRAINED": "5"})
    assert expected.status == 0, expected.text
    assert len(expected.iterations) == 5
    without = launch(script, [*flags, "--lynx-schedule", "double-buffered"], ranks=2)
    assert without.status == 0, without.text
    assert without.iterations == expected.iterations


def plans_of(layout: str, implementation: str) -> Iterator[Plan]:
    """Everything replayed; where enough micro-batches are in flight for it, also some of what is kept on the host."""
    yield plan_of(layout, gather="keep" if layout == "1" else "once", implementation=implementation)
    if layout == INTERLEAVED:
        yield offloading(plan_of(layout, implementation=implementation), 200_000)
