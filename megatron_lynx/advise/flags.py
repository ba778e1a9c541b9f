"""Launch flags that another layout, a stock setting, or a plan with other flags changes.

micro-batch 4             --micro-batch-size 4
    packed by slime       --max-tokens-per-gpu n, which also depends on context
tensor 2, was 1           --tensor-model-parallel-size 2 --sequence-parallel
pipeline, or chunks       also the flags that place layers are replaced
    embedding and loss count as layers, before and after           --num-layers-per-virtual-pipeline-stage n
    otherwise                                                      as the plan places them
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lynx.anatomy.stack import pattern_of
from megatron_lynx.config.job import Job
from megatron_lynx.launch_arguments import Reading
from megatron_lynx.launch_arguments.layers import OLD_PATTERNS, PATTERN_FLAG, is_hybrid, predicting_of, stack_of
from megatron_lynx.launch_arguments.parallel_facts import CHUNKS, EACH, EMBEDDING, FIRST, GROUP, LAST, LAYOUT, LOSS, TOKENS, packs
from megatron_lynx.launch_arguments.today import REPLACED
from megatron_lynx.plan.layout import layer_flags
from megatron_lynx.plan.plan import Plan
from megatron_lynx.stock.setting import DELAYED, OVERLAP, USERBUFFERS, Flags, StockSetting, flag_of, flags_of

SIZES = {
    "tensor": "--tensor-model-parallel-size",
    "context": "--context-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "expert": "--expert-model-parallel-size",
}
COUNTED = (EMBEDDING, LOSS)
PLACING = (EACH, CHUNKS, LAYOUT, FIRST, LAST, GROUP, *OLD_PATTERNS)


@dataclass(frozen=True)
class Edit:
    deleted: tuple[str, ...] = ()
    added: Flags = ()

    def __bool__(self) -> bool:
        return bool(self.deleted or self.added)

    @property
    def flags(self) -> list[str]:
        return [shlex.join([flag, *values]) for flag, values in self.added]

    def in_words(self, reading: Reading | None = None) -> str:
        said = " ".join if reading is None else reading.said
        deleted = f"delete {' '.join(self.deleted)}" if self.deleted else ""
        added = f"add {said(self.flags)}" if self.added else ""
        return ", ".join(part for part in (deleted, added) if part)


def of_setting(setting: StockSetting, reading: Reading | None) -> Edit:
    if reading is None:
        return Edit(added=flags_of(setting.fields))
    given, today = reading.given, reading.today.setting.fields
    deleted = (given.origin(name) for name in REPLACED if name in given.values and name not in setting.fields)
    news = {name: value for name, value in setting.fields.items() if today.get(name) != value}
    return Edit(tuple(dict.fromkeys(deleted)) if today != setting.fields or reading.today.graphs else (), flags_of(news))


def of_variant(before: Job, after: Job, reading: Reading | None) -> Edit:
    names = _switches(before, after)
    added = {name: True for name, (was, now) in names.items() if now and not was}
    deleted = names_lost(before, after)
    return Edit(tuple(flag_of(name) if reading is None else reading.given.origin(name) for name in deleted), flags_of(added))


def names_lost(before: Job, after: Job) -> list[str]:
    return [name for name, (was, now) in _switches(before, after).items() if was and not now]


def _switches(before: Job, after: Job) -> dict[str, tuple[bool, bool]]:
    return {
        OVERLAP: (before.model.moe_overlapped, after.model.moe_overlapped),
        DELAYED: (before.model.moe_delayed, after.model.moe_delayed),
        USERBUFFERS: (before.userbuffers, after.userbuffers),
    }


def changes(before: Job, after: Job, made: Plan, reading: Reading | None = None) -> Flags:
    flags: list[tuple[str, tuple[str, ...]]] = []
    for name, flag in SIZES.items():
        if (size := getattr(after.parallel, name)) != getattr(before.parallel, name):
            flags.append((flag, (str(size),)))
    if after.parallel.sequence_parallel and not before.parallel.sequence_parallel:
        flags.append(("--sequence-parallel", ()))
    if reading is not None and packs(reading.given):
        tokens, were = (job.batch.micro * job.model.seq // job.parallel.context for job in (after, before))
        flags += [(TOKENS, (str(tokens),))] if tokens != were else []
    elif after.batch.micro != before.batch.micro:
        flags.append(("--micro-batch-size", (str(after.batch.micro),)))
    return (*flags, *(_placing(made, reading) if _places(before, after) else ()))


def of_layout(before: Job, after: Job, made: Plan, reading: Reading | None) -> Edit:
    added = changes(before, after, made, reading)
    if reading is None:
        return Edit(added=added)
    placing = _replaced(before, after, made, reading)
    origins = dict.fromkeys(reading.given.origin(name) for name in placing if name in reading.given.values)
    kept = {reading.said([flag]).partition("=")[0] for flag, _ in added}
    return Edit(tuple(name for name in origins if name not in kept), added)


def command(reading: Reading, before: Job, after: Job, made: Plan, plan: str) -> str:
    switched = of_variant(before, after, reading)
    setting = dict(changes(before, after, made, reading)) | dict(switched.added)
    if "global_batch_size" not in reading.given.values and "step_batch_size_schedule" not in reading.given.values:
        setting["--global-batch-size"] = (str(after.batch.global_),)
    without = (*_replaced(before, after, made, reading), *names_lost(before, after))
    reading = reading.with_graphs_of(made.model.captured)
    if reading.container is not None:
        return reading.under_plan(plan, [shlex.join([flag, *values]) for flag, values in setting.items()], without=without)
    return reading.changed(setting, without).under_plan(plan, [])


def _replaced(before: Job, after: Job, made: Plan, reading: Reading) -> tuple[str, ...]:
    counted = () if _counts_ends(made, reading) else COUNTED
    return (*PLACING, *counted) if _places(before, after) else ()


def _places(before: Job, after: Job) -> bool:
    auto = after.parallel.partition == "auto"
    return auto or before.partition != after.partition or before.parallel.pipeline != after.parallel.pipeline


def _placing(made: Plan, reading: Reading | None) -> Iterator[tuple[str, tuple[str, ...]]]:
    counted = reading is not None and reading.container is not None
    if _counts_ends(made, reading):
        if made.parallel.chunks > 1 and counted:
            yield "--num-virtual-stages-per-pipeline-rank", (str(made.parallel.chunks),)
        elif made.parallel.chunks > 1:
            yield "--num-layers-per-virtual-pipeline-stage", (str(len(made.stages[1].layers)),)
        return
    if reading is not None and is_hybrid(reading.given):
        virtual_stages = sorted(made.stages, key=lambda stage: min(stage.layers, default=0))
        counts = [len(stage.layers) for stage in virtual_stages]
        yield PATTERN_FLAG, (pattern_of(stack_of(reading.given), counts, predicting_of(reading.given)),)
        return
    for text in layer_flags(made, chunks_counted=counted):
        flag, *values = shlex.split(text)
        yield flag, tuple(values)


def _counts_ends(made: Plan, reading: Reading | None) -> bool:
    if reading is None or not all(reading.given[name] for name in COUNTED):
        return False
    counts = [len(stage.layers) for stage in made.stages]
    return len(counts) > 2 and counts[0] == counts[-1] == counts[1] - 1 and len(set(counts[1:-1])) == 1
