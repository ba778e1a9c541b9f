"""Layers of a launch that differ: windows of attention, hybrid stacks, linear attention.

--moe-layer-freq 2, or '([0]+[1]*2)'                    ──> 2, or [0, 1, 1]: a number, or 0 and 1 for each layer
--hybrid-layer-pattern "*-*-|*-*-"                      ──> --num-layers 4, a stage or a chunk between two bars
--hybrid-layer-pattern "M-M*-M*E"                       ──> the layers of a plan (`anatomy.stack`), opaque halves, experts
--hybrid-layer-pattern "M*E/*E"                         ──> --mtp-num-layers 1, a layer like the decoder's last one"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_lynx.anatomy import stack
from megatron_lynx.config.experts import as_spans, gated_attention
from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.given import Fact, Given, Value
from megatron_lynx.launch_arguments.model_facts import VARIANT
from megatron_lynx.launch_arguments.parallel_facts import LAYOUT

MOST_LAYERS, MOST_CHARACTERS = 1_000, 10_000


def layer_pattern(given: Given, flag: str, problems: list[Problem], example: str) -> int | list[int] | None:
    """The number, or the list for all layers; None, with a problem, for anything else. `example`: a valid list."""
    said, origin, layers = written(given, flag), given.origin(flag), given["num_layers"]
    if said.isdecimal() and len(said) < 10 and int(said) > 0:
        return int(said)
    try:
        pattern = pattern_of(said)
    except ValueError as error:
        problems.append(Problem(origin, str(error), f"a number, or lists of 0 and 1 such as {example}"))
        return None
    if layers is not None and len(pattern) != layers:
        problems.append(Problem(origin, f"a pattern of {len(pattern)} layers", f"one of --num-layers ({layers})"))
        return None
    return pattern


def written(given: Given, flag: str) -> str:
    return str(given[flag]).replace(" ", "")


def pattern_of(text: str) -> list[int]:
    """Sums and products of lists of 0 and 1, as Megatron evaluates them: `([0]+[1]*2)` is 0, 1, 1. Raises ValueError."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a text of {len(text)} characters (at most {MOST_CHARACTERS})")
    try:
        return _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no list of 0 and 1") from None


def _evaluated(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=elements):
            numbers = [element.value if isinstance(element, ast.Constant) else None for element in elements]
            if all(type(number) is int and number in (0, 1) for number in numbers):
                return numbers  # type: ignore[return-value]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _few_enough(_evaluated(left) + _evaluated(right), 1)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
            return _few_enough(_evaluated(left), times)
    raise TypeError


def _few_enough(pattern: list[int], times: int) -> list[int]:
    if len(pattern) * times > MOST_LAYERS:
        raise ValueError(f"a pattern of more than {MOST_LAYERS} layers")
    return pattern * min(times, MOST_LAYERS)  # an empty list may have any factor


WINDOW, SKIPPED, SOFTMAX = "window_size", "window_attn_skip_freq", "softmax_type"


def window_facts(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    if given[SOFTMAX] == "learnable":
        yield Fact("model.sinks", True, given.origin(SOFTMAX))
    if given[WINDOW] is None:
        return
    said = str(given[WINDOW]).strip("()").replace(" ", "").split(",")
    if len(said) != 2 or not said[0].isdecimal() or said[1] != "0":
        needed = "two numbers such as 127,0: keys before a query, and none behind it"
        problems.append(Problem(given.origin(WINDOW), str(given[WINDOW]), needed))
        return
    yield Fact("model.window.keys", int(said[0]) + 1, f"{given.origin(WINDOW)}, and the query's own")
    origin, layers = given.origin(SKIPPED), given["num_layers"]
    if given[SKIPPED] is None or not layers:
        return
    pattern = layer_pattern(given, SKIPPED, problems, "([1]*3+[0])*8")
    if isinstance(pattern, int):
        yield Fact("model.window.share", 1 - layers // pattern / layers, f"{origin}: every {pattern}th layer sees all")
    elif pattern is not None:
        yield Fact("model.window.share", sum(pattern) / layers, f"{origin} {written(given, SKIPPED)}")


PATTERN, SPEC = "hybrid_layer_pattern", "spec"
PATTERN_FLAG = "--hybrid-layer-pattern"
OLD_PATTERNS = OLD_PATTERN, OLD_PREDICTING = "hybrid_override_pattern", "mtp_hybrid_override_pattern"
"""Older names of the pattern, and of its parts for multi-token prediction; Megatron joins them."""
STOCK_SPECS = ("hybrid_stack_spec", "mamba_stack_spec")


def as_gpt(given: Given, problems: list[Problem]) -> Given:
    given = _with_one_pattern(given)
    if not (pattern := str(given[PATTERN] or "")):
        return given
    kept = {name: value for name, value in given.values.items() if name != "is_hybrid_model" and not _is_stock(name, value)}
    given = replace(given, values=kept)
    segments, predicting = _segments(given), stack.parts_of(pattern)[1]
    finding = ""
    if stack.unknown_in(pattern) or not segments or not all(segments):
        finding = f"{stack.unknown_in(pattern) or 'layers'} in {pattern}"
        stages = f"some for each of {given['pipeline_model_parallel_size']} stages, or as many"
        needed = stack.NEEDED if stack.unknown_in(pattern) else stages
    elif len(set(predicting)) > 1 or not all(map(_is_layer, predicting)):
        finding = f"/{'/'.join(predicting)}"
        needed = "the same *E or *- in each part for multi-token prediction: others are not modelled"
    if finding:
        problems.append(Problem(PATTERN_FLAG, finding, needed))
        return given if "num_layers" in kept else given.with_values({"num_layers": None}, PATTERN_FLAG)
    if given["qk_layernorm"]:
        problems.append(Problem(given.origin("qk_layernorm"), "given", "none: a hybrid stack's attention has no such norms"))
    pattern_layers, counts = stack_of(given), [len(stack.layers_of(segment)) for segment in segments]
    having = [int(layer.second == stack.EXPERTS) for layer in pattern_layers]
    values = {"num_layers": sum(counts), "transformer_impl": "transformer_engine"}
    if len(counts) > 1:
        values[LAYOUT] = f"E{stack.BAR.join('t' * count for count in counts)}{'m' * len(predicting)}L"
    if predicting:
        values["mtp_num_layers"] = len(predicting)
    if any(having) and given["num_experts"]:
        values["moe_layer_freq"] = f"[{','.join(map(str, having))}]"
    elif any(having) or given["num_experts"]:
        problems.append(Problem(PATTERN_FLAG, pattern, "--num-experts beside it where it has experts (E), and only there"))
    return given.with_values(values, PATTERN_FLAG)


def _with_one_pattern(given: Given) -> Given:
    if given[PATTERN] or not given[OLD_PATTERN]:
        return given
    pattern, predicting, depth = given[OLD_PATTERN], given[OLD_PREDICTING], given["mtp_num_layers"]
    if predicting and depth and stack.SLASH not in pattern:
        pattern += f"{stack.SLASH}{predicting}" * depth
    kept = {name: value for name, value in given.values.items() if name not in OLD_PATTERNS}
    return replace(given, values=kept).with_values({PATTERN: pattern}, given.origin(OLD_PATTERN))


def _is_layer(part: str) -> bool:
    [*layers] = stack.layers_of(part)
    return len(layers) == 1 and layers[0].first == stack.ATTENTION and bool(layers[0].second)


def _is_stock(name: str, value: Value) -> bool:
    words = value.value if isinstance(value.value, list) else str(value.value).split()
    return name == SPEC and str(words[0]).startswith("megatron.core.models.") and words[-1] in STOCK_SPECS


def predicting_of(given: Given) -> tuple[str, ...]:
    return stack.parts_of(str(given[PATTERN] or ""))[1]


def is_hybrid(given: Given) -> bool:
    return given.origin("num_layers") == PATTERN_FLAG


def stack_of(given: Given) -> list[stack.StackLayer]:
    return [layer for segment in _segments(given) for layer in stack.layers_of(segment)]


def _segments(given: Given) -> list[str]:
    pattern = stack.parts_of(str(given[PATTERN] or ""))[0]
    if not pattern or stack.unknown_in(pattern):
        return []
    return stack.segments_of(pattern, int(given["pipeline_model_parallel_size"] or 1))


FREQ, GATE, KNOWN = "linear_attention_freq", "attention_output_gate", "gated_delta_net"
TYPE = f"--linear-attention-type {KNOWN}"
SIZES = {
    "key_heads": "linear_num_key_heads",
    "key_size": "linear_key_head_dim",
    "value_heads": "linear_num_value_heads",
    "value_size": "linear_value_head_dim",
    "convolved": "linear_conv_kernel_dim",
}
STATED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")


def opaque_facts(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    if any(given[name] is None for name in STATED):
        return
    if pattern_layers := stack_of(given):
        having: dict[str, list[int]] = {}
        for number, layer in enumerate(pattern_layers, start=1):
            for name in layer.opaque:
                having.setdefault(name, []).append(number)
        figures = {"mamba": _mamba, KNOWN: _delta_net}
        if having:
            every = having.items()
            kinds = [_in_layers(figures[kind](given) if kind in figures else {"kind": kind}, layers) for kind, layers in every]
            yield Fact("model.opaque", kinds, PATTERN_FLAG)
        return
    linear, origins = _linear(given, problems), []
    kinds = []
    if linear:
        kinds.append(_in_layers(_delta_net(given), linear))
        origins += [given.origin(FREQ)]
    attention_layers = [layer for layer in range(1, given["num_layers"] + 1) if layer not in linear]
    if given[GATE] and attention_layers:
        size = given["kv_channels"] or given["hidden_size"] // given["num_attention_heads"]
        groups = given["num_query_groups"] if given["group_query_attention"] else given["num_attention_heads"]
        widths = {"queries": size * given["num_attention_heads"], "keys": size * groups, "seq": given["seq_length"]}
        kinds.append(
            _in_layers(
                gated_attention(given["hidden_size"], 2 if given["bf16"] or given["fp16"] else 4, **widths), attention_layers
            )
        )
        origins += [given.origin(GATE)]
    if kinds:
        yield Fact("model.opaque", kinds, ", ".join(origins))


def _mamba(given: Given) -> dict[str, Any]:
    size = given["mamba_head_dim"]
    heads = 2 * given["hidden_size"] // size if given["mamba_num_heads"] is None else given["mamba_num_heads"]
    sizes = {"heads": heads, "size": size, "groups": given["mamba_num_groups"], "state": given["mamba_state_dim"]}
    return {"kind": "mamba", "mamba": sizes}


def _delta_net(given: Given) -> dict[str, Any]:
    return {"kind": KNOWN, "delta": {name: given[flag] for name, flag in SIZES.items()}}


def _in_layers(figures: dict[str, Any], layers: list[int]) -> dict[str, Any]:
    return {"kind": figures["kind"], "layers": list(as_spans(layers)), **figures}


def _linear(given: Given, problems: list[Problem]) -> list[int]:
    if given[VARIANT] not in (KNOWN, "gdn") and TYPE not in given.unknown:  # since 0.20: gdn
        if given[FREQ] is not None:
            problems.append(Problem(given.origin(FREQ), str(given[FREQ]), f"--experimental-attention-variant {KNOWN} beside it"))
        return []
    if given[FREQ] is None:
        problems.append(Problem(given.origin(VARIANT), KNOWN, "--linear-attention-freq beside it", "Megatron stops here"))
        return []
    pattern = layer_pattern(given, FREQ, problems, "([1]*3+[0]*1)*12")
    numbers = range(1, given["num_layers"] + 1)
    if isinstance(pattern, int):
        return [layer for layer in numbers if layer % pattern]
    return [layer for layer, one in zip(numbers, pattern or (), strict=False) if one]
