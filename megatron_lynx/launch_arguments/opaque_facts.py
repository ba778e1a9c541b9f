"""What a launch has in its layers that nobody looks into (`config.opaque`).

--experimental-attention-variant gated_delta_net        ──> model.opaque gated_delta_net
    --linear-attention-freq 4, or '([1]*3+[0]*1)*12'        in which layers: all but every fourth; those with a 1
--linear-attention-type gated_delta_net                 ──> the same, in launches of forks that have it under this name
--hybrid-layer-pattern "M-M*-ME"                        ──> model.opaque mamba, gated_delta_net, and what is not there
--attention-output-gate                                 ──> model.opaque gated_attention, in layers with attention
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_lynx.anatomy.stack import StackLayer
from megatron_lynx.config.experts import as_spans
from megatron_lynx.config.opaque import gated_attention, gated_delta_net, mamba
from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.given import Fact, Given
from megatron_lynx.launch_arguments.hybrid import PATTERN_FLAG, stack_of
from megatron_lynx.launch_arguments.layer_pattern import layer_pattern
from megatron_lynx.launch_arguments.model_facts import FORKS
from megatron_lynx.launch_arguments.optimizer_facts import STATES_ON_HOST

VARIANT, FREQ, GATE, KNOWN = "experimental_attention_variant", "linear_attention_freq", "attention_output_gate", "gated_delta_net"
TYPE = f"--linear-attention-type {KNOWN}"
SIZES = {
    "key_heads": "linear_num_key_heads",
    "key_size": "linear_key_head_dim",
    "value_heads": "linear_num_value_heads",
    "value_size": "linear_value_head_dim",
    "convolved": "linear_conv_kernel_dim",
}
NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")


def opaque_facts(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    """Nothing where attention is the usual one. What no layer can have is added to `problems`."""
    if any(given[name] is None for name in NEEDED):
        return
    if stack := stack_of(given):
        if found := list(_in_stack(given, stack)):
            yield Fact("model.opaque", found, PATTERN_FLAG)
        return
    linear, origins = _linear(given, problems), []
    found = []
    if linear:
        found.append(_in_layers(_delta_net(given), linear))
        origins += [given.origin(FREQ)]
    others = [layer for layer in range(1, given["num_layers"] + 1) if layer not in linear]
    if given[GATE] and others:
        size = given["kv_channels"] or given["hidden_size"] // given["num_attention_heads"]
        groups = given["num_query_groups"] if given["group_query_attention"] else given["num_attention_heads"]
        widths = {"queries": size * given["num_attention_heads"], "keys": size * groups, "seq": given["seq_length"]}
        found.append(_in_layers(gated_attention(given["hidden_size"], element_of(given), **widths), others))
        origins += [given.origin(GATE)]
    if found:
        yield Fact("model.opaque", found, ", ".join(origins))


def without_known(given: Given) -> Given:
    """Without the words of forks that are read here."""
    known = (TYPE, *FORKS, *(words for words in given.unknown if words.split()[0] in STATES_ON_HOST))
    return replace(given, unknown=tuple(words for words in given.unknown if words not in known))


def _in_stack(given: Given, stack: Sequence[StackLayer]) -> Iterator[dict[str, Any]]:
    """What of a hybrid stack nobody looks into, and the halves that are not there."""
    having: dict[str, list[int]] = {}
    for number, layer in enumerate(stack, start=1):
        for name in layer.opaque:
            having.setdefault(name, []).append(number)
    figures = {"mamba": _mamba, KNOWN: _delta_net}
    for kind, layers in having.items():
        yield _in_layers(figures[kind](given) if kind in figures else {"kind": kind}, layers)


def _mamba(given: Given) -> dict[str, Any]:
    heads, size = given["mamba_num_heads"], given["mamba_head_dim"]
    sizes = {"heads": heads, "size": size, "groups": given["mamba_num_groups"], "state": given["mamba_state_dim"]}
    return mamba(given["hidden_size"], element_of(given), **sizes)


def _delta_net(given: Given) -> dict[str, Any]:
    return gated_delta_net(given["hidden_size"], element_of(given), **{name: given[flag] for name, flag in SIZES.items()})


def element_of(given: Given) -> int:
    """Bytes of one number of an activation."""
    return 2 if given["bf16"] or given["fp16"] else 4


def _in_layers(figures: dict[str, Any], layers: list[int]) -> dict[str, Any]:
    return {"kind": figures["kind"], "layers": list(as_spans(layers)), **figures}


def _linear(given: Given, problems: list[Problem]) -> list[int]:
    """The layers with linear attention, as `get_linear_attention_pattern` has them."""
    if given[VARIANT] != KNOWN and TYPE not in given.unknown:
        if given[FREQ] is not None:
            problems.append(Problem(given.origin(FREQ), str(given[FREQ]), f"--experimental-attention-variant {KNOWN} beside it"))
        return []
    if given[FREQ] is None:
        problems.append(Problem(given.origin(VARIANT), KNOWN, "--linear-attention-freq beside it", "Megatron stops here"))
        return []
    found = layer_pattern(given, FREQ, problems, "([1]*3+[0]*1)*12")
    numbers = range(1, given["num_layers"] + 1)
    if isinstance(found, int):
        return [layer for layer in numbers if layer % found]
    return [layer for layer, one in zip(numbers, found or (), strict=False) if one]
