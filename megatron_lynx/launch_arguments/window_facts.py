"""What queries see of the keys before them, and what their softmax has beside these.

--window-size 127,0                            128 keys, the query's own among them; nothing behind it
--window-attn-skip-freq 4                      every fourth layer sees all
--window-attn-skip-freq ([1]*3+[0])*8          0: sees all. Without: all layers have the window
--softmax-type learnable                       one logit more for each head, which is learned; off-by-one: it is 0
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.expert_facts import pattern_of
from megatron_lynx.launch_arguments.given import Fact, Given

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
    said, origin, layers = given[SKIPPED], given.origin(SKIPPED), given["num_layers"]
    if said is None or not layers:
        return
    text = str(said).replace(" ", "")
    if text.isdecimal() and len(text) < 10 and int(text) > 0:
        yield Fact("model.window.share", 1 - layers // int(text) / layers, f"{origin}: every {text}th layer sees all")
        return
    try:
        pattern = pattern_of(text)
    except ValueError as error:
        problems.append(Problem(origin, str(error), "a number, or lists of 0 and 1 such as ([1]*3+[0])*8"))
        return
    if len(pattern) != layers:
        problems.append(Problem(origin, f"a pattern of {len(pattern)} layers", f"one of --num-layers ({layers})"))
        return
    yield Fact("model.window.share", sum(pattern) / layers, f"{origin} {text}")
