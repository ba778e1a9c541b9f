"""Neighbouring layers that are treated alike share one rule.

layer 1: A   layer 2: A   layer 3: B      ─>      layers 1-2: A    layers 3: B
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_lynx.plan.layer_range import LayerRange
from megatron_lynx.plan.rule import Rule


def joined(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The same rules, in layer order, as few as say the same. Window names are relative to a layer, so identical layers agree."""
    result: list[Rule] = []
    for rule in sorted(rules, key=lambda rule: rule.layers.first):
        last = result[-1] if result else None
        if last is not None and last.layers.last + 1 == rule.layers.first and _treatment(last) == _treatment(rule):
            result[-1] = last.model_copy(update={"layers": LayerRange(first=last.layers.first, last=rule.layers.last)})
        else:
            result.append(rule)
    return tuple(result)


def _treatment(rule: Rule) -> object:
    return rule.keep, rule.replay, rule.windows, rule.gather
