"""The `megatron.training` of the newest wheel, and the scripts of a checkout, for tests that launch."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from .checkouts import minor_of
from .launched import Launched, launch

MODULES_OF_0_16 = ("six", "regex")
"""Imported by its scripts, beside what megatron-core requires."""


@pytest.fixture(scope="module")
def run() -> Callable[..., Launched]:
    """`run(script, flags, ranks=...)` launches a script."""
    wheel = Path(os.environ.get("MEGATRON_CORE_0_19_DIR", "")).resolve()
    if not (wheel / "megatron" / "training").is_dir():
        pytest.skip(f"no megatron.training in {wheel} (MEGATRON_CORE_0_19_DIR; `make test` downloads it where it can)")
    return partial(launch, path=[wheel])


@pytest.fixture(scope="module")
def script() -> Path:
    """The real `pretrain_gpt.py` of the checkout that MEGATRON_LM_DIR names."""
    checkout = Path(os.environ.get("MEGATRON_LM_DIR", "")).resolve()
    if not (checkout / "pretrain_gpt.py").is_file():
        pytest.skip(f"no pretrain_gpt.py in {checkout} (MEGATRON_LM_DIR: a checkout of Megatron-LM, 0.16 to 0.19)")
    if minor_of(checkout) == "16":
        for module in MODULES_OF_0_16:
            pytest.importorskip(module, reason=f"scripts of 0.16 import {module}")
    return checkout / "pretrain_gpt.py"
