"""The real `pretrain_gpt.py` of a Megatron-LM checkout, 0.16 to 0.19, as it is.

MEGATRON_LM_DIR names the checkout. Mock data, dropout 0.1, five iterations: what is printed under a plan equals stock's.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .launched import MODEL, flags_of, launch, plan_of, saved

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


@pytest.mark.parametrize(
    "layout",
    [
        "1",
        "tensor 2 x pipeline 2, sequence parallel",
        "tensor 2 x pipeline 2, sequence parallel, two chunks on each stage",
    ],
)
def test_every_printed_digit_is_stocks(script, layout, tmp_path):
    ranks = 1 if layout == "1" else 4
    flags = [*MODEL, "--mock-data", *flags_of(layout)]
    plan = saved(plan_of(layout, gather="once" if ranks > 1 else "keep"), tmp_path / "plan.yaml")
    stock = launch(script, flags, ranks=ranks)
    planned = launch(script, [*flags, "--lynx-plan", plan], ranks=ranks)
    assert (stock.status, planned.status) == (0, 0), planned.text
    assert planned.iterations == stock.iterations
    assert len(stock.iterations) == 5
    assert planned.ours[-1].startswith("megatron-lynx: rank 0 replayed ")
