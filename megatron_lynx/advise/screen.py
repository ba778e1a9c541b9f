"""The screen: the verdict, then a row for each way to run the launch; 80 columns are enough, and a file or a pipe gets 80, too.
And the same answer for programs, as `advise --json` and `plan --json` print it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_lynx.advise.answer import Answer
from megatron_lynx.advise.today import Row
from megatron_lynx.advise.verdict import verdict
from megatron_lynx.cost.budget import if_it_runs
from megatron_lynx.units import GIB, format_bytes, format_seconds

AXES = "micro-batch, tensor, context, pipeline, chunks, experts' groups"
MOST_REASONS = 8
"""Reasons for which there is no plan that are printed; of more, only their number."""


def screen(answer: Answer, *, reasons: bool = True) -> RenderableType:
    """All of it. `reasons`: whether why there is no plan is told, too."""
    parts: list[RenderableType] = [Text(verdict(answer), style="bold"), Text(""), _rows(answer)]
    if answer.asked_near:
        parts += [Text(""), *_near(answer)]
    return Group(*parts, *(Text(line) for line in _notes(answer, reasons=reasons)))


def _table() -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", overflow="fold", min_width=8)
    table.add_column("", overflow="fold", ratio=1)
    for _ in range(3):
        table.add_column("", justify="right", no_wrap=True)
    table.expand = True
    return table


def _rows(answer: Answer) -> Table:
    table, launch = _table(), answer.launch
    table.add_row("", "", "step", "of today" if launch.written else "of stock", "GiB", style="dim")
    first = "today" if launch.written else ""
    if launch.row is None:
        table.add_row(first, f"{launch.setting}: not priced", "-", "-", "-")
    else:
        table.add_row(first, launch.setting, launch.seconds, "1.00", _gib(launch.row))
    if answer.plan is not None:
        _add(table, answer, "plan", _budget(answer), answer.plan)
    if answer.in_todays_bytes is not None:
        _add(table, answer, "plan", "within what the launch holds today", answer.in_todays_bytes)
    elif answer.none_in_todays_bytes:
        table.add_row("plan", "within what the launch holds today: none fits", "-", "-", "-")
    return table


def _budget(answer: Answer) -> str:
    """What the plan had to keep to."""
    budget = answer.job.budget
    if budget.activation_mib is not None:
        return f"with at most {budget.activation_mib:g} MiB of activations"
    if not budget.of_device and answer.job.cluster.device == "cpu":
        return "the least memory"
    left = "what others leave of the device" if budget.of_device else "the device's budget"
    whose = left if budget.memory_gib is None else "as stated"
    return f"within {format_bytes(answer.job.memory_budget_bytes)}, {whose}"


def _add(table: Table, answer: Answer, name: str, what: str, row: Row) -> None:
    launch = answer.launch
    ratio = "-" if launch.row is None else f"{row.step_s / launch.row.step_s:.2f}"
    table.add_row(name, what, format_seconds(row.step_s), ratio, _gib(row))


def _gib(row: Row) -> str:
    return f"{row.memory_bytes / GIB:.1f}"


def _near(answer: Answer) -> Iterator[RenderableType]:
    if not answer.near:
        yield Text(f"No layout one step away fits under a plan ({AXES}).")
        return
    yield Text("What the memory that is left would buy: layouts one step away, each under a plan")
    table = _table()
    for number, each in enumerate(answer.near, start=1):
        _add(table, answer, str(number), answer.changed(each), each.row)
    yield table


def _notes(answer: Answer, *, reasons: bool) -> Iterator[str]:
    yield ""
    launch = answer.launch
    if reasons:
        yield from _why_none(answer)
    if answer.would_fit:
        yield "What would fit, nearest first:"
        yield from (f"{number}. {each}" for number, each in enumerate(answer.would_fit, start=1))
    if launch.unknown:
        yield f"today: {launch.unknown}"
    if launch.written and launch.row is not None and launch.row.memory_bytes > answer.job.memory_budget_bytes:
        yield if_it_runs(launch.row.memory_bytes)
    if launch.at_best_s is not None:
        yield f"today's seconds: {launch.range_why}"
    if launch.graphs:
        yield launch.graphs_priced_in_words
        yield launch.graphs_in_words
    if answer.on_host is not None:
        yield answer.on_host.in_words
    yield from _rotary(answer)
    if _may_offload(answer):
        yield "nothing goes to the host: --offload-ratio auto lets the plan send out what pays"
    if launch.flags and not answer.refused:
        yield f"left out of the launch under a plan: {' '.join(launch.flags)}"
    yield f"simulated from the figures of {answer.job.cluster.name}; a step includes the optimizer's update"


def _why_none(answer: Answer) -> Iterator[str]:
    for problem in answer.problems[:MOST_REASONS]:
        yield f"- {problem}"
    if (more := len(answer.problems) - MOST_REASONS) > 0:
        yield f"- and {more} more (--verbose)"


def as_json(answer: Answer) -> dict[str, Any]:
    """Seconds are of a whole step, the optimizer's update included; bytes of the fullest device."""
    near = [{**each.row.as_json, "flags": answer.changed(each), "launch": answer.command(each)} for each in answer.near]
    return {
        "launch": answer.launch.as_json,
        "plan": None if answer.plan is None else answer.plan.as_json,
        "plan_in_todays_bytes": None if answer.in_todays_bytes is None else answer.in_todays_bytes.as_json,
        **({"neighbours": near} if answer.asked_near else {}),
        **({"no_plan": [str(problem) for problem in answer.problems]} if answer.problems else {}),
        **({"would_fit": list(answer.would_fit)} if answer.would_fit else {}),
        "budget_bytes": answer.job.memory_budget_bytes,
        "verdict": verdict(answer),
    }


def _rotary(answer: Answer) -> Iterator[str]:
    """What became of the code that turns queries and keys of packed sequences, where it asks the host."""
    if answer.decision is None or not answer.job.rotary_asks_host:
        return
    fuse = "--no-rope-fusion" if answer.reading is None else answer.reading.said(["--no-rope-fusion"])
    if answer.decision.job.rotary_asks_host:
        yield f"rotary is kept: of packed sequences it would make the host wait in each recomputation; not so without {fuse}"
    else:
        yield f"rotary recomputes, as no plan fits with it kept: of packed sequences it makes the host wait, not without {fuse}"


def _may_offload(answer: Answer) -> bool:
    """Whether the plan recomputes, and was not allowed to send anything to the host instead."""
    if answer.decision is None or answer.job.offload_ratio != 0 or answer.job.cluster.pcie is None:
        return False
    rules = (rule for entry in answer.decision.plan.stages for rule in entry.rules)
    return any(rule.replay or rule.checkpoint is not None for rule in rules)
