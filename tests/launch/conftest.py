"""The `megatron.training` of the newest wheel, for tests that launch."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from .launched import Launched, launch


@pytest.fixture(scope="module")
def run() -> Callable[..., Launched]:
    """`run(script, flags, ranks=...)` launches a script."""
    wheel = Path(os.environ.get("MEGATRON_CORE_0_19_DIR", "")).resolve()
    if not (wheel / "megatron" / "training").is_dir():
        pytest.skip(f"no megatron.training in {wheel} (MEGATRON_CORE_0_19_DIR; `make test` downloads it where it can)")
    return partial(launch, path=[wheel])
