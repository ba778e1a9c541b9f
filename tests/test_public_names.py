"""What `import megatron_lynx` offers."""

from __future__ import annotations

import pytest

import megatron_lynx
from megatron_lynx import plan
from megatron_lynx.apply import installation
from megatron_lynx.apply.hooks import head_in_pieces


def test_names_are_those_of_their_homes() -> None:
    assert set(megatron_lynx.__all__) == {"load_plan", "install", "Plan", "Installation", "LogitsInPieces", "__version__"}
    assert megatron_lynx.load_plan is plan.load_plan
    assert megatron_lynx.Plan is plan.Plan
    assert megatron_lynx.install is installation.install
    assert megatron_lynx.Installation is installation.Installation
    assert megatron_lynx.LogitsInPieces is head_in_pieces.LogitsInPieces


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'instal'"):
        _ = megatron_lynx.instal  # type: ignore[attr-defined]
