"""The integer program of the exact solver, for HiGHS (scipy).

    backward order     mlp(n)  attention(n)  mlp(n-1) | attention(n-1) ... mlp(1)  attention(1)
                       chosen one by one              | only the number that choose each option

    x[half, option] in {0, 1}, y[kind of half, option] a count;  every half has one option
    before backward begins, beside the loss; when the backward of each half on the left begins [A] and ends [B] (`cost.memory`):
        (in flight - 1) x resident  +  held by later halves  +  its own need  +  what two halves hold ahead  <=  budget

It minimises either the exposed seconds within a budget, or the budget. The needs of the halves on the right are omitted, so no
answer is better than the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.cost.memory import held_by_one
from megatron_lynx.silence import nothing_printed
from megatron_lynx.solver.answer import Solved, layers_of
from megatron_lynx.solver.problem import Choices, Columns, Floats, Option, StageProblem

Goal = Literal["time", "memory"]

LARGEST = 1e6
"""The largest number of bytes, in units for HiGHS: a byte is then larger than its tolerance."""

PRECISION = 1e3
"""The largest number of seconds of an option, in units for HiGHS."""

HOPELESS = 1e6
"""Options slower than this many times the fastest count as equally slow."""

MOST_EXACT = 2**53
"""Up to here float64 counts bytes exactly."""

IMPOSSIBLE = 2
"""`status` of scipy's `milp`."""


@dataclass(frozen=True)
class Found:
    """What HiGHS finds. Costs are seconds or bytes, depending on the goal."""

    possible: bool
    bound: float
    """Lower bound of the problem's costs."""
    answer: Solved | None
    """Halves that are not chosen one by one are in the order with the least peak, which may still exceed the budget."""
    nodes: int
    """Nodes that HiGHS searched."""


@dataclass(frozen=True)
class _Layer:
    """One checkpointed layer, or a number of them."""

    groups: tuple[int, int]
    """Groups of its MLP half and its attention half."""
    mlp: Option
    attention: Option
    multiplicity: float

    @property
    def options(self) -> tuple[Option, Option]:
        """In backward order."""
        return self.mlp, self.attention

    @property
    def _counted(self) -> bool:
        return self.groups[0] > self.groups[1]

    def below(self, count: int) -> tuple[Option, ...]:
        """Return the halves of counted layers, which come last in a backward because all of a layer is held at once."""
        return self.options * count if self._counted else ()

    def on_top(self, count: int) -> list[tuple[int, Option]]:
        """Return the halves chosen one by one, by group."""
        return [] if self._counted else [*zip(self.groups, self.options, strict=True)] * count


@dataclass(frozen=True)
class Programme:
    """The program in which `explicit` halves are chosen one by one, starting with the first that backward reaches."""

    problem: StageProblem
    explicit: int

    def solved(self, goal: Goal, nodes: int, enough: float = 0.0) -> Found:
        """Return HiGHS's result within `nodes`. `enough`: fraction of the costs that need not be gained."""
        from scipy.optimize import (
            Bounds,
            LinearConstraint,
            milp,
        )  # imported late: it takes half a second, which searches do not need

        costs, unit = (self._seconds, self._second_unit) if goal == "time" else (np.zeros(self._width), self._byte_unit)
        rows, one = self._needs / self._byte_unit, self._one_option_each
        beside = np.append(self.problem.loss_bytes, np.zeros(len(rows) - 1))
        room = -beside if goal == "memory" else self._between_grains((self.problem.budget_bytes or 0) - beside)
        least = goal == "memory"  # one more column: the budget itself
        with nothing_printed():
            result = milp(
                np.append(costs / unit, float(least)),
                constraints=[
                    LinearConstraint(
                        np.column_stack([rows, np.full(len(rows), -float(least))]),
                        -np.inf,
                        np.minimum(room / self._byte_unit, 2 * LARGEST),
                    ),
                    LinearConstraint(np.column_stack([one, np.zeros(len(one))]), self._sizes, self._sizes),
                ],
                integrality=np.append(np.ones(self._width), 0),
                bounds=Bounds(0, np.append(self._multiplicities, np.inf)),
                options={"node_limit": max(nodes, 0), "mip_rel_gap": enough},
            )
        bound = -np.inf if result.mip_dual_bound is None else result.mip_dual_bound
        answer = None if result.x is None else self._arranged(np.round(result.x[:-1]).astype(int))
        return Found(result.status != IMPOSSIBLE, bound * unit, answer, result.mip_node_count or 0)

    def _arranged(self, chosen: np.ndarray[tuple[int], np.dtype[np.int_]]) -> Solved:
        """Return the answer. Counted halves are ordered by their need beyond their held bytes."""
        *parts, joint = np.split(chosen, np.cumsum(self._widths))
        options = [
            [option for option, count in zip(group, part, strict=True) for _ in range(count)]
            for group, part in zip(self._groups, parts, strict=True)
        ]
        lowest = [option for layer, count in zip(self._layers, joint.tolist(), strict=True) for option in layer.below(count)]
        for layer, count in zip(self._layers, joint.tolist(), strict=True):
            for group, option in layer.on_top(count):
                options[group].append(option)
        counted = {half: iter(sorted(group, key=_order)) for half, group in zip(HALVES, options[self.explicit :], strict=True)}
        backward = [option for (option,) in options[: self.explicit]]
        above = self._backward[self.explicit : len(self._backward) - len(lowest)]
        backward += [next(counted[half]) for half in above]
        if self.explicit == 1 and not backward[1].joined:
            backward[1] = self.problem.at_top(backward[1])
        return Solved(layers_of([*backward, *lowest][::-1]), self.problem.in_flight, loss_bytes=self.problem.loss_bytes)

    @cached_property
    def _backward(self) -> list[Half]:
        """Every half, in backward order."""
        return [*reversed(HALVES)] * self.problem.layers

    @cached_property
    def _groups(self) -> list[Choices]:
        """Options of each half on the left, then of all attention and all MLP halves on the right."""
        counted = dict(zip(HALVES, (self.problem.attention.unbeaten.apart, self.problem.mlp.unbeaten.apart), strict=True))
        below = [counted[half] for half in self._backward[1 : self.explicit]]
        if below and self.problem.last_attention is not None:
            below[0] = self.problem.last_attention.unbeaten.apart
        return [self.problem.last_mlp.unbeaten.apart, *below, *counted.values()]

    @cached_property
    def _layers(self) -> list[_Layer]:
        """Layers that may be checkpointed: those whose halves are chosen one by one, then counted ones."""
        attention, mlp = len(self._groups) - 2, len(self._groups) - 1  # of counted halves
        layers = []
        for at in range(0, self.explicit, 2):
            last = (self.problem.last_mlp, self.problem.last_attention or self.problem.attention)
            halves = last if at == 0 else (self.problem.mlp, self.problem.attention)
            groups = at, at + 1 if at + 1 < self.explicit else attention
            pairs = zip(halves[0].joined, halves[1].joined, strict=False)
            layers += [_Layer(groups, *options, 1.0) for options in pairs]
        lower = min(self._sizes[attention], self._sizes[mlp])
        pairs = zip(self.problem.mlp.joined, self.problem.attention.joined, strict=False)
        layers += [_Layer((mlp, attention), *options, float(lower)) for options in pairs if lower]
        return layers

    @cached_property
    def _multiplicities(self) -> Floats:
        """How often each may be chosen."""
        return np.array([*np.repeat(self._sizes, self._widths), *(layer.multiplicity for layer in self._layers)])

    @cached_property
    def _sizes(self) -> Floats:
        """Number of halves in each group."""
        right = self._backward[self.explicit :]
        return np.array([*[1] * self.explicit, *(right.count(half) for half in HALVES)], dtype=float)

    @cached_property
    def _widths(self) -> list[int]:
        return [len(group) for group in self._groups]

    @property
    def _width(self) -> int:
        return sum(self._widths) + len(self._layers)

    @cached_property
    def _columns(self) -> Columns:
        """All groups, side by side."""
        return Columns(*(np.concatenate(column) for column in zip(*(group.columns for group in self._groups), strict=True)))

    @cached_property
    def _seconds(self) -> Floats:
        joint = [Choices(layer.options).columns.longer_s.sum() for layer in self._layers]
        seconds: Floats = np.append(self._columns.longer_s, joint)
        return np.minimum(seconds, HOPELESS * max(seconds[seconds > 0], default=1.0))

    @property
    def _second_unit(self) -> float:
        """HiGHS stops within a millionth of the optimum."""
        return float(self._seconds.max()) / PRECISION or 1.0

    @cached_property
    def _byte_unit(self) -> float:
        every = [self._columns.moments, *(Choices(layer.options).columns.moments for layer in self._layers)]
        most_bytes = np.concatenate(every)[:, 1:].sum(axis=-1).max() * 2 * self.problem.layers * max(1.0, self.problem.in_flight)
        return max(1.0, float(most_bytes) / LARGEST)

    @cached_property
    def _needs(self) -> Floats:
        """A row for the loss, before backward begins, then one for [A] and one for [B] of each half on the left."""
        moments, held = 1 + 2 * self.explicit, list[Floats]()
        for half, group in enumerate(self._groups):
            held.append(self._held(half, group, moments))
        for layer in self._layers:
            mlp, attention = (Choices([option]) for option in layer.options)
            held.append(self._held(layer.groups[0], mlp, moments) + self._held(layer.groups[1], attention, moments))
        return np.concatenate(held, axis=1)

    def _held(self, half: int, group: Choices, moments: int) -> Floats:
        columns = group.columns.moments
        alone = held_by_one(columns, half, self.explicit) if half < self.explicit else columns[:, :1].repeat(moments, axis=1)
        return np.asarray((self.problem.in_flight - 1) * group.columns.resident + alone.T)

    def _between_grains(self, room_bytes: Floats) -> Floats:
        """Return bounds halfway between two multiples of the rows' common divisor. HiGHS accepts a nearly whole number as whole,
        which makes some bytes of a large row."""
        if self._needs.max() > MOST_EXACT or (self._needs % 1).any():
            return room_bytes
        grain = max(1, int(np.gcd.reduce(self._needs.astype(np.int64), axis=None)))
        return np.asarray(np.floor(room_bytes / grain) * grain + grain // 2)

    @cached_property
    def _one_option_each(self) -> Floats:
        joint = [[float(group in layer.groups) for layer in self._layers] for group in range(len(self._groups))]
        return np.column_stack([np.repeat(np.eye(len(self._groups)), self._widths, axis=1), np.array(joint)])


def _order(option: Option) -> tuple[bool, int, int]:
    """Return a key: first a half if its layer's other half is chosen one by one, then by need beyond its held bytes."""
    memory = option.memory
    return not option.joined, memory.whole - memory.held, sum(memory.ahead)
