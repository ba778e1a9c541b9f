"""How a launch cuts sequences among context-parallel ranks, and how these exchange keys and values.

--context-parallel-size 4                                                           a ring: Megatron's default
--context-parallel-size 4 --cp-comm-type a2a                                        the same in every layer
--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from megatron_lynx.config.parallel import ContextExchange
from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.fact import Fact
from megatron_lynx.launch_arguments.given import Given

SIZE, EXCHANGE, LEVELS = "context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes"


def context_facts(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    """Nothing is said about exchanges where a sequence is not cut."""
    yield Fact("parallel.context", given[SIZE], given.origin(SIZE))
    if given[SIZE] in (None, 1):
        return
    said = given[EXCHANGE]
    kinds = list(dict.fromkeys([said] if isinstance(said, str) else said or ["p2p"]))
    known = get_args(ContextExchange)
    if unknown := [kind for kind in kinds if kind not in known]:
        problems.append(Problem(given.origin(EXCHANGE), str(unknown[0]), f"one of {', '.join(known)}"))
    elif len(kinds) > 1:
        problems.append(Problem(given.origin(EXCHANGE), " ".join(kinds), "the same in every layer: others are not modelled"))
    else:
        yield Fact("parallel.context_exchange", kinds[0], given.origin(EXCHANGE))
        if kinds[0] == "a2a+p2p":
            yield from _levels(given, problems)


def _levels(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    sizes, context = given[LEVELS], given[SIZE]
    if not sizes or len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] != context:
        found = " ".join(map(str, sizes)) if sizes else "nothing"
        problems.append(Problem(given.origin(LEVELS), found, f"two sizes whose product is --context-parallel-size ({context})"))
        return
    yield Fact("parallel.context_levels", list(sizes), given.origin(LEVELS))
