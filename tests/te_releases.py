"""Ranks with a release of Transformer Engine on their import path, and perhaps another release of megatron-core.

`make test` puts both under build/ and names the folders in TRANSFORMER_ENGINE_2_NN_DIR and MEGATRON_CORE_0_NN_DIR.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_lynx.testbed.ranks import RankPool

TE_RELEASES = ("2.4", "2.9", "2.14", "2.17", "2.20")
"""The oldest release that the testbed runs, those that Megatron 0.16, 0.17 and 0.19 are built with, and the newest."""


def pool_with(release: str, ranks: int, core: str | None = None, **environment: str) -> RankPool:
    """Ranks (not started yet) that import this Transformer Engine, its compiled extension stood in for.

    `core`: a release of megatron-core; none is the installed one. `environment`: what the ranks have in it beside. The test is
    skipped where one of them is not there.
    """
    folders = [folder_of("TRANSFORMER_ENGINE", release, "transformer_engine")]
    if core is not None:
        folders.insert(0, folder_of("MEGATRON_CORE", core, "megatron/core"))
    return RankPool(ranks, env={"PYTHONPATH": python_path(*folders), **environment})


def pools_with(release: str, **environment: str) -> Iterator[Callable[[int], RankPool]]:
    """For a fixture: `pool_of(ranks)` gives such ranks, started once for each size; they end when it does."""
    pools: dict[int, RankPool] = {}
    yield lambda ranks: pools.setdefault(ranks, pool_with(release, ranks, **environment))
    for started in pools.values():
        started.close()


def python_path(*folders: Path) -> str:
    """The PYTHONPATH for ranks: these folders first, then what this process imports from."""
    return os.pathsep.join([*map(str, folders), *(entry or os.getcwd() for entry in sys.path)])


def folder_of(what: str, release: str, content: str) -> Path:
    """Where `make test` unpacked a release; the test is skipped where it is not."""
    variable = f"{what}_{release.replace('.', '_')}_DIR"
    folder = Path(os.environ.get(variable, "")).resolve()
    if not (folder / content).is_dir():
        pytest.skip(f"no {content} {release} in {folder} ({variable}; `make test` downloads it where it can)")
    return folder
