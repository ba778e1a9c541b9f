"""Megatron's settings that are refused, from one table, limits.json.

    {"setting": "qk_clip", "under": ["te", "two versions"], "reason": "..."}     a row: must be off in these circumstances

Optional keys of a row: `allowed` (values besides None; by default anything false), `of` (the configuration with the field;
"arguments": only Megatron's arguments have it; "cfg...": only Bridge's container), `argument` (another name in Megatron's
arguments; empty: no flag sets it) and `flag` (the flag to drop, if it differs from the argument's name).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_lynx.errors import Problem

CIRCUMSTANCES = {
    "any": "",
    "plan": "under a plan",
    "te": "under a plan with Transformer Engine",
    "flex": "under a plan",
    "local": "under a plan with Megatron's own layers",
    "experts": "under a plan with experts",
    "inside experts": "where a plan recomputes, offloads or defers inside experts",
    "latent": "with multi-latent attention",
    "fp8": "in FP8 or FP4",
    "fp4": "in FP4",
    "weight gradients": "where a plan delays weight gradients",
    "head": "with a head in pieces",
    "two versions": "with --lynx-schedule double-buffered",
    "deferred updates": "where updates are deferred",
}
"""In words. `any`: it cannot even be estimated."""
OR_ELSE = {
    "inside experts": "or keep the experts' items in the plan, on the device",
    "weight gradients": "or plan without weight_gradients",
    "head": "or plan without a head in pieces (head)",
    "deferred updates": "or do not defer updates",
}
"""Alternatives to dropping the flag."""


@dataclass(frozen=True)
class Limit:
    setting: str
    under: tuple[str, ...]
    reason: str
    argument: str
    flag: str
    of: str = "model"
    allowed: tuple[Any, ...] = ()

    def allows(self, value: object) -> bool:
        return value is None or (value in self.allowed if self.allowed else not value)

    @property
    def option(self) -> str:
        return self.flag.partition(" ")[0]

    @property
    def needed(self) -> str:
        return " or ".join("none" if value is None else str(value) for value in self.allowed) or "off"

    def problem(self, where: str, setting: object, under: str) -> Problem:
        drop = f"drop {self.flag or 'that setting'}: {self.reason}"
        todo = "; ".join(filter(None, (drop, OR_ELSE.get(under))))
        return Problem(where, str(setting), " ".join(filter(None, (self.needed, CIRCUMSTANCES[under]))), todo)


def _limit(row: dict[str, Any]) -> Limit:
    argument = row.get("argument", row["setting"])
    lists = {name: tuple(row[name]) for name in ("under", "allowed") if name in row}
    usual = {"argument": argument, "flag": f"--{argument.replace('_', '-')}" if argument else ""}
    values: dict[str, Any] = usual | row | lists
    return Limit(**values)


LIMITS = tuple(map(_limit, json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))))

ARGUMENTS = ("arguments", "model", "ddp", "optimizer")
"""The configurations that Megatron's arguments set."""


def limits(circumstances: Collection[str], of: Collection[str]) -> Iterator[tuple[Limit, str]]:
    """The applicable rows of these configurations, each with its first matching circumstance."""
    for limit in LIMITS:
        under = next((circumstance for circumstance in limit.under if circumstance in circumstances), None)
        if under is not None and limit.of in of:
            yield limit, under


def refused(
    settings: object,
    circumstances: Collection[str],
    where: Callable[[Limit], str] = lambda limit: f"config.{limit.setting}",
    of: Collection[str] = ("model",),
    name: Callable[[Limit], str] = attrgetter("setting"),
) -> Iterator[Problem]:
    """Every field of these settings with a value that is not allowed. Missing fields are allowed. `where`, `name`: a field's name
    in messages, and in `settings`."""
    for limit, under in limits(circumstances, of):
        setting = getattr(settings, name(limit), None)
        if not limit.allows(setting):
            yield limit.problem(where(limit), setting, under)
