"""One sentence: run the plan, take another layout under a plan, or keep the launch."""

from __future__ import annotations

from megatron_lynx.advise.answer import Answer
from megatron_lynx.advise.neighbours import Neighbour
from megatron_lynx.advise.today import Row, gain
from megatron_lynx.units import format_bytes, format_seconds

WORTH = 0.02
"""The part of a step that a change must save to be worth making: simulated ratios of settings were within 3 % on one H100."""

KEEP = "keep your launch"


def verdict(answer: Answer) -> str:
    """Of everything that was found."""
    if answer.refused:
        named = ", ".join(dict.fromkeys(problem.where for problem in answer.refused))
        return f"No plan goes with {named}.{_keep(answer)}"
    if answer.launch.row is None:
        return _unpriced(answer)
    if answer.plan is None:
        return _no_plan(answer)
    return _of_plan(answer, answer.plan)


def _of_plan(answer: Answer, plan: Row) -> str:
    """There is a plan, and the launch is priced."""
    before_s, budget = answer.launch.least_s, answer.job.memory_budget_bytes
    assert answer.launch.row is not None
    fits, won, near = answer.launch.row.memory_bytes <= budget, gain(plan, before_s), _best(answer, plan)
    if not fits:
        return f"{_too_large(answer)}; {_plan(answer, plan, won)}.{_and_near(answer, near, before_s)}"
    if won >= WORTH:
        return (
            f"Run the plan: {_percent(won)} less than {_today(answer)}, {_room(answer, plan)}.{_and_near(answer, near, before_s)}"
        )
    if near is not None:
        changed = answer.changed(near)
        return f"Nothing to gain in this layout ({_little(won)}); {changed} under a plan: {_less(near.row, before_s)}."
    if answer.launch.written:
        return f"Nothing to gain: {KEEP} ({_little(won)})."
    if (spared_bytes := answer.launch.row.memory_bytes - plan.memory_bytes) > 0:
        return f"The plan holds {format_bytes(spared_bytes)} less than stock Megatron without recomputation ({_little(won)})."
    return f"Nothing to gain: stock Megatron without recomputation does as well ({_little(won)})."


def _no_plan(answer: Answer) -> str:
    row, budget = answer.launch.row, answer.job.memory_budget_bytes
    assert row is not None
    near = min(answer.near, key=lambda each: each.row.step_s, default=None)
    other = "" if near is None else f" {answer.changed(near)} under a plan fits: {_compared(near.row, answer.launch.least_s)}."
    held, may = format_bytes(row.memory_bytes), format_bytes(budget)
    if row.memory_bytes <= budget:
        return f"{_capital(_today(answer))} fits with {held}; no plan fits in {may}: {KEEP}.{other}"
    if (within := answer.in_todays_bytes) is not None:
        both = f"by this count {_today(answer)} holds {held}, and within that {_little(gain(within, answer.launch.least_s))}"
        return f"No plan fits in {may}; {both}: if your devices hold that, say so by --memory-gib.{other}"
    return f"No plan fits in {may}; {_today(answer)} holds {held} by this count.{other}"


def _unpriced(answer: Answer) -> str:
    why = f"what your launch takes is not known ({answer.launch.unknown})"
    if answer.plan is None:
        return f"No plan fits in {format_bytes(answer.job.memory_budget_bytes)}, and {why}."
    figures = f"{format_seconds(answer.plan.step_s)} and {format_bytes(answer.plan.memory_bytes)}"
    return f"The plan takes {figures}; {why}: compare them by measuring."


def _best(answer: Answer, plan: Row) -> Neighbour | None:
    """The fastest neighbour, where it is worth leaving the layout for."""
    near = min(answer.near, key=lambda each: each.row.step_s, default=None)
    assert answer.launch.row is not None
    fits = answer.launch.row.memory_bytes <= answer.job.memory_budget_bytes
    before_s = min(plan.step_s, answer.launch.least_s) if fits else plan.step_s
    return near if near is not None and gain(near.row, before_s) >= WORTH else None


def _and_near(answer: Answer, near: Neighbour | None, before_s: float) -> str:
    return "" if near is None else f" Another layout, {answer.changed(near)}, under a plan: {_less(near.row, before_s)}."


def _plan(answer: Answer, plan: Row, won: float) -> str:
    """What a plan is where the launch does not fit."""
    compared = f"{_percent(won)} less" if won > 0 else f"{_percent(-won)} more"
    return f"run the plan: it fits, {_room(answer, plan)}, and takes {compared} than {_today(answer)}"


def _room(answer: Answer, plan: Row) -> str:
    """Its bytes beside the launch's."""
    assert answer.launch.row is not None
    difference = plan.memory_bytes - answer.launch.row.memory_bytes
    if abs(difference) < 0.005 * plan.memory_bytes:
        return "in the same memory"
    return f"in {format_bytes(abs(difference))} {'more' if difference > 0 else 'less'}"


def _too_large(answer: Answer) -> str:
    assert answer.launch.row is not None
    held, budget = answer.launch.row.memory_bytes, answer.job.memory_budget_bytes
    return f"By this count {_today(answer)} holds {format_bytes(held)} of {format_bytes(budget)}: too much"


def _compared(row: Row, before_s: float) -> str:
    won = gain(row, before_s)
    return f"{_percent(won)} less" if won > 0 else f"{_percent(-won)} more"


def _less(row: Row, before_s: float) -> str:
    return f"{_compared(row, before_s)} than today"


def _keep(answer: Answer) -> str:
    return f" {_capital(KEEP)}." if answer.launch.written else ""


def _today(answer: Answer) -> str:
    return "today" if answer.launch.written else "stock none"


def _little(won: float) -> str:
    if abs(won) < 0.0005:
        return "the plan takes as long"
    return f"the plan takes {_percent(abs(won))} {'less' if won > 0 else 'more'}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if abs(part) >= 0.1 else f"{100 * part:.1f} %"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
