"""Lets Transformer Engine be imported without its compiled libraries.

import transformer_engine            found on the path, as anything is
  .common                            loads libcudnn, nvrtc, its own core library: told to leave that, as when it is being built
    _get_shared_object_file          is where the extension is looked for: answered with our `extension.py`
  .pytorch                           loads that file as `transformer_engine_torch`, and imports the rest
    modules on triton, onnxscript,   found without their contents where what they import is missing here:
      einops (kernels, exports)      their names are there, and raise when called
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_lynx.testbed.cpu_device import TRANSFORMER_ENGINE as PACKAGE
from megatron_lynx.testbed.cpu_device import has_compiled_extension
from tests.instruments.replacing import replace_entry
from tests.instruments.transformer_engine.device import answer_transformer_engine
from tests.instruments.transformer_engine.fp4 import padded
from tests.instruments.transformer_engine.unanswered import UnansweredModule

EXTENSION = Path(__file__).with_name("extension.py")
BUILDING = "NVTE_PROJECT_BUILDING"
IMPORTED = re.compile(r"^(?:import|from) (triton|onnxscript|onnx|einops|cutlass)\b", re.MULTILINE)
"""Matches imports at the top of a module, which cannot be imported without them."""


def stand_in_for_transformer_engine() -> ExitStack:
    """Let the Transformer Engine on the import path run without its compiled parts, until the returned stack is closed.

    Nothing is done where there is none, or where its compiled extension is installed. To be in place before it is imported, and
    so before Megatron is; modules that were imported stay so. The stand-in for CUDA is to be in place as well.
    """
    undo = ExitStack()
    if PACKAGE not in sys.modules and importlib.util.find_spec(PACKAGE) is not None and not has_compiled_extension():
        replace_entry(undo, os.environ, "NVTE_TORCH_COMPILE", "0")  # read when its modules are imported
        replace_entry(undo, os.environ, "NVTE_UNFUSED_FP8_UPDATE", "1")  # in its Python; read at each update
        answer_transformer_engine(undo)
        finder = Finder()
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
    return undo


class Finder(importlib.abc.MetaPathFinder):
    """Finds what cannot be imported as it is; everything else of Transformer Engine is found by others."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{PACKAGE}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        if name == f"{PACKAGE}.common":
            spec.loader = Loader(spec.loader, without_libraries)
            return spec
        if name == f"{PACKAGE}.pytorch.quantization":
            spec.loader = Loader(spec.loader, with_block_scales)
            return spec
        if needs_what_is_missing(spec):
            return importlib.machinery.ModuleSpec(name, Loader(None, None))
        return None


class Loader(importlib.abc.Loader):
    """Loads a module as another loader would, inside of something; or, without one, a module of unanswered names."""

    def __init__(self, original: Any, around: Callable[[Any, ModuleType], None] | None) -> None:
        self._original = original
        self._around = around

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return UnansweredModule(spec.name) if self._around is None else None

    def exec_module(self, module: ModuleType) -> None:
        if self._around is not None:
            self._around(self._original, module)
        elif module.__name__ == f"{PACKAGE}.pytorch.triton.pad":
            module.pad_columnwise_scale_inv = padded  # type: ignore[attr-defined]


def without_libraries(loader: Any, module: ModuleType) -> None:
    """Execute `transformer_engine.common` as during a build, when its libraries are not there yet; our file is the extension."""
    with ExitStack() as undo:
        replace_entry(undo, os.environ, BUILDING, "1")
        loader.exec_module(module)
    module._get_shared_object_file = lambda library: EXTENSION  # type: ignore[attr-defined]


def with_block_scales(loader: Any, module: ModuleType) -> None:
    """Execute `transformer_engine.pytorch.quantization`. Whether there are block scales it asks torch's version of CUDA, too,
    which is nobody's GPU's here."""
    loader.exec_module(module)
    module.check_fp8_block_scaling_support = lambda: (True, "")  # type: ignore[attr-defined]


def needs_what_is_missing(spec: importlib.machinery.ModuleSpec) -> bool:
    if spec.origin is None or not spec.origin.endswith(".py"):
        return False
    needed = set(IMPORTED.findall(Path(spec.origin).read_text(encoding="utf-8")))
    return any(importlib.util.find_spec(name) is None for name in needed)
