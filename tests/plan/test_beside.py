"""What a plan cannot have beside a feature of its launch: one key is changed, and the plan is refused by that key's name.

A story: half of these checks could be deleted, and no test failed. Each of them stands in front of a run that was never tried.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_lynx.anatomy import MLP
from megatron_lynx.plan.plan import Plan
from tests.plan import test_latent
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import ahead, checkpointed
from tests.transparency.plans import plan_for
from tests.transparency.test_overlapped import job_of as overlapped_job
from tests.uniform import uniform_plan

TE = {"implementation": "transformer_engine", "dtype": "bf16"}
SP = {"tensor": 2, "sequence_parallel": True}


def captured() -> Plan:
    return plan_for(tiny_job("gpt", **TE, captured=("attn",)), lambda layer: ())


def overlapped() -> Plan:
    return plan_for(overlapped_job("EP2"), lambda layer: ())


def latent() -> Plan:
    return Plan.model_validate(test_latent.plan_data(**SP))


def userbuffers() -> Plan:
    return checkpointed(uniform_plan(tiny_job("gpt", **TE, **SP, userbuffers=True), "none"), "layer")


def gathered_ahead() -> Plan:
    return ahead(checkpointed(plan_for(tiny_job("gpt", **TE, **SP), lambda layer: ()), "layer"), how="gather")


def interleaved() -> Plan:
    return plan_for(tiny_job("gpt", pipeline=2, layers_per_chunk=1, microbatches=4), lambda layer: ())


WHOLE = {"first": 1, "of_every": 2}
HOST = {"bytes": 1000}


def received_in(entry: int) -> dict[str, Any]:
    """A weight gradient that waits for the receive of a gradient."""
    rule = {"linear_fc1": ["pipe.recv_backward"]}
    return {f"stages.{entry}.rules.0.weight_gradients": rule, f"stages.{entry}.weight_gradients": HOST}


CASES: list[tuple[Any, dict[str, Any], str]] = [
    (captured, {"model.moe_overlapped": True}, "model.moe_overlapped is True, needed False beside captured graphs"),
    (captured, {"schedule": "double_buffered"}, "schedule is double_buffered, needed flush beside captured graphs"),
    (captured, {"model.mtp": 1}, "model.mtp is 1, needed 0 beside captured graphs"),
    (captured, {"parallel.userbuffers": True}, "parallel.userbuffers is True, needed False beside captured graphs"),
    (
        captured,
        {"stages.0.rules.0.checkpoint": "attention", "stages.0.rules.0.keep": list(MLP.names)},
        "checkpoint is attention, needed the other half or none: it runs as a captured graph",
    ),
    (userbuffers, {"stages.0.rules.0.ahead": True}, "but with parallel.userbuffers .* no communication begins early"),
    (overlapped, {"parallel.expert": 2}, "parallel.expert is 2, needed 1 beside overlapped"),
    (overlapped, {"schedule": "double_buffered"}, "schedule is double_buffered, needed flush beside overlapped"),
    (overlapped, {"model.opaque_layers": {"mamba": [1]}}, "opaque_layers has mamba, needed none but gated_delta"),
    (overlapped, {"head": {"pieces": 2}}, "head is in 2 pieces, needed none beside overlapped"),
    (
        overlapped,
        {"stages.0.weight_gradients": HOST, "stages.0.rules.0.weight_gradients": {"linear_qkv": ["fwd.mlp.0"]}},
        "stages.0.weight_gradients is given, needed none beside",
    ),
    (overlapped, {"stages.0.whole": WHOLE}, "stages.0.whole is given, needed none beside overlapped"),
    (
        overlapped,
        {"stages.0.offload": {**HOST, "pace_bytes": 100, "half_by_half": "all"}},
        "half_by_half is all, needed at_once beside",
    ),
    (latent, {"parallel.userbuffers": True}, "model.latent_attention is given, needed none with parallel.userbuffers"),
    (gathered_ahead, {"model.fp8": "mxfp8"}, "with fp8 mxfp8 a linear gathers more than its input by rows"),
    (interleaved, received_in(3), "names pipe.recv_backward, but the last stage receives no gradient"),
]


@pytest.mark.parametrize(("made", "changes", "says"), CASES, ids=[says.partition(",")[0][:60] for *_, says in CASES])
def test_what_does_not_go_together_is_refused_by_name(made: Any, changes: dict[str, Any], says: str) -> None:
    raw = made().model_dump(mode="json")
    Plan.model_validate(raw)
    with pytest.raises(ValidationError, match=says):
        Plan.model_validate(changed(raw, changes))


def changed(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for path, value in changes.items():
        *holders, last = path.split(".")
        place = raw
        for name in holders:
            place = place[int(name) if name.isdigit() else name]
        place[last] = value
    return raw


def test_the_last_stage_receives_gradients_for_its_first_chunk() -> None:
    """Of several chunks: what it sends as the last stage of the first it gets back."""
    Plan.model_validate(changed(interleaved().model_dump(mode="json"), received_in(1)))
