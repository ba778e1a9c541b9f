"""A `ConfigContainer` of Megatron-Bridge: a recipe's, or one in a file, with what was changed of it.

--bridge recipes:llama  model.seq_length=8192     the container that `llama()` of `recipes.py` returns, with a setting changed
--bridge run_config.yaml                          one that was written (`cfg.to_yaml`, or by Bridge beside a checkpoint)

cfg.mixed_precision, cfg.comm_overlap    ──> laid over the model, the optimizer and the gradients, as Bridge does before it trains

A recipe's container is what Bridge gets; a file's is taken as Bridge left it, in what differs: whether the vocabulary is padded.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_lynx.bridge_settings import as_setting, has_setting, in_settings
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch_arguments.recipe import HEADLINE, OPTION, container_of
from megatron_lynx.yaml_file import read_yaml

FILES = (".yaml", ".yml")
NEEDED_PARTS = ("model", "train", "optimizer", "ddp")
KNOWN_PRECISIONS = {"bf16_mixed": {"bf16": True, "fp16": False, "grad_reduce_in_fp32": True}}
"""What a name stands for in a file. In a recipe Bridge is asked."""

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "fp8"}

BUCKET = 128 * 1024 * 1024
"""Parameters of a bucket where `cfg.comm_overlap` is set, and does not say."""


@dataclass(frozen=True)
class Container:
    """A container as it was said. Its parts are objects with fields, whatever it was read of."""

    cfg: Any
    is_resolved: bool
    """Whether it is what Bridge made of another."""

    def has(self, part: str, field: str) -> bool:
        return has_setting(self.cfg, part, field)

    def get(self, place: str, otherwise: Any = None) -> Any:
        part, _, field = place.partition(".")
        return plain(getattr(getattr(self.cfg, part, None), field, otherwise))

    def say(self, text: str) -> str:
        """A text in Bridge's settings."""
        return in_settings(text, self.has)

    def setting(self, flag: str) -> str:
        """A flag with its value as what sets the same."""
        return as_setting(flag, self.has)


def read_container(words: Sequence[str], gpus: int | None) -> Container:
    """`words`: a recipe or a file, and `part.field=value`. Raises `ConfigError`, with all problems where there are several."""
    name, *changes = words or [""]
    is_file = name.endswith(FILES)
    cfg = _as_objects(read_yaml(Path(name))) if is_file else container_of(name)
    where = f"{OPTION} {name}"
    if missing := [part for part in NEEDED_PARTS if getattr(cfg, part, None) is None]:
        text = ", ".join(f"cfg.{part}" for part in missing)
        raise ConfigError(HEADLINE, [Problem(where, f"no {text}", "a ConfigContainer of Megatron-Bridge")])
    problems = [problem for change in changes if (problem := _changed(cfg, change)) is not None]
    _with_precision(cfg, problems)
    if problems:
        raise ConfigError(HEADLINE, problems)
    _with_overlap(cfg, gpus)
    return Container(cfg, is_file)


def _as_objects(data: Mapping[str, Any]) -> Any:
    """Parts with fields, as a container has them."""
    parts = {part: SimpleNamespace(**value) if isinstance(value, Mapping) else value for part, value in data.items()}
    inner = getattr(parts.get("model"), "transformer", None)
    if isinstance(inner, Mapping):
        vars(parts["model"]).update({**inner, "_target_": vars(parts["model"]).get("_target_"), "transformer": None})
    return SimpleNamespace(**parts)


def plain(value: Any) -> Any:
    """A value as a flag has it: types, functions and members of enumerations by their names; of a file those that it names."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping) and "_target_" in value:
        name = str(value["_target_"]).rpartition(".")[2]
        return value.get("_name_", DTYPES.get(name, name))
    if isinstance(value, partial):
        return plain(value.func)
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    if (layout := getattr(value, "input_data", None)) is not None:
        return plain(layout)
    text = str(value)
    return DTYPES.get(text.removeprefix("torch."), value) if text.startswith("torch.") else value


WORDS = {"true": True, "false": False, "null": None, "none": None}


def _changed(cfg: Any, change: str) -> Problem | None:
    """Sets `part.field=value`, as Bridge's own command line does; or says what is wrong with it."""
    place, equals, text = change.partition("=")
    part, _, field = place.removeprefix("cfg.").partition(".")
    if not equals or not (field or hasattr(cfg, part)):
        return Problem("launch", f"the word {change!r}", "part.field=value, such as model.seq_length=8192")
    if not has_setting(cfg, part, field):
        fields = vars(getattr(cfg, part)) if hasattr(getattr(cfg, part, None), "__dict__") else vars(cfg)
        close = difflib.get_close_matches(field if hasattr(cfg, part) else part, list(fields), n=1)
        return Problem(
            f"cfg.{part}.{field}", "no such setting", "one that the container has", f"did you mean {close[0]}?" if close else ""
        )
    try:
        value = WORDS[text.lower()] if text.lower() in WORDS else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    setattr(*((getattr(cfg, part), field) if field else (cfg, part)), value)
    return None


def _with_precision(cfg: Any, problems: list[Problem]) -> None:
    """`cfg.mixed_precision` decides of whatever the model, the optimizer and the gradients have under its names."""
    said = getattr(cfg, "mixed_precision", None)
    if isinstance(said, str):
        if (known := sys.modules.get("megatron.bridge.training.mixed_precision")) is not None:
            said = known.get_mixed_precision_config(said)
        elif (name := said.replace("-", "_")) in KNOWN_PRECISIONS:
            said = SimpleNamespace(**KNOWN_PRECISIONS[name])
        else:
            needed = f"{', '.join(KNOWN_PRECISIONS)}, or its settings: other names are Bridge's to explain"
            problems.append(Problem("cfg.mixed_precision", said, needed, f"give the recipe: {OPTION} module:function"))
            return
    if said is not None:
        _laid_over(cfg, ("model", "optimizer", "ddp"), vars(said))


def _with_overlap(cfg: Any, gpus: int | None) -> None:
    """`cfg.comm_overlap` decides what runs beside computing: as it says, else as Bridge does where it says nothing."""
    overlap, model = getattr(cfg, "comm_overlap", None), cfg.model
    if overlap is None:
        return
    said = {name: value for name, value in vars(overlap).items() if value is not None and name != "data_parallel_size"}
    tensor, pipeline = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    if tensor < 2 or not model.sequence_parallel:
        said["tp_comm_overlap"] = False
    chunked = pipeline > 1 and (model.virtual_pipeline_model_parallel_size or 1) > 1
    _laid_over(cfg, ("model",), {"overlap_p2p_comm": chunked, "defer_embedding_wgrad_compute": False, **said})
    if cfg.ddp.use_distributed_optimizer:
        replicated = gpus is not None and gpus > tensor * pipeline * model.context_parallel_size
        names = ("overlap_grad_reduce", "overlap_param_gather")
        usual = {"bucket_size": BUCKET if replicated else None, **dict.fromkeys(names, replicated)}
        _laid_over(cfg, ("ddp", "optimizer"), {**usual, **said})


def _laid_over(cfg: Any, parts: Sequence[str], values: Mapping[str, Any]) -> None:
    for part in parts:
        for name, value in values.items():
            if not name.startswith("_") and has_setting(cfg, part, name):
                setattr(getattr(cfg, part), name, value)
