"""The plan: for every pipeline stage, which layers it owns and what becomes of each layer's activations.

    plan.yaml ──load_plan──> Plan ──apply──> a training job
                              │
              stages[k].rules[i]: a range of layers that are treated alike. Entry k is chunk k // p of stage k % p
                              ├── keep / replay      every item of the layer is in exactly one of them
                              ├── windows            where each half is replayed, by phase where phases differ
                              └── gather             (sequence parallelism) where a replayed GEMM's input is gathered

A plan is checked here as far as it can be without a model: its own shape, ranges, and what the runtime can honour.
Whether it fits a live run is `apply.match`'s question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megatron_lynx.items import COLUMN_PARALLEL, HALVES, ITEMS, ITEMS_OF, ROW_PARALLEL, Half
from megatron_lynx.plan import double_buffered, order
from megatron_lynx.schedule.windows import ON_DEMAND, PATTERN, RECV_BACKWARD, Collective, window_at
from megatron_lynx.units import MIB

PLAN_VERSION = 1

MOST_LAYERS = 1_000
"""A mistyped number must be answered at once, not counted to."""

GATHER_PATTERN = r"(on_demand|bwd\.(attention|mlp)\.\d(\+\d+)?)"

_BACKWARD = tuple(f"bwd.{half}.{ordinal}{above}" for ordinal in range(3) for half in HALVES for above in ("", "+1"))
_FORWARD = tuple(f"fwd.{half}.{ordinal}" for ordinal in range(2) for half in HALVES)


def _matching(pattern: str, examples: tuple[str, ...]) -> AfterValidator:
    """Text must match `pattern`; what does not is answered with names of that kind, not with the pattern."""
    expected = ", ".join(repr(name) for name in examples)

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise PydanticCustomError("literal_error", "no such name", {"expected": expected})
        return text

    return AfterValidator(check)


WindowName = Annotated[
    str,
    _matching(PATTERN, (ON_DEMAND, RECV_BACKWARD, *_BACKWARD, *_FORWARD)),
    WithJsonSchema({"type": "string", "pattern": f"^{PATTERN}$"}),
]
GatherName = Annotated[
    str,
    _matching(GATHER_PATTERN, (ON_DEMAND, *_BACKWARD)),
    WithJsonSchema({"type": "string", "pattern": f"^{GATHER_PATTERN}$"}),
]
ItemName = Literal[
    "input_layernorm",
    "linear_qkv",
    "rotary",
    "core_attention",
    "linear_proj",
    "attention_bda",
    "pre_mlp_layernorm",
    "linear_fc1",
    "activation",
    "linear_fc2",
    "mlp_bda",
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LayerRange(_Part):
    """Layers `first` to `last`, both included, by Megatron's global layer number (from 1). Written `3` or `3-8`."""

    first: int = Field(ge=1, le=MOST_LAYERS)
    last: int = Field(ge=1, le=MOST_LAYERS)

    @model_validator(mode="after")
    def _ordered(self) -> LayerRange:
        if self.last < self.first:
            raise ValueError(f"{self} ends before it begins (write the smaller layer number first)")
        return self

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        return iter(range(self.first, self.last + 1))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.first <= layer <= self.last

    def __len__(self) -> int:
        return self.last - self.first + 1


def _read_range(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"first": value, "last": value}
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", value.strip())):
        return {"first": int(match[1]), "last": int(match[2])}
    if isinstance(value, str):
        raise ValueError(f"{value!r} is no layer range, write one layer (3) or a range (3-8)")
    return value


def _write_range(value: LayerRange) -> int | str:
    return value.first if value.first == value.last else str(value)


Layers = Annotated[
    LayerRange,
    BeforeValidator(_read_range, json_schema_input_type=int | str),
    PlainSerializer(_write_range, return_type=int | str),
]


class ByPhase(_Part):
    """Windows of one half where they differ by phase (DESIGN 3.2).

    steady:   the backward follows a forward, whose collectives can hide this half's replay.
    cooldown: the backward follows another backward; only receiving its gradient can.
    """

    steady: WindowName
    cooldown: WindowName


class Windows(_Part):
    """Where the two halves of a layer are replayed. A half that replays nothing has none."""

    attention: WindowName | ByPhase | None = None
    mlp: WindowName | ByPhase | None = None

    def of(self, half: Half, phase: Literal["steady", "cooldown"]) -> str:
        window = self.attention if half == "attention" else self.mlp
        if window is None:
            return ON_DEMAND
        return window if isinstance(window, str) else getattr(window, phase)


class Gather(_Part):
    """Behind which backward collective the input of a replayed `linear_qkv` / `linear_fc1` is gathered, once.

    Only with sequence parallelism, where replaying these GEMMs needs an all-gather. The gathered input serves the replay
    and then the weight gradient, for which stock Megatron would have gathered it anyway.
    """

    attention: GatherName | None = None
    mlp: GatherName | None = None

    def of(self, half: Half) -> str | None:
        return self.attention if half == "attention" else self.mlp


class Rule(_Part):
    """What becomes of the activations of a range of layers."""

    layers: Layers
    keep: tuple[ItemName, ...] = ()
    replay: tuple[ItemName, ...] = ()
    windows: Windows = Windows()
    gather: Gather = Gather()

    def replays(self, half: Half) -> tuple[str, ...]:
        """The replayed items of one half, in the order in which the layer runs them."""
        return tuple(item for item in ITEMS_OF[half] if item in self.replay)

    @model_validator(mode="after")
    def _whole(self) -> Rule:
        listed = self.keep + self.replay
        problems = [f"{item} is listed twice" for item in ITEMS if listed.count(item) > 1]
        problems += [f"{item} is neither kept nor replayed" for item in ITEMS if item not in listed]
        problems += [f"{item} must be kept: its replay would repeat a reduction" for item in ROW_PARALLEL if item in self.replay]
        for half in HALVES:
            window, gather = getattr(self.windows, half), self.gather.of(half)
            if window is not None and not self.replays(half):
                problems.append(f"windows.{half} is given, but the {half} half replays nothing")
            if gather is not None and COLUMN_PARALLEL[half] not in self.replay:
                problems.append(f"gather.{half} is given, but {COLUMN_PARALLEL[half]} is kept")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class Predicted(_Part):
    """What the planner expects of one stage. Seconds and bytes are of one step on one rank."""

    step_s: float | None = None
    """Seconds of the step's forwards and backwards over all stages; reducing gradients and the optimizer's update come on top."""
    hidden_replay_s: float = 0.0
    """Seconds of replay that run inside windows."""
    exposed_replay_s: float = 0.0
    """Seconds of replay (or the part of them) that no window hides."""
    resident_activation_bytes: int = 0
    """What the stage's layers hold for one micro-batch between its forward and its backward."""
    ahead_bytes: int = 0
    """What regenerated frames hold at most, at the ahead depth."""
    replayed_flops: int = 0
    """Floating-point operations of the GEMMs and batched GEMMs that replays repeat, one micro-batch."""
    exposed_copy_s: float = 0.0
    """Seconds that the whole stage waits for copies from the host."""
    host_bytes: int = 0
    """Pinned host memory of the whole stage."""
    memory_bytes: int = 0
    """Everything on a device of the whole stage at its fullest, parameters and optimizer included."""


class Offload(_Part):
    """What goes to host memory, of every micro-batch of a chunk that is offloaded at all."""

    bytes: int = Field(ge=1)
    """How much of what its layers keep. A tensor at the edge is split."""
    smallest_tensor_bytes: int = Field(default=MIB, ge=0)
    """Smaller tensors stay."""
    prefetch: int = Field(default=1, ge=1)
    """How many backwards before its own a micro-batch's copy comes back."""
    beside_messages: Literal["allow", "avoid"] = "allow"
    """Whether copies may run beside messages between stages, or take turns with them: where both go over one link, they disturb
    each other. Stages that overlap messages with passes cannot avoid them."""


class Whole(_Part):
    """Recomputation for a part of the micro-batches (Korthikanti et al., appendix C): `first` of every `of_every` keep all."""

    of_every: int = Field(ge=1)
    first: int = Field(ge=1)

    @model_validator(mode="after")
    def _some(self) -> Whole:
        if self.first > self.of_every:
            raise ValueError(f"the first {self.first} of every {self.of_every} micro-batches are more than there are")
        return self

    def __contains__(self, micro_batch: object) -> bool:
        return isinstance(micro_batch, int) and micro_batch % self.of_every < self.first


class Stage(_Part):
    """One pipeline stage; with several chunks on each stage, one chunk of it."""

    stage: int = Field(ge=0)
    chunk: int = Field(default=0, ge=0)
    layers: Layers
    ahead_depth: int = Field(ge=0)
    """How many frames may be regenerated before backward reaches them (rule R4)."""
    rules: tuple[Rule, ...]
    offload: Offload | None = None
    whole: Whole | None = None
    """Micro-batches, counted from 0 in each step, that keep everything whatever the rules say."""
    predicted: Predicted = Predicted()

    def rule_for(self, layer: int) -> Rule:
        return next(rule for rule in self.rules if layer in rule.layers)

    @model_validator(mode="after")
    def _covered(self) -> Stage:
        problems = []
        for count, group in groupby(self.layers, key=lambda layer: sum(layer in rule.layers for rule in self.rules)):
            layers = list(group)
            if count != 1:
                problems.append(f"layers {layers[0]}-{layers[-1]} have {count} rules each, each needs exactly one")
        for rule in self.rules:
            if rule.layers.first < self.layers.first or rule.layers.last > self.layers.last:
                problems.append(f"a rule names layers {rule.layers}, but the stage owns {self.layers}")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class ModelFacts(_Part):
    """The model that the plan was made for, as far as it decides what fits."""

    layers: int = Field(ge=1, le=MOST_LAYERS)
    hidden: int = Field(ge=1)
    ffn: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_groups: int = Field(ge=1)
    seq: int = Field(ge=1)
    implementation: Literal["local", "transformer_engine"] = "local"
    """Whose layers. Transformer Engine makes a norm inside the linear behind it."""


class ParallelFacts(_Part):
    """The layout that the plan was made for."""

    tensor: int = Field(ge=1)
    pipeline: int = Field(ge=1, le=MOST_LAYERS)
    chunks: int = Field(default=1, ge=1, le=MOST_LAYERS)
    """Model chunks on each stage (Megatron's virtual pipeline size); 1: plain 1F1B."""
    microbatch_group: int | None = Field(default=None, ge=1, le=1_000_000)
    """Micro-batches that pass one chunk before the next one has its turn; none: as many as stages."""
    sequence_parallel: bool = False

    @property
    def group(self) -> int:
        """The size of those groups."""
        return self.microbatch_group or self.pipeline


class BatchFacts(_Part):
    """Micro-batch size, and how many micro-batches a pipeline runs per step."""

    micro: int = Field(ge=1)
    microbatches: int = Field(ge=1, le=1_000_000)


class Provenance(_Part):
    """Where the plan came from. Digests are SHA-256 of the canonical JSON of the job and of the profile."""

    made_by: str
    job: str | None = None
    profile: str | None = None
    note: str | None = None


class Plan(_Part):
    """A whole plan, version 1."""

    version: Literal[1]
    model: ModelFacts
    parallel: ParallelFacts
    batch: BatchFacts
    schedule: Literal["flush", "double_buffered"] = "flush"
    """Whether the pipeline is emptied before each update (1F1B, interleaved), or never (gradients are then one update old)."""
    defer_updates: bool = True
    """Without flushes: whether stages go on with the next batch until all can update together, into a second gradient buffer."""
    stages: tuple[Stage, ...]
    provenance: Provenance

    def chunks_of(self, stage: int) -> tuple[Stage, ...]:
        """The entries of a pipeline stage: one, or one for each of its chunks."""
        return tuple(entry for entry in self.stages if entry.stage == stage)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        problems = [*_impossible_chunks(self), *double_buffered.problems(self), *_missing_stages(self), *_broken_layers(self)]
        for at, stage in enumerate(self.stages):
            for rule in stage.rules:
                problems += [f"stages.{at} layers {rule.layers}: {text}" for text in _unhonoured(self, stage, rule)]
        if not problems:
            problems = [
                f"stages.{at}: {text}"
                for at, stage in enumerate(self.stages)
                for text in order.problems(stage, self.parallel, engine=self.model.implementation == "transformer_engine")
            ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _impossible_chunks(plan: Plan) -> list[str]:
    layout, found = plan.parallel, plan.batch.microbatches
    if layout.chunks == 1:
        stated = layout.microbatch_group
        return [] if stated is None else [f"parallel.microbatch_group is {stated}, but without chunks nothing takes turns"]
    if layout.pipeline == 1:
        return [f"parallel.chunks is {layout.chunks}, but one stage has nothing to take turns with (pipeline 1)"]
    if layout.group < layout.pipeline:
        return [f"parallel.microbatch_group ({layout.group}) must be at least pipeline ({layout.pipeline})"]
    if found >= layout.group and not 0 < found % layout.group < layout.pipeline:
        return []
    needed = f"a multiple of pipeline ({layout.pipeline})"
    if layout.group != layout.pipeline:
        needed = f"in groups of microbatch_group ({layout.group}), the last of at least pipeline ({layout.pipeline}),"
    return [f"batch.microbatches ({found}) must be {needed} with {layout.chunks} chunks on each stage"]


def _no_such_place(plan: Plan, stage: Stage, rule: Rule, name: str) -> Iterator[str]:
    """A forward of another chunk of the stage has the same windows as far as it has layers."""
    window = window_at(name, rule.layers.last)
    assert isinstance(window, Collective)
    place, least = window.layer - stage.layers.first + 1, min(len(entry.layers) for entry in plan.chunks_of(stage.stage))
    if place > least:
        found = f"windows are {name}, in layer {place} of the chunk whose forward runs just before"
        yield f"{found}, but stage {stage.stage} has a chunk of {least} layers"


def _missing_stages(plan: Plan) -> list[str]:
    pipeline, chunks = plan.parallel.pipeline, plan.parallel.chunks
    found = [(stage.stage, stage.chunk) for stage in plan.stages]
    needed = [(stage, chunk) for chunk in range(chunks) for stage in range(pipeline)]
    if found == needed:
        return []
    if chunks == 1:
        found_stages, needed_stages = [stage for stage, _ in found], [stage for stage, _ in needed]
        return [f"stages are numbered {found_stages}, but pipeline {pipeline} needs {needed_stages}"]
    return [f"stages are numbered (stage, chunk) {found}, but pipeline {pipeline} with {chunks} chunks needs {needed}"]


def _broken_layers(plan: Plan) -> list[str]:
    owned = [layer for stage in plan.stages for layer in stage.layers]
    if owned == list(range(1, plan.model.layers + 1)):
        return []
    spans = ", ".join(str(stage.layers) for stage in plan.stages)
    return [f"the stages own layers {spans}, but the model has layers 1-{plan.model.layers}, each owned once and in order"]


def _unhonoured(plan: Plan, stage: Stage, rule: Rule) -> Iterator[str]:
    """What a rule asks for and the runtime cannot give in this layout."""
    layout = plan.parallel
    last = stage.stage == layout.pipeline - 1 and stage.chunk == layout.chunks - 1
    for half in HALVES:
        norm, linear = ITEMS_OF[half][0], COLUMN_PARALLEL[half]
        if plan.model.implementation == "transformer_engine" and linear in rule.replay and norm not in rule.replay:
            yield f"{linear} is replayed, and {norm} with it: Transformer Engine makes the norm inside the linear"
        gathers = layout.sequence_parallel and COLUMN_PARALLEL[half] in rule.replay
        if gathers and rule.gather.of(half) is None:
            yield f"{COLUMN_PARALLEL[half]} is replayed under sequence_parallel, so gather.{half} must say where its input is"
        if not layout.sequence_parallel and rule.gather.of(half) is not None:
            yield f"gather.{half} is given without sequence parallelism"
        if stage.ahead_depth == 0 and any(rule.windows.of(half, phase) != ON_DEMAND for phase in ("steady", "cooldown")):
            yield f"windows.{half} asks for a replay ahead of time, but ahead_depth is 0"
        window = getattr(rule.windows, half)
        names = [] if window is None else [window] if isinstance(window, str) else [window.steady, window.cooldown]
        for name in names:
            if name == RECV_BACKWARD and last:
                yield f"windows.{half} is {name}, but the last stage receives no gradient"
            if name.startswith("fwd.") and plan.schedule == "double_buffered":
                yield f"windows.{half} is {name}, {double_buffered.NO_FORWARD_WINDOW}"
            elif name.startswith("fwd.") and last:
                yield f"windows.{half} is {name}, but on the last stage a micro-batch's own forward runs just before its backward"
            elif name.startswith("fwd.") and layout.chunks > 1:
                yield from _no_such_place(plan, stage, rule, name)
            if name not in (ON_DEMAND, RECV_BACKWARD) and layout.tensor == 1:
                yield f"windows.{half} is {name}, but tensor 1 has no collectives"
        if isinstance(window, ByPhase) and window.cooldown.startswith("fwd."):
            yield f"windows.{half}.cooldown is {window.cooldown}, but no forward runs in cool-down"
