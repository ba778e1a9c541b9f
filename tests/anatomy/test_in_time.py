"""Which windows come before backward needs what a recomputation regenerates."""

from __future__ import annotations

from functools import partial

import pytest

from megatron_lynx.anatomy import ATTENTION, DENSE, EXPERTS, HALVES, MLP
from megatron_lynx.anatomy.address import half_before, own_waits_in_time, own_window
from megatron_lynx.kinds.section import Section

in_time = partial(own_waits_in_time, exchanged=False)


def test_backward_walks_halves_from_the_last_layer_up() -> None:
    assert half_before("attention") == ("mlp", 0)
    assert half_before("mlp") == ("attention", 1)
    assert [own_window(half) for half in HALVES] == ["bwd.attention.0", "bwd.mlp.0"]


@pytest.mark.parametrize("section", DENSE.values(), ids=lambda section: section.name)
def test_the_own_gather_of_the_gradient_is_in_time_for_what_gemms_saved(section: Section) -> None:
    assert in_time(section, [section.norm, section.column_parallel], sequence_parallel=True, te=False) == 1


@pytest.mark.parametrize("section", DENSE.values(), ids=lambda section: section.name)
def test_without_sequence_parallelism_the_own_window_is_too_late(section: Section) -> None:
    """It reduces the gradient of the input, when everything of the half has been read."""
    assert in_time(section, [section.norm], sequence_parallel=False, te=False) == 0


@pytest.mark.parametrize("section", DENSE.values(), ids=lambda section: section.name)
def test_the_dropout_mask_is_needed_before_the_gradient_is_gathered(section: Section) -> None:
    assert in_time(section, [section.residual], sequence_parallel=True, te=False) == 0


def test_the_mask_of_the_other_half_does_not_matter() -> None:
    assert in_time(ATTENTION, [MLP.residual, ATTENTION.norm], sequence_parallel=True, te=False) == 1


@pytest.mark.parametrize("section", DENSE.values(), ids=lambda section: section.name)
def test_transformer_engine_reads_before_it_gathers(section: Section) -> None:
    """The row-parallel linear gathers the gradient, so what it saved is needed before; what the others saved is not."""
    inner, norm = section.before_row_parallel, section.norm
    assert in_time(section, [norm, inner], sequence_parallel=True, te=True) == 0
    assert in_time(section, [norm, section.column_parallel], sequence_parallel=True, te=True) == 1
    assert in_time(section, [norm, inner], sequence_parallel=True, te=False) == 1


def test_the_own_exchange_is_in_time_for_all_but_the_mask() -> None:
    of_experts = partial(own_waits_in_time, EXPERTS, sequence_parallel=False, te=True)
    assert of_experts(EXPERTS.names[:1], exchanged=True) == 1
    assert of_experts([EXPERTS.residual], exchanged=True) == of_experts(EXPERTS.names[:1], exchanged=False) == 0


def test_a_recomputation_stops_where_only_sites_lie_before() -> None:
    assert ATTENTION.stops == ("linear_qkv", "rotary")
    assert MLP.stops == ("linear_fc1", "activation")
    assert EXPERTS.stops == ()
