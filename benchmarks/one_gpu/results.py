"""The results of one subject: a file, written whole after every setting, that both the ranks and the page read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lynx.whole_file import write_whole

NONE = "stock none"
AGAIN = "again: "
"""A setting's name has this in front when it is measured a second time."""


@dataclass
class Results:
    """Rows are what `measured.Row` has, as JSON; predictions are by setting."""

    subject: str
    shows: str
    facts: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    """Settings that were not measured, and why."""
    bits: dict[str, list[int]] = field(default_factory=dict)
    """Fingerprints of stock none's losses and gradients. Weights are drawn from names, so that other processes have the same."""
    under_way: str | None = None
    """The setting that is being measured: whoever finds it in a file whose process is gone knows which one ended it."""

    def write(self, folder: Path) -> None:
        write_whole(folder / f"one-gpu-{self.subject}.json", json.dumps(vars(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path, subject: str) -> Results:
        return cls(**json.loads((folder / f"one-gpu-{subject}.json").read_text()))

    @property
    def none(self) -> Mapping[str, Any] | None:
        """The first row of stock none that has seconds, if there is one."""
        named = (row for row in self.rows if row["setting"].removeprefix(AGAIN) == NONE)
        return next((row for row in named if row["passes_s"] is not None), None)
