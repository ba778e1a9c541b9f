"""The real `pretrain_gpt.py` of a Megatron-LM checkout, 0.16 to 0.19, as it is.

MEGATRON_LM_DIR names the checkout. Mock data, dropout 0.1, five iterations: what is printed under a plan equals stock's,
and in the first two, which are checked, so does every gradient.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lynx.plan.plan import Plan

from .launched import MODEL, flags_of, launch, offloading, plan_of, saved

MODULES_OF_0_16 = ("six", "regex")
"""Imported by its scripts, beside what megatron-core requires."""


@pytest.fixture(scope="module")
def script() -> Path:
    checkout = Path(os.environ.get("MEGATRON_LM_DIR", "")).resolve()
    if not (checkout / "pretrain_gpt.py").is_file():
        pytest.skip(f"no pretrain_gpt.py in {checkout} (MEGATRON_LM_DIR: a checkout of Megatron-LM, 0.16 to 0.19)")
    if "MINOR = 16" in (checkout / "megatron/core/package_info.py").read_text():
        for module in MODULES_OF_0_16:
            pytest.importorskip(module, reason=f"scripts of 0.16 import {module}")
    return checkout / "pretrain_gpt.py"


FOUR = "tensor 2 x pipeline 2, sequence parallel"
INTERLEAVED = f"{FOUR}, two chunks on each stage"


@pytest.mark.parametrize("layout", ["1", FOUR, INTERLEAVED])
def test_every_printed_digit_is_stocks(script, layout, tmp_path):
    ranks = 1 if layout == "1" else 4
    flags = [*MODEL, "--mock-data", *flags_of(layout)]
    stock = launch(script, flags, ranks=ranks)
    assert stock.status == 0, stock.text
    assert len(stock.iterations) == 5
    for number, plan in enumerate(plans_of(layout)):
        path = saved(plan, tmp_path / f"{number}.yaml")
        planned = launch(script, [*flags, "--lynx-plan", path, "--lynx-check", "2"], ranks=ranks)
        assert planned.status == 0, planned.text
        assert planned.iterations == stock.iterations
        assert planned.ours[1].startswith("megatron-lynx: checked 2 steps against stock without recomputation: in each, ")
        assert planned.ours[-1].startswith("megatron-lynx: rank 0 replayed ")
        assert ("copied to the host" in planned.ours[-1]) == (plan.stages[0].offload is not None)


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


def plans_of(layout: str) -> Iterator[Plan]:
    """Everything replayed; where enough micro-batches are in flight for it, also some of what is kept on the host."""
    yield plan_of(layout, gather="keep" if layout == "1" else "once")
    if layout == INTERLEAVED:
        yield offloading(plan_of(layout), 200_000)
