"""Sections are consistent, and what is asked of them follows from their items' roles."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import (
    ATTENTION,
    COLUMN_PARALLEL,
    DENSE,
    EXPERTS,
    EXPERTS_WITH_SHARED,
    HALVES,
    ITEMS,
    MLP,
    RECOMPUTABLE,
    ROW_PARALLEL,
    SHARED_EXPERTS,
    Facts,
    all_items,
    names_in,
    sections_of,
)
from megatron_lynx.kinds.dense.section import CODE_ITEMS
from megatron_lynx.kinds.section import Section

ALL = [ATTENTION, MLP, EXPERTS, EXPERTS_WITH_SHARED]


@pytest.mark.parametrize("section", ALL, ids=lambda section: section.name)
def test_items_are_named_once_and_roles_that_are_asked_for_are_unique(section: Section) -> None:
    assert len(set(section.names)) == len(section.items)
    roles = [item.role for item in section.items]
    unique = ("norm", "column_parallel", "core", "row_parallel", "router", "dispatch", "experts_in", "experts_out", "residual")
    assert [role for role in unique if roles.count(role) > 1] == []
    assert (section.item("norm").name, section.item("residual").name) == (section.norm, section.residual)
    assert roles[0] == "norm"
    assert roles[-1] == "residual"


def test_a_plan_knows_every_item() -> None:
    assert set(ITEMS) < set(all_items())
    assert len(set(all_items())) == len(all_items())
    for section in ALL:
        assert [name for name in names_in(section.half) if name in section.names] == list(section.names)
    assert tuple(DENSE) == HALVES
    assert [section.half for section in DENSE.values()] == list(HALVES)


@pytest.mark.parametrize(
    ("section", "behind", "inner"),
    [
        (ATTENTION, {"linear_qkv": "rotary", "linear_proj": "attention_bda"}, ("rotary", "core_attention", "linear_proj")),
        (MLP, {"linear_fc1": "activation", "linear_fc2": "mlp_bda"}, ("activation", "linear_fc2")),
    ],
)
def test_code_follows_its_site(section: Section, behind: dict[str, str], inner: tuple[str, ...]) -> None:
    assert section.code_behind == behind
    assert section.inner == inner
    assert {item.name for item in section.sites} | set(behind.values()) == set(section.names)
    assert all(item.path for item in section.sites)
    assert not any(item.path for item in section.items if item.name in behind.values())
    assert section.linears == (section.column_parallel, section.row_parallel)


def test_a_recomputation_never_repeats_a_reduction() -> None:
    assert ROW_PARALLEL == ("linear_proj", "linear_fc2")
    assert COLUMN_PARALLEL == ("linear_qkv", "linear_fc1")
    assert set(ITEMS) - set(RECOMPUTABLE) == set(ROW_PARALLEL)
    assert {"rotary", "attention_bda", "activation", "mlp_bda"} == CODE_ITEMS
    assert [section.on_own_rows for section in DENSE.values()] == [
        ("input_layernorm", "attention_bda"),
        ("pre_mlp_layernorm", "mlp_bda"),
    ]


@pytest.mark.parametrize("section", DENSE.values(), ids=lambda section: section.name)
def test_collectives_are_those_of_the_table(section: Section) -> None:
    """The table in `dense`: kind, what it carries, and the GEMM behind which stock Megatron hides it."""

    def rows(passing: str, sequence_parallel: bool) -> list[tuple[str, str, str | None]]:
        return [(each.kind, each.carries, each.beside) for each in section.collectives(passing, sequence_parallel)]  # type: ignore[arg-type]

    assert rows("fwd", False) == [("all_reduce", "output", None)]
    assert rows("bwd", False) == [("all_reduce", "input_gradient", "wgrad")]
    assert rows("fwd", True) == [("all_gather", "input", None), ("reduce_scatter", "output", None)]
    assert rows("bwd", True) == [
        ("all_gather", "gradient", None),
        ("all_gather", "input", "dgrad"),
        ("reduce_scatter", "input_gradient", "wgrad"),
    ]


@pytest.mark.parametrize("section", DENSE.values(), ids=lambda section: section.name)
def test_collectives_come_behind_items_in_the_order_of_their_pass(section: Section) -> None:
    for passing, step in (("fwd", 1), ("bwd", -1)):
        for sequence_parallel in (False, True):
            roles = [item.role for item in section.items][::step]
            places = [roles.index(each.behind) for each in section.collectives(passing, sequence_parallel)]  # type: ignore[arg-type]
            assert places == sorted(places)


def test_experts_fill_the_half_of_the_mlp() -> None:
    assert sections_of() == (ATTENTION, MLP)
    assert sections_of(Facts(experts=True)) == (ATTENTION, EXPERTS)
    assert sections_of(Facts(experts=True, shared_experts=True)) == (ATTENTION, EXPERTS_WITH_SHARED)
    assert (EXPERTS.half, EXPERTS.method, EXPERTS.norm, EXPERTS.residual) == (MLP.half, MLP.method, MLP.norm, MLP.residual)
    assert [EXPERTS.collectives(passing, True) for passing in ("fwd", "bwd")] == [(), ()]  # type: ignore[arg-type]
    assert (EXPERTS.gathered, EXPERTS_WITH_SHARED.gathered) == (None, "shared_fc1")
    assert set(EXPERTS_WITH_SHARED.names) - set(EXPERTS.names) == set(SHARED_EXPERTS)


def test_experts_route_and_exchange_once() -> None:
    assert EXPERTS.recomputable == ("pre_mlp_layernorm", "experts_fc1", "experts_activation", "mlp_bda")
    kept = set(EXPERTS_WITH_SHARED.names) - set(EXPERTS_WITH_SHARED.recomputable)
    assert kept == {"shared_fc2", "router", "dispatch", "experts_fc2", "combine"}
    assert EXPERTS_WITH_SHARED.code_behind == {
        "shared_fc1": "shared_activation",
        "experts_fc1": "experts_activation",
        "combine": "mlp_bda",
    }
