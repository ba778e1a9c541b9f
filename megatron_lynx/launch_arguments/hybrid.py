"""Launches of `pretrain_hybrid.py` whose stack is a GPT in newer words: an attention and an MLP for each of its layers.

    --hybrid-layer-pattern "*-*-|*-*-"    ──> --num-layers 4, a stage or a chunk between two bars; without bars even stages
    --spec ... hybrid_stack_spec          ──> Transformer Engine's layers, as it says

What else a pattern may have (Mamba, experts, an attention without an MLP) is left to be refused. The same pairs are a plan's
layers in a run (`apply.hybrid`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.given import Given, Value
from megatron_lynx.launch_arguments.parallel_facts import LAYOUT

PATTERN, SPEC = "hybrid_layer_pattern", "spec"
PATTERN_FLAG = "--hybrid-layer-pattern"
PAIR, BAR = "*-", "|"
STOCK_SPEC = "hybrid_stack_spec"


def with_pairs(given: Given, problems: list[Problem]) -> Given:
    """The same launch in words of a GPT, where its pattern is one. Anything else is returned as it is."""
    pattern = str(given[PATTERN] or "")
    parts = pattern.split(BAR)
    if not pattern or any(part != PAIR * (len(part) // 2) or not part for part in parts):
        return given
    if given["qk_layernorm"]:
        problems.append(Problem(given.origin("qk_layernorm"), "given", "none: a hybrid stack's attention has no such norms"))
    layers, pipeline = [len(part) // 2 for part in parts], int(given["pipeline_model_parallel_size"] or 1)
    if len(layers) == 1 and layers[0] % pipeline == 0:
        layers = [layers[0] // pipeline] * pipeline
    values = {"num_layers": sum(layers), "transformer_impl": "transformer_engine"}
    if len(layers) > 1:
        values[LAYOUT] = f"E{BAR.join('t' * count for count in layers)}L"
    kept = {name: value for name, value in given.values.items() if not _is_told(name, value)}
    told = {name: Value(given.table.of_name[name][-1], PATTERN_FLAG, value) for name, value in values.items()}
    return replace(given, values={**kept, **told})


def is_hybrid(given: Given) -> bool:
    """Of a launch as `with_pairs` returns it."""
    return given.origin("num_layers") == PATTERN_FLAG


def pattern_of(counts: Iterable[int]) -> str:
    """The pattern of a stack with so many layers of a GPT on each virtual stage, in layer order."""
    return BAR.join(PAIR * count for count in counts)


def _is_told(name: str, value: Value) -> bool:
    """Whether what a flag says is said by the words of a GPT."""
    return name == PATTERN or (name == SPEC and STOCK_SPEC in str(value.value))
