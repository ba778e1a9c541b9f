"""Plan files, version 1. Keys are in reading order, one line per decision, without empty values and defaults.

Exact both ways: `load_plan` of a dumped plan equals it, and dumping that gives the same text."""

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
    return "\n".join(f"#     {half:<12}{' '.join(section.names)}" for half, section in halves.items())


_ITEMS = _listed(DENSE)
_STRETCHES = f"{window_name('bwd', HALVES[1], 0)}{UNTIL}{DENSE[HALVES[0]].stops[-1]}{THEN}{window_name('bwd', HALVES[1], 2)}"
_WINDOWS = f"{window_name('bwd', HALVES[1], 0)}, {window_name('bwd', HALVES[0], 0, 1)}"
HEADER = f"""\
# A plan of megatron-lynx {__version__}. `megatron-lynx explain` shows what it does; it may be edited:
#   keep, recompute  each item of a layer is in exactly one. {" and ".join(ROW_PARALLEL)} are always kept.
{_ITEMS}
#   windows       behind which wait a half is recomputed:
#                 {_WINDOWS}: a collective of this layer, or of one above it (+1);
#                 {RECV_BACKWARD}; {ON_DEMAND}, which hides nothing; or several: {_STRETCHES}
#   gather        with sequence parallelism: where the input of a recomputed {" or ".join(COLUMN_PARALLEL)} is gathered
#   ahead_depth   how many layer halves may be regenerated before backward needs them. More hides more, and costs memory.
#   offload       how many bytes of every micro-batch go to the host; smaller tensors than smallest_tensor_bytes stay
#   docs/plan_file.md explains every key.
# `predicted` is what the planner expects, `provenance` where the plan came from: edits change neither.
"""


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
    header = HEADER
    if plan.model.halves != DENSE:
        header = header.replace(_ITEMS, _listed(plan.model.halves))
    return header + write_yaml(_in_lines(plan.model_dump(mode="json", exclude_defaults=True)))


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    write_whole(path, dump_plan(plan))


def plan_schema() -> dict[str, Any]:
    schema = Plan.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "megatron-lynx plan", **schema}


def _in_lines(data: dict[str, Any]) -> dict[str, Any]:
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
    lines: dict[type, Callable[[Any], Any]] = {dict: FlowMapping, list: FlowSequence}
    return {key: lines[type(value)](value) if key in keys and type(value) in lines else value for key, value in data.items()}
