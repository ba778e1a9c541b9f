"""Which layers a flag means, as Megatron lets it be said: a number, every so manieth one; or a list of 0 and 1, one for each.

--moe-layer-freq 2                         ──> 2
--moe-layer-freq '([0]+[1]*2)'             ──> [0, 1, 1]
"""

from __future__ import annotations

import re
from itertools import accumulate

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.given import Given

MOST_LAYERS, MOST_CHARACTERS, DEEPEST = 1_000, 10_000, 50
"""Limits of a pattern, so that a mistyped number cannot fill the memory."""

TOKENS = re.compile(r"\d+|[\[\]()+*,]")


def layer_pattern(given: Given, flag: str, problems: list[Problem], example: str) -> int | list[int] | None:
    """The number, or the list, of as many layers as the launch has. None for anything else, which is added to `problems`.

    `example`: a list such as the flag has.
    """
    said, origin, layers = written(given, flag), given.origin(flag), given["num_layers"]
    if said.isdecimal() and len(said) < 10 and int(said) > 0:
        return int(said)
    try:
        pattern = pattern_of(said)
    except ValueError as error:
        problems.append(Problem(origin, str(error), f"a number, or lists of 0 and 1 such as {example}"))
        return None
    if layers is not None and len(pattern) != layers:
        problems.append(Problem(origin, f"a pattern of {len(pattern)} layers", f"one of --num-layers ({layers})"))
        return None
    return pattern


def written(given: Given, flag: str) -> str:
    """What is said of it, without blanks."""
    return str(given[flag]).replace(" ", "")


def pattern_of(text: str) -> list[int]:
    """Lists of 0 and 1, added and repeated, as Megatron has them: `([0]+[1]*2)` is 0, 1, 1. Raises ValueError for others."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a text of {len(text)} characters (at most {MOST_CHARACTERS})")
    words = TOKENS.findall(text)
    if "".join(words) != text or not words:
        raise ValueError(f"{text!r} is no list")
    if (deep := max(accumulate({"(": 1, ")": -1}.get(word, 0) for word in words))) > DEEPEST:
        raise ValueError(f"{deep} brackets in each other (at most {DEEPEST})")
    value = _sum(words)
    if words or not set(value) <= {0, 1}:
        raise ValueError(f"{text!r} is no list of 0 and 1")
    return value


def _sum(words: list[str]) -> list[int]:
    value = _product(words)
    while words[:1] == ["+"]:
        words.pop(0)
        more = _product(words)
        _few_enough(len(value) + len(more))
        value = value + more
    return value


def _product(words: list[str]) -> list[int]:
    value = _list(words)
    while words[:1] == ["*"]:
        words.pop(0)
        times = int(_next(words, "a number"))
        _few_enough(len(value) * times)
        value = value * min(times, MOST_LAYERS)  # of an empty list too
    return value


def _few_enough(layers: int) -> None:
    if layers > MOST_LAYERS:
        raise ValueError(f"a pattern of more than {MOST_LAYERS} layers")


def _list(words: list[str]) -> list[int]:
    opened = _next(words, "a list")
    if opened == "(":
        value = _sum(words)
    elif opened == "[":
        value = []
        while words[:1] != ["]"] and words:
            value.append(int(_next(words, "0 or 1")))
            if words[:1] == [","]:
                words.pop(0)
    else:
        raise ValueError(f"{opened!r} where a list was expected")
    if _next(words, "the end of a list") != {"(": ")", "[": "]"}[opened]:
        raise ValueError("a list without an end")
    return value


def _next(words: list[str], expected: str) -> str:
    if not words:
        raise ValueError(f"nothing where {expected} was expected")
    return words.pop(0)
