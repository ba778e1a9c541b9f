"""One pass of a stage as it is written down: a clock, and what happens at which time.

compute ──> (window: replays, weight gradients, then the rest of the wait) ──> compute ──> ...     the clock moves
               └ taken, given back: bytes                                                          spans and memory steps stay
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, WindowAddress
from megatron_lynx.cost.weight_gradient import WeightGradient
from megatron_lynx.simulator.passes import Entry, Queue, TimedPass
from megatron_lynx.simulator.treated import Halves, Treated
from megatron_lynx.timeline import FLUSHED, Span
from megatron_lynx.timetable import Linear, Task, Wait


class Walk:
    """Begins `start_s` after the pass does. Under a collective what fills it takes `interference` times longer. `halves`: of the
    stage. `queue`: the deferred weight gradients."""

    def __init__(self, interference: float, halves: Halves, queue: Queue, start_s: float = 0.0) -> None:
        self.clock_s = start_s
        self.halves = halves
        self._queue = queue
        self._unheld: dict[Linear, int] = {}
        """Bytes of entries that their own half holds as well, or that are counted as in hand (`cost.in_hand`)."""
        self._interference = interference
        self._spans: list[Span] = []
        self._memory: list[tuple[float, int]] = []
        self._regenerated: list[tuple[float, int]] = []
        self._under_way_s = 0.0
        """Of what was begun ahead."""
        self._holds_up = False
        """Whether that is of the same ranks as collectives, which it comes before."""
        self._hidden_s = self._exposed_s = self._filled_s = self._unfilled_s = self._copy_wait_s = 0.0

    def compute(self, seconds: float) -> None:
        """Beside what is under way it takes longer, as in a window."""
        beside_s = min(self._under_way_s, seconds * self._interference)
        self._under_way_s -= beside_s
        slower_s = beside_s - beside_s / self._interference
        self._exposed_s += slower_s
        self.clock_s += seconds + slower_s

    def hold(self, change_bytes: int, *, regenerated_bytes: int = 0) -> None:
        """Takes bytes or, below 0, gives them back. `regenerated_bytes`: how many of them are what replays made."""
        if change_bytes:
            self._memory.append((self.clock_s, change_bytes))
        if regenerated_bytes:
            self._regenerated.append((self.clock_s, regenerated_bytes))

    def regenerate(self, change_bytes: int) -> None:
        self.hold(change_bytes, regenerated_bytes=change_bytes)

    def replay(self, half: Treated, seconds: float, window: str) -> None:
        """Runs so much of a half's replay; `window` is where it is drawn: what no window hides counts as on demand."""
        if seconds:
            start_s, self.clock_s = self.clock_s, self.clock_s + seconds
            self._span("replay", start_s, half, window)

    def on_demand(self, task: Task) -> None:  # [1]
        half = self.halves[task.half]
        part = half.part(task)
        if half.resumes(task):
            self._await()
        if part.waits_s:
            start_s, self.clock_s = self.clock_s, self.clock_s + part.waits_s
            self._span("gather", start_s, half)
        self.regenerate(part.taken_bytes)
        self.replay(half, part.seconds, ON_DEMAND)
        self._exposed_s += part.seconds + part.waits_s
        if task.do == "begin":
            self._under_way_s, self._holds_up = part.under_way_s, not half.section.exchanges

    def _await(self) -> None:
        """Waits for the rest of what was begun ahead."""
        self.clock_s += self._under_way_s
        self._exposed_s += self._under_way_s
        self._under_way_s = 0.0

    def window(self, wait: Wait, seconds: float, during: Sequence[Task] = (), after: Sequence[Task] = ()) -> None:  # [2]
        """A wait of so many seconds, and the tasks during it and after it."""
        if self._holds_up or any(self.halves[task.half].resumes(task) for task in during):
            self._await()
        start_s, room_s, name = self.clock_s, seconds / self._interference, str(wait.window)
        waits_s = []
        for task in recomputed(during):
            half = self.halves[task.half]
            part = half.part(task)
            self.regenerate(part.taken_bytes)
            fits_s = min(part.seconds, room_s)
            room_s -= fits_s
            self.replay(half, fits_s * self._interference, name)
            self.replay(half, part.seconds - fits_s, ON_DEMAND)
            self._hidden_s += fits_s
            self._exposed_s += part.seconds - fits_s + part.waits_s
            waits_s.append(part.waits_s)
        for entry in self._queue.due(weight_gradients(during)):
            fits_s = min(entry.cost.seconds, room_s)
            room_s -= fits_s
            self._weight_gradient(entry, fits_s, name, self._interference)
        self.clock_s = max(self.clock_s, start_s + seconds) + sum(waits_s)
        if self.clock_s > start_s and isinstance(wait.window, WindowAddress):
            layer, half_name = wait.window.frame
            self._spans.append(Span("window", start_s, self.clock_s, layer, half_name, None, name, name))
        self.regenerate(sum(self.halves[task.half].gathered_bytes for task in after if task.do == "gather"))
        for task in after:
            if task.do != "gather":
                self.on_demand(task)

    def defer(self, of: Linear, cost: WeightGradient) -> float:
        """Defers a weight gradient; the seconds of those that have to run at once for that."""  # [5]
        start_s, entry = self.clock_s, Entry(of, self._queue.chunk, cost)
        self._unheld[of] = cost.bytes
        for oldest in self._queue.put(entry):
            self._weight_gradient(oldest, 0.0, FLUSHED)
        return self.clock_s - start_s

    def catch_up(self, of: Linear) -> float:
        """Runs whatever of a linear is still deferred; for how many seconds."""
        start_s = self.clock_s
        for entry in self._queue.take(of):
            self._weight_gradient(entry, 0.0, FLUSHED)
        return self.clock_s - start_s

    def holds(self, of: Linear, size_bytes: int) -> None:
        """So much of what the newest entry of a linear holds is from now on held for it alone."""
        if of in self._unheld:
            size_bytes = min(size_bytes, self._unheld[of])
            self._unheld[of] -= size_bytes
            self.hold(size_bytes)

    def received(self, during: Sequence[Task]) -> None:
        """Runs the deferred weight gradients that the plan has put into the receive of a gradient."""
        for entry in self._queue.due(weight_gradients(during)):
            self._weight_gradient(entry, entry.cost.seconds, RECV_BACKWARD)

    def flush(self) -> None:
        """Runs whatever is still deferred."""
        for entry in self._queue.flush():
            self._weight_gradient(entry, 0.0, FLUSHED)

    def copy(self, kind: Literal["offload", "reload"], half: Treated, start_s: float, end_s: float) -> None:
        """Runs beside the pass."""
        self._spans.append(Span(kind, start_s, end_s, half.layer, half.half, name=f"{kind} {half.half}({half.layer})"))

    def wait(self, until_s: float) -> None:
        """Goes on when a copy is over."""
        if until_s > self.clock_s:
            self._spans.append(Span("copy_wait", self.clock_s, until_s, name="copy_wait"))
            self._copy_wait_s += until_s - self.clock_s
            self.clock_s = until_s

    def half(self, kind: Literal["forward", "backward"], start_s: float, half: Treated) -> None:
        self._span(kind, start_s, half)

    def over(self) -> TimedPass:
        return TimedPass(
            self.clock_s,
            self._hidden_s,
            self._exposed_s,
            tuple(self._memory),
            tuple(self._spans),
            regenerated=tuple(self._regenerated),
            filled_s=self._filled_s,
            unfilled_s=self._unfilled_s,
            copy_wait_s=self._copy_wait_s,
        )

    def _weight_gradient(self, entry: Entry, fits_s: float, window: str, interference: float = 1.0) -> None:
        """Runs one, of which so many seconds fit into the wait."""
        name = f"weight gradient {entry.of.name}({entry.of.layer})"
        parts = ((fits_s, fits_s * interference, window), (rest_s := entry.cost.seconds - fits_s, rest_s, FLUSHED))
        for seconds, takes_s, where in parts:
            if seconds:
                start_s, self.clock_s = self.clock_s, self.clock_s + takes_s
                self._spans.append(Span("weight_gradient", start_s, self.clock_s, *entry.of[:2], None, where, name))
        self._filled_s += fits_s
        self._unfilled_s += rest_s
        newest = not any(each.of == entry.of for each in self._queue.pending)
        self.hold((self._unheld.pop(entry.of, 0) if newest else 0) - entry.cost.bytes)

    def _span(
        self, kind: Literal["forward", "backward", "replay", "gather"], start_s: float, half: Treated, window: str | None = None
    ) -> None:
        name = f"{kind} {half.half}({half.layer})"
        self._spans.append(Span(kind, start_s, self.clock_s, half.layer, half.half, None, window, name))


def recomputed(tasks: Sequence[Task]) -> list[Task]:
    """Those that are recomputations."""
    return [task for task in tasks if task.do == "recompute"]


def weight_gradients(tasks: Sequence[Task]) -> list[Linear]:
    """The linears whose weight gradients are among them."""
    return [task.linear for task in tasks if task.do == "weight_gradient"]
