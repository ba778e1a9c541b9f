"""Windows' names parse back, and plan files accept exactly those that there are."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest

from megatron_lynx.anatomy import DENSE, HALVES, PASSES
from megatron_lynx.anatomy.address import (
    GATHER_PATTERN,
    ON_DEMAND,
    PATTERN,
    RECV_BACKWARD,
    WAIT_PATTERN,
    WindowAddress,
    examples,
    is_forward,
    window_at,
    window_name,
)
from megatron_lynx.plan import plan_schema

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("passing", "half", "ordinal", "above"), list(product(PASSES, HALVES, range(3), (0, 1, 12))))
def test_a_name_parses_back(passing: str, half: str, ordinal: int, above: int) -> None:
    name = window_name(passing, half, ordinal, above)  # type: ignore[arg-type]
    assert window_at(name, layer=5) == WindowAddress(passing, 5 + above, half, ordinal)  # type: ignore[arg-type]
    assert is_forward(name) == (passing == "fwd")
    assert [re.fullmatch(pattern, name) is not None for pattern in (WAIT_PATTERN, PATTERN, GATHER_PATTERN)] == [
        True,
        not is_forward(name),
        not is_forward(name),
    ]


def test_names_that_are_no_collective() -> None:
    assert window_at(ON_DEMAND, 3) == "on_demand"
    assert window_at(RECV_BACKWARD, 3) == "pipe.recv_backward"
    assert all(re.fullmatch(PATTERN, name) for name in (ON_DEMAND, RECV_BACKWARD))
    assert [re.fullmatch(GATHER_PATTERN, name) is not None for name in (ON_DEMAND, RECV_BACKWARD)] == [True, False]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "bwd.mlp",
            "bwd.mlp.",
            "bwd.mlp.100",
            "bwd.mlp.0+",
            "bwd.mlp.0 ",
            "bwd.mlp.0\n",
            "fwd.mlp.x",
            "xbwd.mlp.0",
        ),
        *("bwd.experts.0", "Bwd.mlp.0", "pipe.recv_forward", "pipexrecv_backward", "on demand"),
    ],
)
def test_what_names_no_window_is_refused(text: str) -> None:
    assert re.fullmatch(PATTERN, text) is None
    with pytest.raises(ValueError, match="names no window"):
        window_at(text, 1)


def test_below_a_layer_only_weight_gradients_wait() -> None:
    below = window_name("bwd", HALVES[1], 0, -1)
    assert window_at(below, layer=5) == WindowAddress("bwd", 4, HALVES[1], 0)
    assert [re.fullmatch(pattern, below) is not None for pattern in (PATTERN, GATHER_PATTERN, WAIT_PATTERN)] == [
        False,
        False,
        True,
    ]
    assert re.fullmatch(WAIT_PATTERN, RECV_BACKWARD)
    assert not re.fullmatch(WAIT_PATTERN, ON_DEMAND)


def test_examples_are_the_collectives_with_sequence_parallelism() -> None:
    """Every collective of either half, in the same layer and, of backwards, in the one above."""
    assert examples("fwd") == ("fwd.attention.0", "fwd.mlp.0", "fwd.attention.1", "fwd.mlp.1")
    counts = {half: len(section.collectives("bwd", sequence_parallel=True)) for half, section in DENSE.items()}
    names = {window_name("bwd", half, ordinal, up) for half, count in counts.items() for ordinal in range(count) for up in (0, 1)}
    assert set(examples("bwd")) == names
    assert len(examples("bwd")) == len(names)


def test_an_address_knows_its_frame_and_says_where_it_is() -> None:
    address = WindowAddress("bwd", 7, "mlp", 1)
    assert address.frame == (7, "mlp")
    assert str(address) == "bwd.mlp.1@7"


def test_the_schema_of_plans_is_the_published_one() -> None:
    """Editors check plans by it; version 1 of plan files does not change."""
    assert plan_schema() == json.loads((ROOT / "configs" / "plan.schema.json").read_text())
