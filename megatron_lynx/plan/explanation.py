"""Explains a plan on the terminal: how to launch it, its predicted figures, and its stages, on one screen or layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from megatron_lynx.anatomy import HALVES, Half, names_in
from megatron_lynx.anatomy.address import THEN
from megatron_lynx.kinds.opaque.section import NOTHING, OPAQUE
from megatron_lynx.plan.features import ranges
from megatron_lynx.plan.layout import in_words, launch_flags
from megatron_lynx.plan.plan import Plan, Predicted, Stage
from megatron_lynx.plan.rule import Rule
from megatron_lynx.tables import WrappedTable
from megatron_lynx.units import GIB, format_bytes, format_seconds

NEW_LINE = "\n"
MOST_ROWS, MOST_NAMES = 3, 3


def summary(plan: Plan) -> RenderableType:
    columns = ("stages", "layers", "treatment", "device GiB", "exposed ms")
    table, rows = WrappedTable(columns, words=("stages", "treatment")), list[tuple[list[int], tuple[int, str]]]()
    for stage in range(plan.parallel.pipeline):
        treatment = _in_short(plan.chunks_of(stage))
        alike = next((stages for stages, other in rows if other == treatment), None)
        rows.append(([stage], treatment)) if alike is None else alike.append(stage)
    rows.sort(key=lambda row: (0 not in row[0], -len(row[0])))  # the first stage has most micro-batches in flight
    for stages, (layers, treatment_said) in rows[:MOST_ROWS]:
        predicted = [plan.chunks_of(stage)[0].predicted for stage in stages]
        exposed_ms = 1e3 * max(sum(entry.predicted.exposed_recompute_s for entry in plan.chunks_of(stage)) for stage in stages)
        device = max(stage.memory_bytes or 0 for stage in predicted) / GIB
        table.add(ranges(stages), str(layers), treatment_said, f"{device:.2f}" if device else "-", f"{exposed_ms:.1f}")
    left = sum(len(stages) for stages, _ in rows[MOST_ROWS:])
    more = f"{left} more {'stage is' if left == 1 else 'stages are'} treated in other ways. " if left else ""
    end = Text(f"{more}exposed: recomputation that nothing hides, a step. Layer by layer: --all")
    step = _step_in_words(plan.stages[0].predicted)
    flags = Text(f"launch  {' '.join(launch_flags(plan))}")
    return Group(*_heading(plan), flags, *([Text(f"predicted: {step}")] if step else []), Text(""), table, end)


def _in_short(chunks: Sequence[Stage]) -> tuple[int, str]:
    layers, again, deferred = sum(len(stage.layers) for stage in chunks), Counter[str](), dict[str, None]()
    for rule in (rule for stage in chunks for rule in stage.rules):
        count, halves = rule.layers.last - rule.layers.first + 1, [half for half in HALVES if rule.checkpoints(half)]
        again.update(
            dict.fromkeys(["whole layer"] if len(halves) == len(HALVES) else [f"whole {half}" for half in halves], count)
        )
        items = (item for half in HALVES if half not in halves for item in rule.recomputed_in(half))
        again.update(dict.fromkeys(items, count))
        deferred |= dict.fromkeys(rule.weight_gradients)
    by_count = [(count, [name for name in again if again[name] == count]) for count in sorted({*again.values()}, reverse=True)]
    recomputed = "; ".join(f"in {'all' if count == layers else count}: {_few(names)}" for count, names in by_count)
    parts = [f"recomputed {recomputed}"] if recomputed else []
    parts += [f"weight gradients in waits: {_few([*deferred])}"] if deferred else []
    moved = sum(stage.offload.bytes for stage in chunks if stage.offload is not None)
    parts += [f"to the host: {format_bytes(moved)} of a micro-batch"] if moved else []
    return layers, "; ".join(parts) or "all kept"


def _few(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:MOST_NAMES])} and {more} more"


def explanation(plan: Plan) -> RenderableType:
    parts: list[RenderableType | None] = [*_heading(plan)]
    if not any(stage.predicted.host_s for stage in plan.stages):
        parts.append(Text("host    no stage is said to be host-bound (or the host's time was not known when the plan was made)"))
    parts.append(Text(f"launch  {in_words(plan).replace(NEW_LINE, NEW_LINE + ' ' * 8)}{NEW_LINE}"))
    for stage in range(plan.parallel.pipeline):
        for _, group in groupby(plan.chunks_of(stage), key=_treatment):
            alike = list(group)
            parts += [_table(plan, alike), _beside(alike[0]), _expected(alike[0].predicted)]
    return Group(*(part for part in parts if part is not None))


def _treatment(stage: Stage) -> object:
    first = stage.layers.first
    places = [(rule.layers.first - first, rule.layers.last - first) for rule in stage.rules]
    rules = [rule.model_copy(update={"layers": None}) for rule in stage.rules]
    seconds = ("hidden_recompute_s", "exposed_recompute_s", "weight_gradient_hidden_s", "weight_gradient_exposed_s")
    predicted = stage.predicted.model_copy(update={**dict.fromkeys(seconds, 0.0), "memory": {}})
    return stage.ahead_depth, places, rules, stage.offload, stage.weight_gradients, stage.whole, predicted


def _heading(plan: Plan) -> Iterator[Text]:
    model, layout, batch = plan.model, plan.parallel, plan.batch
    widths = f"hidden {model.hidden}, ffn {model.ffn}, heads {model.heads} ({model.kv_groups} for K and V)"
    sequence = ", sequence parallel" if layout.sequence_parallel else ""
    sequence += ", userbuffers" if layout.userbuffers else ""
    turns = f"interleaved, groups of {layout.group} micro-batches"
    chunks = f", {layout.chunks} chunks on each stage ({turns})" if layout.chunks > 1 else ""
    yield Text(f"model   {model.layers} layers, {widths}, sequence {model.seq}")
    context = f", context {layout.context}" if layout.context > 1 else ""
    yield Text(f"layout  tensor {layout.tensor}{context}, pipeline {layout.pipeline}{chunks}{sequence}")
    if plan.head is not None:  # first, because it is not bitwise equal to stock's
        rows = model.seq // layout.context // plan.head.pieces
        yield Text(f"head    in {plan.head.pieces} pieces: logits of {rows} tokens of each sequence at a time, computed twice")
        yield Text("        inexact: its weight's gradient is summed in another order than stock's; all else is stock's")
    yield Text(f"batch   {batch.microbatches} micro-batches of {batch.micro}")
    if (sizes := model.latent_attention) is not None:
        queries = f"queries compressed to {sizes.q_rank}, " if sizes.compressed else ""
        heads = f"heads of {sizes.head_size} + {sizes.rope_size} rotary, values of {sizes.value_head_size}"
        heads += ", turned in place" if sizes.fused_rotary else ""
        yield Text(f"latent attention: {queries}keys and values to {sizes.kv_rank}; {heads}")
    for name, spans in model.opaque_layers.items():
        if not OPAQUE[name].opaque:
            yield Text(f"{name} in layers {', '.join(map(str, spans))}: of these halves what the table does not name is kept")
        elif name not in NOTHING:
            bytes_said = "nobody looks into it; unless a profile measured its bytes, they are a formula's with a margin"
            yield Text(f"kept whole: {name} in layers {', '.join(map(str, spans))}: {bytes_said}")
    if model.moe_layers:
        layers = ", ".join(map(str, model.moe_layers))
        load = f", of the largest rank {model.moe_load:g} of that" if model.moe_load > 1 else ""
        tokens = f"as many tokens for every expert{load}"
        yield Text(f"experts in layers {layers}, {tokens}: of their MLP halves what the table does not name is kept")
        yield from _load(plan)
    if plan.checkpointed:
        ahead = any(rule.ahead for stage in plan.stages for rule in stage.rules)
        begun = f" (ahead: that travels behind the {HALVES[0]} half of the layer above)" if ahead else ""
        copies = ", and the copy that its last linear has of what it reads" if model.fp8 and model.fp8_copies_kept else ""
        again = f"all inside runs again, with what it communicates{begun}"
        yield Text(f"checkpointed layers {plan.checkpointed}: one input is kept{copies}; {again}")
    if plan.schedule == "double_buffered":
        updates = "deferred, into a second gradient buffer" if plan.defer_updates else "at once"
        yield Text(f"never flushed: two versions of the weights, gradients are one update old; updates {updates}")
    yield Text(f"made by {plan.provenance.made_by}{f': {plan.provenance.note}' if plan.provenance.note else ''}")


def _load(plan: Plan) -> Iterator[Text]:
    fitting = [(stage.predicted.moe_load, stage.stage) for stage in plan.stages if stage.predicted.moe_load]
    if fitting:
        load, stage = min(fitting)
        made_for = f"the plan is made for {plan.model.moe_load:g}, and twice that does not fit"
        yield Text(f"load    at most {load:g} times a balanced share for the experts of one rank (stage {stage}): {made_for}")
        bound = min(stage.predicted.moe_load_fallen_back for stage in plan.stages if stage.predicted.moe_load)
        again = f"experts run again what they make of their rows, which holds to {bound:g} times"
        beyond = again if bound else "a device may run out of memory"
        yield Text(f"        beyond that {beyond}: plan for more with model.experts.holds (--experts-hold)")


def _table(plan: Plan, alike: Sequence[Stage]) -> WrappedTable:
    stage, last, chunked = alike[0], alike[-1], plan.parallel.chunks > 1
    chunks = f"chunk {stage.chunk}" if len(alike) == 1 else f"chunks {stage.chunk}-{last.chunk}, each"
    place = f"stage {stage.stage}, {chunks}" if chunked else f"stage {stage.stage}"
    layers = ", ".join(str(entry.layers) for entry in alike)
    title = f"{place}: layers {layers}, ahead depth {stage.ahead_depth} (layer halves)"
    columns = ("layers", "half", "kept", "recomputed", "window", *(["weight gradients"] if stage.defers else []))
    table = WrappedTable(columns, words=columns, keys=2, title=title, lines=True)
    for rule in stage.rules:
        for half in HALVES:
            kept = [item for item in names_in(half) if item in rule.keep]
            linears = [rule.delayed_said(one) for one in rule.filling(half).linears if one in rule.weight_gradients]
            deferred = [_listed(linears)] if stage.defers else []
            again = rule.recomputed_in(half)
            if rule.checkpoints(half):
                kept, again = [plan.kept_input(stage, rule, half)], ("all, what communicates too",)
            table.add(str(rule.layers), half, _listed(kept), _listed(again), _window(rule, half), *deferred)
    return table


def _listed(items: Sequence[str]) -> Text:
    return Text("\n".join(items) or "-")


def _window(rule: Rule, half: Half) -> Text:
    if rule.checkpoints(half):
        first = rule.feeds(rule.layers.first, half) and half == HALVES[0]
        what = "its gather begins" if rule.gathers_ahead and first else "begins"
        begins = f"{what} ahead, at {HALVES[0]}+1{NEW_LINE}" if rule.ahead and (first or half == HALVES[-1]) else ""
        rest = f"{NEW_LINE}then {wait}: what comes behind all that communicates" if (wait := rule.wait_of_rest(half)) else ""
        return Text(f"{begins}{f'before {HALVES[-1]}' if first else 'where backward enters it'}{rest}")
    if not rule.recomputed_in(half):
        return Text("-")
    gather = rule.gather.of(half)
    gathered = f"\ninput gathered {gather}" if gather else ""
    return Text(f"{rule.windows.of(half)}{gathered}".replace(THEN, f"\n{THEN.lstrip()}"))


def _beside(stage: Stage) -> Text | None:
    lines = []
    if (offload := stage.offload) is not None:
        back = "the copy comes back during the backward before"
        inputs = ", inputs of checkpoints among it" if any(rule.checkpoint is not None for rule in stage.rules) else ""
        goes = f"to the host: {format_bytes(offload.bytes)} of every micro-batch, what forward made first{inputs}"
        stays = f"tensors below {format_bytes(offload.smallest_tensor_bytes)} stay"
        if offload.pace_bytes is None:
            lines.append(f"{goes}; {stays}, {back}")
        else:
            pace = f"it goes half by half, {format_bytes(offload.pace_bytes)} beside one half's forward"
            at_once = f"{pace}, and comes back as it went"
            every = offload.half_by_half == "all"
            partly = "where a micro-batch's own backward follows at once"
            said = f"{at_once}, within its own backward" if every else f"{partly} {at_once}; else {back}"
            lines += [f"{goes}; {stays}", said]
        if offload.beside_messages == "avoid":
            lines.append("copies and messages between stages take turns: an exchange waits for what was asked for before it")
    if (deferred := stage.weight_gradients) is not None:
        limit = format_bytes(deferred.bytes)
        lines.append(f"weight gradients that are deferred hold at most {limit}; then the oldest run at once")
    if (whole := stage.whole) is not None:
        lines.append(f"micro-batches that keep everything: the first {whole.first} of every {whole.of_every}")
    return Text("\n".join(lines)) if lines else None


def _step_in_words(predicted: Predicted) -> str:
    if predicted.step_s is None:
        return ""
    if predicted.update_s is None:
        return f"step {format_seconds(predicted.step_s)} and the optimizer's update"
    whole, update = map(format_seconds, (predicted.step_s + predicted.update_s, predicted.update_s))
    return f"step {whole}, of which the optimizer's update {update}"


def _expected(predicted: Predicted) -> Text:
    if predicted == Predicted():
        return Text("predicted: nothing is stated\n")
    facts = [step] if (step := _step_in_words(predicted)) else []
    facts += [
        f"recomputation hidden {format_seconds(predicted.hidden_recompute_s)}, "
        f"exposed {format_seconds(predicted.exposed_recompute_s)}",
        f"resident per micro-batch {format_bytes(predicted.resident_activation_bytes)}",
        f"regenerated ahead {format_bytes(predicted.ahead_bytes)}",
    ]
    if predicted.weight_gradient_hidden_s or predicted.weight_gradient_exposed_s:
        hidden, exposed = map(format_seconds, (predicted.weight_gradient_hidden_s, predicted.weight_gradient_exposed_s))
        facts.append(f"weight gradients deferred: {hidden} hidden, {exposed} exposed")
    if predicted.host_bytes:
        facts.append(f"pinned on the host {format_bytes(predicted.host_bytes)}")
        facts.append(f"waiting for copies {format_seconds(predicted.exposed_copy_s)}")
    if predicted.memory_bytes:
        facts.append(f"whole device {format_bytes(predicted.memory_bytes)}")
    if predicted.host_s:
        device = format_seconds(predicted.device_s)
        facts.append(f"host-bound: the host needs {format_seconds(predicted.host_s)} to issue what takes the device {device}")
    return Text(f"predicted: {'; '.join(facts)}\n")
