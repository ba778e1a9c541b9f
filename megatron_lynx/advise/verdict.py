"""The recommendation: the launch as it is, stock Megatron with other flags, the plan, or another layout.

The fastest that fits; of those within `WORTH` of it the one with the smallest change, in this order, then the fewest bytes. Each
sentence names its baseline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron_lynx.advise.answer import WORTH, Answer
from megatron_lynx.advise.neighbours import Neighbour
from megatron_lynx.advise.today import Row, fits, gain, gains, row_of
from megatron_lynx.cost.host_optimizer import host_shortage
from megatron_lynx.prediction import EVEN, within_error
from megatron_lynx.units import format_bytes

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
    if not choice.stock and near.planned is not None and near.planned.job.offload_ratio != answer.job.offload_ratio:
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
