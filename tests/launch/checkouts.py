"""A checkout of Megatron-LM: its real scripts run as stock runs them and under plans, and every printed digit is compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lynx.plan.plan import Plan

from ..te_releases import folder_of
from .launched import LAYOUTS, Launched, flags_of, inside_experts, launch, offloading, plan_of, saved

VERSION, MINOR = "megatron/core/package_info.py", re.compile(r"^MINOR = (\d+)", re.MULTILINE)
TE_RELEASES = {"16": "2.9", "17": "2.14", "18": "2.20", "19": "2.17"}
"""Releases of Transformer Engine that are tried, by megatron-core's minor release."""
FOUR = "tensor 2 x pipeline 2, sequence parallel"
INTERLEAVED = f"{FOUR}, two chunks on each stage"


def minor_of(checkout: Path) -> str:
    return MINOR.search((checkout / VERSION).read_text())[1]  # type: ignore[index]


def te_for(script: Path) -> Path:
    """Transformer Engine's own Python, whose compiled extension is stood in for; the test is skipped where it is not there."""
    return folder_of("TRANSFORMER_ENGINE", TE_RELEASES[minor_of(script.parent)], "transformer_engine")


def plans_of(layout: str, **model: Any) -> Iterator[Plan]:
    """Everything recomputed; where enough micro-batches are in flight for it, also some of what is kept on the host."""
    yield inside_experts(plan_of(layout, gather="keep" if layout == "1" else "once", **model))
    if layout == INTERLEAVED:
        yield offloading(plan_of(layout, **model), 200_000)


def check_every_digit(
    script: Path, flags: Sequence[str], layout: str, folder: Path, *, path: Sequence[Path] = (), **model: Any
) -> None:
    """Stock, and the same under each of the layout's plans."""
    for planned, plan in under_plans(script, flags, layout, plans_of(layout, **model), folder, path=path):
        assert planned.ours[-1].startswith("megatron-lynx: rank 0 recomputed ")
        assert ("copied to the host" in planned.ours[-1]) == (plan.stages[0].offload is not None)
        assert ("of host memory page-locked in" in planned.ours[0]) == (plan.stages[0].offload is not None)


def under_plans(
    script: Path,
    flags: Sequence[str],
    layout: str,
    plans: Iterable[Plan],
    folder: Path,
    *,
    path: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[Launched, Plan]]:
    """What each launch under a plan said, its first two steps checked against stock: all that it printed is stock's."""
    flags, ranks = [*flags, *flags_of(layout)], ranks_of(layout)
    stock = launch(script, flags, ranks=ranks, path=path, env=env)
    assert stock.status == 0, stock.text
    assert len(stock.iterations) == 5
    for number, plan in enumerate(plans):
        file = saved(plan, folder / f"{number}.yaml")
        planned = launch(script, [*flags, "--lynx-plan", str(file), "--lynx-check", "2"], ranks=ranks, path=path, env=env)
        assert planned.status == 0, planned.text
        assert planned.iterations == stock.iterations
        checked = "megatron-lynx: checked 2 steps against stock without recomputation: in each, "
        assert any(line.startswith(checked) for line in planned.ours), planned.text
        yield planned, plan


def ranks_of(layout: str) -> int:
    facts = LAYOUTS[layout]
    return int(facts.get("tensor", 1) * facts.get("pipeline", 1) * facts.get("context", 1) * facts.get("replicas", 1))
