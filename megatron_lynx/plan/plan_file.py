"""Plan files, version 1.

    plan.yaml ──load_plan──> Plan ──dump_plan──> text ──save_plan──> plan.yaml

Keys are in reading order, one line per decision, without empty values and defaults. Exact both ways: `load_plan` of a dumped plan
equals it, and dumping that gives the same text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from megatron_lynx.anatomy import COLUMN_PARALLEL, DENSE, HALVES, ROW_PARALLEL, Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, THEN, UNTIL, window_name
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.plan.plan import PLAN_VERSION, Plan
from megatron_lynx.validation import validated
from megatron_lynx.version import __version__
from megatron_lynx.whole_file import write_whole
from megatron_lynx.yaml_file import FlowMapping, FlowSequence, read_yaml, write_yaml


def _listed(halves: Mapping[Half, Section]) -> str:
    """The items of each half, as the header lists them."""
    return "\n".join(f"#     {half:<12}{' '.join(section.names)}" for half, section in halves.items())


_ITEMS = _listed(DENSE)
_STRETCHES = f"{window_name('bwd', HALVES[1], 0)}{UNTIL}{DENSE[HALVES[0]].stops[-1]}{THEN}{window_name('bwd', HALVES[1], 2)}"
_WINDOWS = f"{window_name('bwd', HALVES[1], 0)}, {window_name('bwd', HALVES[0], 0, 1)}"
HEADER = f"""\
# A plan of megatron-lynx {__version__}. `megatron-lynx explain` shows what it does; it may be edited:
#   keep, recompute  each item of a layer is in exactly one. {" and ".join(ROW_PARALLEL)} are always kept.
{_ITEMS}
#   windows       behind which wait a half is recomputed (or {{steady: ..., cooldown: ...}} where the two differ):
#                 {_WINDOWS}: a collective of this layer, or of one above it (+1);
#                 {RECV_BACKWARD}; {ON_DEMAND}, which hides nothing; or several: {_STRETCHES}
#   gather        with sequence parallelism: where the input of a recomputed {" or ".join(COLUMN_PARALLEL)} is gathered
#   ahead_depth   how many layer halves may be regenerated before backward needs them. More hides more, and costs memory.
#   offload       how many bytes of every micro-batch go to the host; smaller tensors than smallest_tensor_bytes stay
#   whole         micro-batches that keep everything: the first of every so many
# `predicted` is what the planner expects, `provenance` where the plan came from: edits change neither.
"""

_WAITS = f"{window_name('fwd', HALVES[1], 0)}, {window_name('bwd', HALVES[1], 0, -1)} of the layer below"
DEFERRED = f"""\
#   weight_gradients  of a rule: linears that defer theirs, and the waits in which these may run: {RECV_BACKWARD},
#                 {_WAITS}; of a stage: the most bytes that they may hold meanwhile
"""
"""Added to the header of plans that delay weight gradients."""
IN_PIECES = """\
#   weight_gradient_pieces  of a rule: their weight gradients run in so many pieces, one where a wait is named
"""
"""Added if any is cut into pieces."""
PACED = """\
#   pace_bytes    of offload: micro-batches go whose own backward follows at once, too, so many bytes beside one half's forward;
#                 with half_by_half: all every micro-batch goes so, and comes back within its own backward
"""
"""Added for offloading within a micro-batch."""
PIECES = """\
#   head          output projection and loss run in so many pieces of a sequence: inexact, docs/plan_file.md
"""
"""Added for a head in pieces."""
CHECKPOINTED = """\
#   checkpoint    of a rule: a layer, both halves, one of them, or {layers: n} at a time keep their input alone; all inside runs
#                 again where backward enters it, collectives and exchanges too. Items of such a half are in neither list
"""
"""Added for checkpoints."""
AHEAD = """\
#   ahead         of a rule: what its checkpoints communicate again begins where backward enters the attention half of the layer
#                 above, and travels behind that: the dispatch of tokens, else the reduction behind an attention; with
#                 gather the input of that attention is gathered there before it
"""
"""Added for communication that begins ahead."""
REST_IN_WAIT = """\
#                 windows of a checkpoint's half: what comes behind all that it communicates runs again in that wait, for the
#                 gradient of what the half returned
"""
"""Added if the rest of a checkpoint runs in a wait."""
_END = "# `predicted`"


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file.

    Raises `ConfigError` with every problem and its place: invalid YAML, unknown keys, misspelt items, stages or layers that are
    missing or out of range, an unknown version.
    """
    data, where = read_yaml(path, "a plan, which `megatron-lynx plan -o FILE` writes"), os.fspath(path)
    version = data.get("version")
    if isinstance(version, int) and version > PLAN_VERSION:
        todo = f"upgrade megatron-lynx (this is {__version__}), or make the plan anew"
        raise ConfigError(f"{where} is from the future", [Problem(f"{where}: version", str(version), str(PLAN_VERSION), todo)])
    return validated(Plan, data, where)


def dump_plan(plan: Plan) -> str:
    """The text of a plan file, with an explanatory header."""
    rules = [rule for stage in plan.stages for rule in stage.rules]
    paragraphs = {
        DEFERRED: any(stage.defers for stage in plan.stages),
        IN_PIECES: any(rule.weight_gradient_pieces for rule in rules),
        PACED: any(stage.offload is not None and stage.offload.pace_bytes is not None for stage in plan.stages),
        CHECKPOINTED: any(rule.checkpoint is not None for rule in rules),
        REST_IN_WAIT: any(rule.rest_in_wait for rule in rules),
        AHEAD: any(rule.ahead for rule in rules),
        PIECES: plan.head is not None,
    }
    header = HEADER.replace(_END, "".join(text for text, applies in paragraphs.items() if applies) + _END)
    if plan.model.halves != DENSE:
        header = header.replace(_ITEMS, _listed(plan.model.halves))
    return header + write_yaml(_in_lines(plan.model_dump(mode="json", exclude_defaults=True)))


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file whole or not at all. Raises `ConfigError` if the path cannot be written."""
    write_whole(path, dump_plan(plan))


def plan_schema() -> dict[str, Any]:
    """The JSON schema of plan files, for editors. Stored in `configs/plan.schema.json`."""
    schema = Plan.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "megatron-lynx plan", **schema}


def _in_lines(data: dict[str, Any]) -> dict[str, Any]:
    """The same data, with short collections marked to be written on one line."""
    stages = [
        _flow(stage, "offload", "weight_gradients", "whole", "predicted") | {"rules": [_rule(rule) for rule in stage["rules"]]}
        for stage in data["stages"]
    ]
    return _flow(data, "model", "parallel", "batch", "device", "head") | {"stages": stages}


def _rule(rule: dict[str, Any]) -> dict[str, Any]:
    lines = _flow(rule, "checkpoint", "keep", "recompute", "windows", "gather", "weight_gradient_pieces")
    if any(isinstance(window, dict) for window in rule.get("windows", {}).values()):
        lines["windows"] = _flow(rule["windows"], *HALVES)  # a line for each half, or they would be long
    if deferred := rule.get("weight_gradients"):
        lines["weight_gradients"] = _flow(deferred, *deferred)
    return lines


def _flow(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    """`data`, with the collections under `keys` on one line each."""
    lines: dict[type, Callable[[Any], Any]] = {dict: FlowMapping, list: FlowSequence}
    return {key: lines[type(value)](value) if key in keys and type(value) in lines else value for key, value in data.items()}
