"""Launches of `pretrain_hybrid.py`: their stacks in the words of a GPT, as far as it has words for them.

    --hybrid-layer-pattern "*-*-|*-*-"    ──> --num-layers 4, a stage or a chunk between two bars; without bars even stages
    --hybrid-layer-pattern "M-M*-M*E"     ──> the layers of a plan (`anatomy.stack`), opaque halves (`opaque_facts`), experts
    --spec ... hybrid_stack_spec          ──> Transformer Engine's layers, as it says

A run has the same layers (`apply.hybrid`).
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lynx.anatomy.stack import BAR, EXPERTS, NEEDED, StackLayer, layers_of, segments_of, unknown_in
from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.given import Given, Value
from megatron_lynx.launch_arguments.parallel_facts import LAYOUT

PATTERN, SPEC = "hybrid_layer_pattern", "spec"
PATTERN_FLAG = "--hybrid-layer-pattern"
STOCK_SPEC = "hybrid_stack_spec"


def in_words_of_a_gpt(given: Given, problems: list[Problem]) -> Given:
    """The same launch, its pattern told in layers of a plan. One without a pattern is returned as it is."""
    if not (pattern := str(given[PATTERN] or "")):
        return given
    segments = _segments(given)
    if unknown_in(pattern) or not segments or not all(segments):
        needed = NEEDED if unknown_in(pattern) else f"some for each of {given['pipeline_model_parallel_size']} stages, or as many"
        problems.append(Problem(PATTERN_FLAG, f"{unknown_in(pattern) or 'layers'} in {pattern}", needed))
        return given
    if given["qk_layernorm"]:
        problems.append(Problem(given.origin("qk_layernorm"), "given", "none: a hybrid stack's attention has no such norms"))
    stack, counts = stack_of(given), [len(layers_of(segment)) for segment in segments]
    having = [int(layer.second == EXPERTS) for layer in stack]
    values = {"num_layers": sum(counts), "transformer_impl": "transformer_engine"}
    if len(counts) > 1:
        values[LAYOUT] = f"E{BAR.join('t' * count for count in counts)}L"
    if any(having) and given["num_experts"]:
        values["moe_layer_freq"] = f"[{','.join(map(str, having))}]"
    elif any(having) or given["num_experts"]:
        problems.append(Problem(PATTERN_FLAG, pattern, "--num-experts beside it where it has experts (E), and only there"))
    told = {name: Value(given.table.of_name[name][-1], PATTERN_FLAG, value) for name, value in values.items()}
    kept = {name: value for name, value in given.values.items() if not (name == SPEC and STOCK_SPEC in str(value.value))}
    return replace(given, values={**kept, **told})


def is_hybrid(given: Given) -> bool:
    """Of a launch as `in_words_of_a_gpt` returns it."""
    return given.origin("num_layers") == PATTERN_FLAG


def stack_of(given: Given) -> list[StackLayer]:
    """The layers of a plan in a hybrid stack of known symbols; none where there is no such stack."""
    return [layer for segment in _segments(given) for layer in layers_of(segment)]


def _segments(given: Given) -> list[str]:
    pattern = str(given[PATTERN] or "")
    return segments_of(pattern, int(given["pipeline_model_parallel_size"] or 1)) if pattern and not unknown_in(pattern) else []
