"""What queries see of the keys before them, and what their softmax has beside these.

--window-size 127,0                            128 keys, the query's own among them; nothing behind it
--window-attn-skip-freq 4                      every fourth layer sees all
--window-attn-skip-freq ([1]*3+[0])*8          0: sees all. Without: all layers have the window
--softmax-type learnable                       one logit more for each head, which is learned; off-by-one: it is 0
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.given import Fact, Given
from megatron_lynx.launch_arguments.layer_pattern import layer_pattern, written

SIZE, SKIPPED, SOFTMAX = "window_size", "window_attn_skip_freq", "softmax_type"


def window_facts(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    """Nothing where attention sees all keys and has no sinks. What is no window is added to `problems`."""
    if given[SOFTMAX] == "learnable":
        yield Fact("model.sinks", True, given.origin(SOFTMAX))
    if given[SIZE] is None:
        return
    said = str(given[SIZE]).strip("()").replace(" ", "").split(",")
    if len(said) != 2 or not said[0].isdecimal() or said[1] != "0":
        needed = "two numbers such as 127,0: keys before a query, and none behind it"
        problems.append(Problem(given.origin(SIZE), str(given[SIZE]), needed))
        return
    yield Fact("model.window.keys", int(said[0]) + 1, f"{given.origin(SIZE)}, and the query's own")
    yield from _share(given, problems)


def _share(given: Given, problems: list[Problem]) -> Iterator[Fact]:
    origin, layers = given.origin(SKIPPED), given["num_layers"]
    if given[SKIPPED] is None or not layers:
        return
    found = layer_pattern(given, SKIPPED, problems, "([1]*3+[0])*8")
    if isinstance(found, int):
        yield Fact("model.window.share", 1 - layers // found / layers, f"{origin}: every {found}th layer sees all")
    elif found is not None:
        yield Fact("model.window.share", sum(found) / layers, f"{origin} {written(given, SKIPPED)}")
