"""Maps Megatron-LM's flags to Megatron-Bridge's configuration (`ConfigContainer`, called `cfg`).

seq_length            cfg.model.seq_length          --seq-length
micro_batch_size      cfg.train.micro_batch_size    --micro-batch-size
the first part that has a field of that name; other names are in `RENAMED`
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from megatron_lynx.errors import Problem
from megatron_lynx.limits import LIMITS, limits

PARTS = ("model", "train", "validation", "optimizer", "scheduler", "ddp", "dist", "dataset", "checkpoint", "logger", "rng")
"""In the order of search."""

RENAMED: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Megatron-LM's names whose setting has another name or part."""

_FLAG = re.compile(r"(?<![\w-])--(no-)?([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(-\*)?")
_CONFIG = re.compile(r"(?<![\w.])config\.(\w+)")


def places_of(name: str) -> Iterator[tuple[str, str]]:
    """(part, field) of possible places of a setting, given Megatron-LM's name, best first."""
    if name in RENAMED:
        part, _, field = RENAMED[name].partition(".")
        yield part, field
        return
    yield from ((part, name) for part in PARTS)


class BridgeSettings:
    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def has(self, part: str, field: str) -> bool:
        """Whether the container has a setting, or a part if no field is given."""
        return hasattr(getattr(self.cfg, part, None), field) if field else hasattr(self.cfg, part)

    def place(self, name: str) -> tuple[str, str] | None:
        return next((place for place in places_of(name) if self.has(*place)), None)

    def refused(self) -> Iterator[Problem]:
        for limit, under in limits(["plan"], {limit.of for limit in LIMITS if limit.of.startswith("cfg")}):
            path = limit.option.split(".")[1:]
            setting = reduce(lambda part, field: getattr(part, field, None), path, self.cfg)
            kind = str(getattr(setting, "_target_", type(setting).__name__)).rpartition(".")[2]
            if not (limit.allows(setting) or kind in limit.allowed):
                yield limit.problem(limit.option, setting if setting is True else kind, under)

    def say(self, text: str) -> str:
        """A text with settings in place of Megatron-LM's flags. Our own flags and unknown ones stay."""
        text = _CONFIG.sub(r"cfg.model.\1", _FLAG.sub(self._setting, text))
        return text.replace("drop cfg.", "unset cfg.").replace("launch with cfg.", "train with cfg.")

    def _setting(self, match: re.Match[str]) -> str:
        negative, words, all_of_them = match.groups()
        name = words.replace("-", "_")
        if all_of_them and not name.startswith("lynx"):
            return f"cfg.model.{name}_*"
        if name.startswith("lynx") or (place := self.place(name)) is None:
            return match[0]
        return f"cfg.{'.'.join(filter(None, place))}{'=False' if negative else ''}"

    def setting(self, flag: str) -> str:
        """A flag with its value, in shell syntax, as an assignment: `cfg.train.micro_batch_size=2`."""
        name, *values = shlex.split(flag)
        said = self.say(name)
        if said == name or "=" in said:
            return flag if said == name else said
        return f"{said}={shlex.quote(' '.join(values)) if values else True}"

    def in_words(self, problem: Problem) -> Problem:
        return Problem(*map(self.say, (problem.where, problem.finding, problem.needed, problem.todo)))
