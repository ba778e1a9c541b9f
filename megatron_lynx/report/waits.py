"""What ran in which wait, what no wait hid, and how much of the waits nothing used.

wait      ├──────────── bwd.mlp.0 ────────────┤       used: what of replays (and of other tasks) lies inside it
replays     ├─ attention(3) ─┤                        unused: the rest
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lynx.report.island import Cell, Column, Table, Unit
from megatron_lynx.report.kinds import is_wait, kind_of
from megatron_lynx.simulator.timeline import Span, Timeline

TASKS = ("hidden", "weight_gradient")
"""Kinds of what runs in waits."""

EXPOSED = {"on_demand": "replay", "flushed": "weight gradient", "wait": "copy from the host"}
"""Kinds of bars that no wait hides, and what they are."""


@dataclass
class WaitUse:
    """All waits of one name of one row."""

    count: int = 0
    seconds: float = 0.0
    used_s: float = 0.0
    tasks: set[str] = field(default_factory=set)

    @property
    def unused_s(self) -> float:
        return max(0.0, self.seconds - self.used_s)

    @property
    def cells(self) -> list[Cell]:
        """As the columns behind the name of a wait have it."""
        share = self.used_s / self.seconds if self.seconds else None
        times = (self.seconds, self.seconds / self.count, self.used_s, self.unused_s)
        return [self.count, *times, share, ", ".join(sorted(self.tasks))]


def waits_of(spans: Sequence[Span]) -> dict[str, WaitUse]:
    """How the waits of one row were used, by their name without the layer."""
    found: dict[str, WaitUse] = defaultdict(WaitUse)
    tasks = sorted((span for span in spans if kind_of(span) in TASKS), key=lambda span: span.start_s)
    ends = sorted(span.end_s for span in tasks)
    for wait in spans:
        if not is_wait(wait):
            continue
        use = found[wait_name(wait)]
        use.count += 1
        use.seconds += wait.seconds
        for task in _within(tasks, ends, wait):
            use.used_s += min(task.end_s, wait.end_s) - max(task.start_s, wait.start_s)
            use.tasks.add(f"{task.kind.replace('_', ' ')} {task.half or ''}".strip())
    return dict(found)


def _within(tasks: Sequence[Span], ends: Sequence[float], wait: Span) -> Iterator[Span]:
    """The tasks that overlap a wait. Tasks follow one another, so starts and ends have one order."""
    for task in tasks[bisect_left(ends, wait.start_s) :]:
        if task.start_s >= wait.end_s:
            return
        if task.end_s > wait.start_s:
            yield task


def wait_name(span: Span) -> str:
    """`bwd.mlp.0` for `bwd.mlp.0@3`."""
    return (span.window or span.name).partition("@")[0]


USE_COLUMNS: tuple[tuple[str, Unit], ...] = (
    ("where", "text"),
    ("wait", "text"),
    ("number", "count"),
    ("seconds", "s"),
    ("each", "s"),
    ("used", "s"),
    ("unused", "s"),
    ("share used", "share"),
    ("what ran in it", "text"),
)


def use_table(name: str, timeline: Timeline, labels: Mapping[int, str]) -> Table:
    """The table of waits of a view. `labels`: of the rows that are shown."""
    rows: list[list[Cell]] = [
        [label, wait, *use.cells] for row, label in labels.items() for wait, use in sorted(waits_of(timeline.ranks[row]).items())
    ]
    note = "Seconds of one step for which a stage would wait for communication, and what of them replays used."
    columns = [Column(label=label, unit=unit) for label, unit in USE_COLUMNS]
    return Table(id=f"waits-{name}", title=f"Waits, {name}", note=note, columns=columns, rows=rows)


EXPOSED_COLUMNS: tuple[tuple[str, Unit], ...] = (
    ("where", "text"),
    ("what", "text"),
    ("half", "text"),
    ("number", "count"),
    ("seconds", "s"),
    ("each", "s"),
)


def exposed_table(name: str, timeline: Timeline, labels: Mapping[int, str]) -> Table:
    """What made the step longer because no wait hid it."""
    rows: list[list[Cell]] = []
    for row, label in labels.items():
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for span in timeline.ranks[row]:
            if (kind := kind_of(span)) in EXPOSED:
                found[EXPOSED[kind], span.half or ""].append(span.seconds)
        rows += [[label, *what, len(each), sum(each), sum(each) / len(each)] for what, each in sorted(found.items())]
    note = "Replays on demand and what went on after its wait was over, other tasks outside of waits, and waits for copies."
    columns = [Column(label=label, unit=unit) for label, unit in EXPOSED_COLUMNS]
    return Table(id=f"exposed-{name}", title=f"What no wait hid, {name}", note=note, columns=columns, rows=rows)
