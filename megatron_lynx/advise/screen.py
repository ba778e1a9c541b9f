"""The answer as a screen of 80 columns (verdict, then a row for each way to run the launch), and as the JSON of `advise` and
`plan`.

The verdict is the fastest that fits; of those within `WORTH` of it the one with the smallest change (`CHANGES`), then the fewest
bytes. Each sentence names its baseline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_lynx.advise.answer import WORTH, Answer
from megatron_lynx.advise.flags import Edit
from megatron_lynx.advise.neighbours import Neighbour, may_offload
from megatron_lynx.advise.today import Row, Stock, fits, gain, gains, row_of
from megatron_lynx.cost.budget import if_it_runs
from megatron_lynx.cost.host_optimizer import host_shortage
from megatron_lynx.planner import Decision
from megatron_lynx.prediction import EVEN, within_error
from megatron_lynx.units import GIB, format_bytes

AXES = "micro-batch, tensor, context, pipeline, chunks, experts' groups"
MOST_REASONS = 8


def screen(answer: Answer, *, reasons: bool = True) -> RenderableType:
    parts: list[RenderableType] = [Text(verdict(answer).text, style="bold"), Text(""), _rows(answer)]
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
        _add(table, answer, first, launch.setting, launch.row)
    if answer.stock is None:
        table.add_row("stock", "nothing fits", "-", "-", "-")
    elif not answer.stock.launch:
        _add(table, answer, "stock", f"best that fits: {answer.stock.setting.name}", answer.stock.row)
    for name, planned in _plans(answer):
        _add(table, answer, "plan", name + _beside(answer, planned), row_of(planned))
    if answer.none_in_todays_bytes:
        table.add_row("plan", "within what the launch holds today: none fits", "-", "-", "-")
    return table


def _plans(answer: Answer) -> Iterator[tuple[str, Decision]]:
    within = "within what the launch holds today"
    if answer.without_copies is not None and answer.planned is not answer.in_todays_bytes:
        yield _budget(answer), answer.without_copies
    if answer.copies is not None:
        yield _budget(answer), answer.copies
    if answer.in_todays_bytes is not None:
        yield within, answer.in_todays_bytes


def _beside(answer: Answer, planned: Decision) -> str:
    was, now = ((job.model.moe_overlapped, job.userbuffers) for job in (answer.job, planned.asked))
    names = ("exchanges overlapped", "userbuffers")
    said = [f"{'' if after else 'no '}{name}" for name, before, after in zip(names, was, now, strict=True) if before != after]
    copies = ["copies to the host"] if planned.asked.offload_ratio != answer.job.offload_ratio else []
    return "".join(f", {change}" for change in (*copies, *said))


def _budget(answer: Answer) -> str:
    budget = answer.job.budget
    if budget.activation_mib is not None:
        return f"with at most {budget.activation_mib:g} MiB of activations"
    if not budget.of_device and answer.job.cluster.device == "cpu":
        return "the least memory"
    left = "what others leave of the device" if budget.of_device else "the device's budget"
    whose = left if budget.memory_gib is None else "as stated"
    return f"within {format_bytes(answer.job.memory_budget_bytes)}, {whose}"


def _add(table: Table, answer: Answer, name: str, what: str, row: Row) -> None:
    before = answer.launch.row
    ratio = "-" if before is None else f"{row.expected_s / before.expected_s:.2f}"
    table.add_row(name, what, row.step.in_words, ratio, f"{row.memory_bytes / GIB:.1f}")


def _near(answer: Answer) -> Iterator[RenderableType]:
    if not answer.near:
        yield Text(f"No layout one step away fits, under a plan or without one ({AXES}).")
        return
    yield Text("Layouts one step away")
    table = _table()
    for number, near in enumerate(answer.near, start=1):
        names = iter((str(number), ""))
        if near.planned is not None:
            planned = f"{_last_names(answer.changed(near))}: plan{_beside(answer, near.planned)}"
            _add(table, answer, next(names), planned, row_of(near.planned))
        if near.stock is not None:
            layout = answer.changed(near, stock=True)
            whose = "" if near.planned is not None and layout == answer.changed(near) else f"{_last_names(layout)}: "
            _add(table, answer, next(names), f"{whose}stock {near.stock.setting.name}", near.stock.row)
    yield table


def _last_names(settings: str) -> str:
    return re.sub(r"\+?\b(?:[a-z_]+\.)+(?=[a-z_]+=)", "", settings)


def _notes(answer: Answer, *, reasons: bool) -> Iterator[str]:
    yield ""
    launch = answer.launch
    if reasons:
        yield from _why_none(answer)
    if answer.would_fit:
        yield "What would fit, nearest first:"
        yield from (f"{number}. {remedy}" for number, remedy in enumerate(answer.would_fit, start=1))
    if launch.unknown:
        yield f"today: {launch.unknown}"
    if launch.written and launch.row is not None and launch.row.memory_bytes > answer.job.memory_budget_bytes:
        yield if_it_runs(launch.row.memory_bytes)
    yield from dict.fromkeys(row.range_why for row in _shown(answer) if row.range_why)
    if launch.graphs:
        yield launch.graphs_priced_in_words
        yield launch.graphs_in_words
    if answer.on_host is not None:
        yield answer.on_host.in_words
    yield from _rotary(answer)
    if not answer.asked_copies and answer.planned is not None and answer.planned.recomputes:
        yield "nothing goes to the host: --offload-ratio auto lets the plan send out what pays"
    plans = [near.planned for near in answer.near if near.planned is not None]
    without = any(planned.recomputes and planned.asked.offload_ratio == 0 for planned in plans)
    if answer.asked_copies and may_offload(answer.job) and without:
        yield "layouts one step away: `plan` also tries copies to the host, which may take less"
    if launch.flags and answer.planned is not None and verdict(answer).run != "plan":
        yield f"left out of the launch under a plan: {' '.join(launch.flags)}"
    yield f"simulated from the figures of {answer.job.cluster.name}; a step includes the optimizer's update"


def _why_none(answer: Answer) -> Iterator[str]:
    for problem in answer.problems[:MOST_REASONS]:
        yield f"- {problem}"
    if (more := len(answer.problems) - MOST_REASONS) > 0:
        yield f"- and {more} more (--verbose)"


def _shown(answer: Answer) -> Iterator[Row]:
    stock = None if answer.stock is None else answer.stock.row
    yield from (row for row in (answer.launch.row, stock, answer.plan) if row is not None)
    yield from (row for near in answer.near for row in near.rows)


def as_json(answer: Answer) -> dict[str, Any]:
    """Seconds are of a whole step, including the optimizer's update; bytes are of the fullest device."""
    copies = answer.without_copies if answer.copies is not None else None
    within = answer.in_todays_bytes
    return {
        "launch": answer.launch.as_json,
        "stock": None if answer.stock is None else _stock_as_json(answer.stock, answer.stock_edit),
        "plan": None if answer.planned is None else _plan_as_json(answer.planned, answer.plan_edit),
        **({} if copies is None else {"plan_without_copies": row_of(copies).as_json}),
        "plan_in_todays_bytes": None if within is None else row_of(within).as_json,
        **({"neighbours": [_near_as_json(answer, near) for near in answer.near]} if answer.asked_near else {}),
        **({"no_plan": [str(problem) for problem in answer.problems]} if answer.problems else {}),
        **({"would_fit": list(answer.would_fit)} if answer.would_fit else {}),
        "budget_bytes": answer.job.memory_budget_bytes,
        "verdict": verdict(answer).as_json,
    }


def _stock_as_json(stock: Stock, edit: Edit) -> dict[str, Any]:
    upper_end = {"step_most_s": stock.row.step.most_s}
    return {
        "setting": stock.setting.name,
        "flags": list(stock.setting.flags),
        "change": _change(edit),
        **stock.row.as_json,
        **upper_end,
    }


def _plan_as_json(planned: Decision, edit: Edit) -> dict[str, Any]:
    return {**row_of(planned).as_json, "flags": edit.flags, "change": _change(edit), "offload_ratio": planned.asked.offload_ratio}


def _change(edit: Edit) -> dict[str, Any]:
    return {"delete": list(edit.deleted), "add": edit.flags}


def _near_as_json(answer: Answer, near: Neighbour) -> dict[str, Any]:
    """`layout`: under the plan; `stock_layout`: with stock, which places layers evenly. Seconds and bytes outside `stock` and
    `plan` are of the faster of the two."""
    stock, planned = near.stock, near.planned
    edits = {whose: answer.neighbours_edit(near, stock=whose == "stock") for whose in ("stock", "plan")}
    return {
        **near.fastest.as_json,
        "flags": answer.changed(near),
        "layout": _change(answer.layout(near)),
        "stock_layout": _change(answer.layout(near, stock=True)),
        "launch": answer.command(near),
        "stock": None if stock is None else _stock_as_json(stock, edits["stock"]),
        "plan": None if planned is None else _plan_as_json(planned, edits["plan"]),
    }


def _rotary(answer: Answer) -> Iterator[str]:
    if answer.planned is None or not answer.job.rotary_asks_host:
        return
    fuse = "--no-rope-fusion" if answer.reading is None else answer.reading.said(["--no-rope-fusion"])
    if answer.planned.job.rotary_asks_host:
        yield f"rotary is kept: of packed sequences it would make the host wait in each recomputation; not so without {fuse}"
    else:
        yield f"rotary recomputes, as no plan fits with it kept: of packed sequences it makes the host wait, not without {fuse}"


Run = Literal["launch", "stock", "plan", "neighbour"]
CHANGES: tuple[Run, ...] = ("launch", "stock", "plan", "neighbour")
NOTHING_FASTER = f"nothing else that was found is over {100 * WORTH:.0f} % faster"


@dataclass(frozen=True)
class Choice:
    run: Run
    row: Row
    neighbour: Neighbour | None = None
    stock: bool = False

    @property
    def change(self) -> tuple[int, bool]:
        return CHANGES.index(self.run), self.run == "neighbour" and not self.stock


@dataclass(frozen=True)
class Verdict:
    text: str
    run: Run | None = None
    row: Row | None = None

    @property
    def as_json(self) -> dict[str, Any]:
        step = {"step_s": None} if self.row is None else self.row.step.as_json
        return {"text": self.text, "run": self.run, **step}


def choices(answer: Answer) -> Iterator[Choice]:
    launch = answer.launch
    if launch.written and launch.row is not None and fits(launch.row, answer.job):
        yield Choice("launch", launch.row)
    if answer.stock is not None and not answer.stock.launch:
        yield Choice("stock", answer.stock.row)
    if answer.plan is not None:
        yield Choice("plan", answer.plan)
    for near in answer.near:
        if near.stock is not None:
            yield Choice("neighbour", near.stock.row, near, stock=True)
        if near.planned is not None:
            yield Choice("neighbour", row_of(near.planned), near)


def chosen(answer: Answer) -> Choice | None:
    options = list(choices(answer))
    if not options:
        return None
    least_s = min(choice.row.expected_s for choice in options)
    close = [choice for choice in options if choice.row.expected_s <= (1 + WORTH) * least_s]
    return min(close, key=lambda choice: (choice.change, choice.row.memory_bytes))


def verdict(answer: Answer) -> Verdict:
    choice = chosen(answer)
    said = " ".join(_sentences(answer, choice))
    return Verdict(said) if choice is None else Verdict(said, choice.run, choice.row)


def _sentences(answer: Answer, choice: Choice | None) -> Iterator[str]:
    if answer.refused:
        yield f"No plan goes with {', '.join(dict.fromkeys(problem.where for problem in answer.refused))}."
    yield from _too_large(answer)
    if choice is None:
        if not answer.refused or answer.stock is None:
            yield f"Nothing fits in {_limit(answer)}: no plan, and no setting of stock Megatron's."
        if answer.in_todays_bytes is not None and answer.launch.row is not None:
            within = row_of(answer.in_todays_bytes)
            yield f"Within what today holds the plan takes {_compared(within, answer.launch.row)} today."
        return
    if answer.plan is None and not answer.refused:
        yield f"No plan fits in {_limit(answer)}."
    if choice.run == "launch":
        alone = all(other.run == "launch" for other in choices(answer))
        yield "Keep your launch." if alone else f"Keep your launch: {NOTHING_FASTER}."
    elif choice.run == "stock" and not answer.launch.written and not answer.stock_edit:
        yield f"Run stock Megatron without recomputation: {NOTHING_FASTER}."
    elif choice.run == "stock":
        words = _stock_words(answer)
        yield _run(answer, words[:1].upper() + words[1:], choice.row)
        if answer.plan is not None and answer.stock is not None:
            yield f"The plan takes {_compared(answer.plan, answer.stock.row)} that."
    elif choice.run == "plan":
        plan = "Run the plan" if answer.copies is None else "Run the plan, with copies to the host"
        yield _run(answer, _with(plan, answer.plan_edit.in_words(answer.reading)), choice.row)
        yield from _parts(answer)
    else:
        yield _run(answer, _layout_words(answer, choice), choice.row, layout=True)
        yield from _in_this_layout(answer)


def _too_large(answer: Answer) -> Iterator[str]:
    row, budget = answer.launch.row, answer.job.memory_budget_bytes
    if answer.launch.written and row is not None and row.memory_bytes > budget:
        held = f"{format_bytes(row.memory_bytes)} of {format_bytes(budget)}"
        yield f"By this count today holds {held}: too much."
    if answer.launch.written and (short := host_shortage(answer.job, 0.0)) is not None:
        yield f"By this count the host of a node holds {short.finding}: too much."


def _limit(answer: Answer) -> str:
    node = answer.job.cluster.node
    if node is not None and host_shortage(answer.job, 0.0) is not None:
        return f"the {node.host_memory_gib:g} GiB that hosts of {answer.job.cluster.name} are taken to have"
    return format_bytes(answer.job.memory_budget_bytes)


def _run(answer: Answer, what: str, row: Row, *, layout: bool = False) -> str:
    before = answer.launch.row
    if before is None:
        unknown = f"What your launch takes is not known ({answer.launch.unknown})"
        return f"{what}: {row.step.in_words}, {format_bytes(row.memory_bytes)}. {unknown}."
    compared = f"{what}: {_compared(row, before)} {_today(answer)}, {_room(row, before)}."
    experts = answer.job.model.experts is not None
    unsure = within_error(row.expected_s, before.expected_s, experts=experts, layouts=layout) if gain(row, before) > 0 else ""
    return f"{compared} {unsure}".strip()


def _parts(answer: Answer) -> Iterator[str]:
    stock, before, plan = answer.stock, answer.launch.row, answer.plan
    if stock is None or plan is None:
        yield "No setting of stock Megatron's fits."
        return
    if not stock.launch and before is not None and answer.launch.written and gain(stock.row, before) > EVEN:
        yield f"Stock's flags alone ({_stock_words(answer)}): {_compared(stock.row, before)} today."
    if not stock.launch or before is None:
        yield f"The plan takes {_compared(plan, stock.row)} stock's best ({stock.setting.name})."


def _in_this_layout(answer: Answer) -> Iterator[str]:
    stock, plan, before = answer.stock, answer.plan, answer.launch.row
    named_rows = [("stock's best", stock.row if stock is not None else None), ("the plan", plan)]
    said = [
        f"{name} {_compared(row, before)} {_today(answer)}" for name, row in named_rows if row is not None and before is not None
    ]
    if said:
        yield f"In this layout: {'; '.join(said)}."


def _layout_words(answer: Answer, choice: Choice) -> str:
    near = choice.neighbour
    assert near is not None, "the choice is a neighbour"
    edit = answer.neighbours_edit(near, stock=choice.stock).in_words(answer.reading)
    whose = "with stock's flags" if choice.stock else "under a plan"
    if not choice.stock and near.planned is not None and near.planned.asked.offload_ratio != answer.job.offload_ratio:
        whose += " with copies to the host"
    return _with(f"Take another layout, {answer.changed(near, stock=choice.stock)}, {whose}", edit)


def _stock_words(answer: Answer) -> str:
    return answer.stock_edit.in_words(answer.reading) or "as stock none"


def _with(what: str, edit: str) -> str:
    return f"{what} ({edit})" if edit else what


def _compared(row: Row, before: Row) -> str:
    least_saving, largest_saving = gains(row, before)
    if max(abs(least_saving), abs(largest_saving)) < EVEN:
        return "as long as"
    if least_saving * largest_saving < 0 and min(abs(least_saving), abs(largest_saving)) >= EVEN:
        return f"{_percent(-least_saving)} more to {_percent(largest_saving)} less than"
    low, high = sorted((_percent(abs(least_saving)), _percent(abs(largest_saving))), key=lambda text: float(text.split()[0]))
    part = low if low == high else f"{low.removesuffix(' %')} to {high}"
    return f"{part} {'less' if gain(row, before) > 0 else 'more'} than"


def _room(row: Row, before: Row) -> str:
    difference = row.memory_bytes - before.memory_bytes
    if abs(difference) < 0.005 * row.memory_bytes:
        return "in the same memory"
    return f"in {format_bytes(abs(difference))} {'more' if difference > 0 else 'less'}"


def _today(answer: Answer) -> str:
    return "today" if answer.launch.written else "stock none"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if abs(part) >= 0.1 else f"{100 * part:.1f} %"
