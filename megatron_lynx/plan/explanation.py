"""What a plan does, in tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_lynx.items import HALVES, ITEMS_OF, Half
from megatron_lynx.plan.plan import Plan, Predicted, Rule, Stage
from megatron_lynx.units import format_bytes, format_seconds


def explanation(plan: Plan) -> RenderableType:
    """One table per stage, between what the plan is for and what is expected of it."""
    return Group(*_heading(plan), *(part for stage in plan.stages for part in (_table(stage), _expected(stage.predicted))))


def _heading(plan: Plan) -> Iterator[Text]:
    model, layout, batch = plan.model, plan.parallel, plan.batch
    widths = f"hidden {model.hidden}, ffn {model.ffn}, heads {model.heads} ({model.kv_groups} for K and V)"
    sequence = ", sequence parallel" if layout.sequence_parallel else ""
    yield Text(f"model   {model.layers} layers, {widths}, sequence {model.seq}")
    yield Text(f"layout  tensor {layout.tensor}, pipeline {layout.pipeline}{sequence}")
    yield Text(f"batch   {batch.microbatches} micro-batches of {batch.micro}")
    yield Text(f"made by {plan.provenance.made_by}{f': {plan.provenance.note}' if plan.provenance.note else ''}\n")


def _table(stage: Stage) -> Table:
    title = f"stage {stage.stage}: layers {stage.layers}, ahead depth {stage.ahead_depth} (layer halves)"
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=True)
    for column in ("layers", "half", "kept", "replayed", "window"):
        table.add_column(column)
    for rule in stage.rules:
        for half in HALVES:
            kept = [item for item in ITEMS_OF[half] if item in rule.keep]
            table.add_row(str(rule.layers), half, _listed(kept), _listed(rule.replays(half)), _window(rule, half))
    return table


def _listed(items: Sequence[str]) -> Text:
    return Text("\n".join(items) or "-")


def _window(rule: Rule, half: Half) -> Text:
    if not rule.replays(half):
        return Text("-")
    steady, cooldown = rule.windows.of(half, "steady"), rule.windows.of(half, "cooldown")
    text = steady if steady == cooldown else f"{steady}\nin cool-down {cooldown}"
    gather = rule.gather.of(half)
    return Text(f"{text}\ninput gathered {gather}" if gather else text)


def _expected(predicted: Predicted) -> Text:
    if predicted == Predicted():
        return Text("predicted: nothing is stated\n")
    facts = [] if predicted.step_s is None else [f"step {format_seconds(predicted.step_s)}"]
    facts += [
        f"replay hidden {format_seconds(predicted.hidden_replay_s)}, exposed {format_seconds(predicted.exposed_replay_s)}",
        f"resident per micro-batch {format_bytes(predicted.resident_activation_bytes)}",
        f"regenerated ahead {format_bytes(predicted.ahead_bytes)}",
    ]
    return Text(f"predicted: {'; '.join(facts)}\n")
