"""FP8 and FP4 on the real `pretrain_gpt.py` of a checkout (MEGATRON_LM_DIR), with Transformer Engine's own Python: under plans,
with and without weight gradients in waits, every printed digit is stock's, and in the first two steps every gradient.

Weight gradients are added up where they lie, as on GPUs: Transformer Engine's linears do that by themselves, and a stand-in for
Apex's extension does it for the head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.plan.plan import Plan
from tests.deferring import deferring
from tests.transparency.checkpoints import checkpointed, without_copies

from .checkouts import te_for, under_plans
from .launched import GROUPED, MODEL, TE, inside_experts, offloading, plan_of

FUSED = [flag for flag in MODEL if flag != "--no-gradient-accumulation-fusion"]
TP2, SP2, PP2, EP2 = "tensor 2", "tensor 2, sequence parallel", "pipeline 2", "expert 2"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        *(("delayed", layout) for layout in (TP2, SP2, PP2, EP2)),
        *(("tensorwise", layout) for layout in (TP2, SP2, PP2, EP2)),
        ("blockwise", TP2),
        ("blockwise", PP2),
        ("mxfp8", EP2),
        ("mxfp8", SP2),
        ("nvfp4", SP2),
        ("nvfp4", PP2),
        ("nvfp4", EP2),
    ],
)
def test_every_printed_digit_is_stocks(
    script: Path, recipe: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything recomputed; all weight gradients in waits; layers that keep their input; on stages also some on the host."""
    bits = ["--fp4-format", "e2m1", "--fp4-recipe"] if recipe == "nvfp4" else ["--fp8-format", "hybrid", "--fp8-recipe"]
    flags = [*FUSED, *TE, "--mock-data", "--bf16", *bits, recipe, *(GROUPED if layout == EP2 else [])]
    env = {"FAULT": "none", "SCRIPT": str(script)}
    if recipe in ("mxfp8", "nvfp4"):
        monkeypatch.setenv("TESTBED_CAPABILITY", "10.0")
    faulty = Path(__file__).with_name("pretrain_faulty.py")
    path = [script.parent, te_for(script)]
    deferred = 0
    for planned, plan in under_plans(faulty, flags, layout, plans(recipe, layout), tmp_path, path=path, env=env):
        said = planned.ours[-1]
        assert ("deferred " in said) == any(stage.defers for stage in plan.stages)
        assert ("copied to the host" in said) == (plan.stages[0].offload is not None)
        deferred += "ran in waits" in said
    assert deferred > 0


def plans(recipe: str, layout: str) -> list[Plan]:
    facts: dict[str, Any] = {"implementation": "transformer_engine", "fp8": recipe, "experts": layout == EP2}
    amaxes_reduced = layout == SP2 and recipe in ("tensorwise", "nvfp4")
    recomputed = inside_experts(plan_of(layout, gather="once", windows=not amaxes_reduced, **facts))
    kept = plan_of(layout, recompute="none", **facts)
    made = [recomputed, deferring(recomputed), deferring(kept), without_copies(checkpointed(kept, "layer"))]
    return [*made, offloading(deferring(recomputed), 200_000)] if layout == PP2 else made
