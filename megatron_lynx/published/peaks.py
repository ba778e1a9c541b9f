"""Peak memory of stock Megatron that others measured, which chose no constant: each row is the fullest device of one run.

    Zero Bubble's 1F1B    A100; 8 to 32 stages, unfused attention, nothing replayed; GB without decimals, so 30 is known to 1.7 %

The runs are in fp16, so their gradients are, too (Megatron's default, `validate_args`): copies in fp32 are there only in updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.published.row import Row
from megatron_lynx.published.steps import zero_bubble_job

ROW_PERCENT = 4.0
"""Bound on the error of one peak."""

GB = 1e9

Run = Mapping[str, Any]


def rows(figures: Mapping[str, Any]) -> Iterator[Row]:
    """All rows. `figures`: the whole file of them."""
    series = {each["id"]: each for each in figures["series"]}
    for run in series["zero_bubble_baselines"]["rows"]:
        what = f"table 4: peak memory of {run['model']}, {run['microbatches']} micro-batches"
        computed = max(memory.total for memory in memory_of_stages(zero_bubble_job(run))) / GB
        yield Row("Zero Bubble, 2401.10241", what, run["peak_gb"], computed, "GB", bound=ROW_PERCENT)
