"""Python's collector is left as it was found."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from megatron_lynx.search.best_first import no_collections


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_and_is_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with no_collections():
        assert not gc.isenabled()
    assert gc.isenabled() is enabled
    with suppress(ZeroDivisionError), no_collections():
        raise ZeroDivisionError
    assert gc.isenabled() is enabled
