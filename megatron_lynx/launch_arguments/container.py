"""Launches of Megatron-Bridge: a `ConfigContainer`, from a recipe or a file, becomes values under Megatron-LM's names.

A recipe is called without GPU and network, from the current folder or an installed module; its output goes to standard error. A
file holds the container as Bridge resolved it; it differs from a recipe's in vocabulary padding."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_lynx.bridge_settings import BridgeSettings, places_of
from megatron_lynx.errors import ConfigError, Problem, suggestion
from megatron_lynx.launch_arguments.command_line import checked, value_of
from megatron_lynx.launch_arguments.given import FlagTable, Given, Value
from megatron_lynx.launch_arguments.today import REPLACED
from megatron_lynx.yaml_file import read_yaml

FILES = (".yaml", ".yml")
NEEDED_PARTS = ("model", "train", "optimizer", "ddp")
KNOWN_PRECISIONS = {"bf16_mixed": {"bf16": True, "fp16": False, "grad_reduce_in_fp32": True}}
"""Named precisions in a file. For a recipe, Bridge resolves the name."""

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "fp8"}
BUCKET = 128 * 1024 * 1024
"""Parameters per bucket if `cfg.comm_overlap` is set without a bucket size."""


class Container(BridgeSettings):
    def __init__(self, cfg: Any, is_resolved: bool) -> None:
        super().__init__(cfg)
        self.is_resolved = is_resolved

    def under_plan(self, plan: str, flags: Sequence[str], environment: Mapping[str, str]) -> str:
        variables = "".join(f"{name}={value} " for name, value in environment.items())
        text = f"{variables}torchrun ... -m megatron_lynx.launch --lynx-host bridge SCRIPT --lynx-plan {shlex.quote(plan)}"
        return f"{text}, set {' '.join(map(self.setting, flags))}" if flags else text

    def get(self, place: str, otherwise: Any = None) -> Any:
        part, _, field = place.partition(".")
        return plain(getattr(getattr(self.cfg, part, None), field, otherwise))


def read_container(words: Sequence[str], gpus: int | None) -> Container:
    """Read `words`: a recipe or a file, then `part.field=value`. Raises `ConfigError` with all problems."""
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
    parts = {part: SimpleNamespace(**value) if isinstance(value, Mapping) else value for part, value in data.items()}
    inner = getattr(parts.get("model"), "transformer", None)
    if isinstance(inner, Mapping):
        vars(parts["model"]).update({**inner, "_target_": vars(parts["model"]).get("_target_"), "transformer": None})
    return SimpleNamespace(**parts)


def plain(value: Any) -> Any:
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


def _changed(cfg: Any, change: str) -> Problem | None:
    """Set `part.field=value` as Bridge's command line does. Returns a problem if that is impossible."""
    place, equals, text = change.partition("=")
    part, _, field = place.removeprefix("cfg.").partition(".")
    if not equals or not (field or hasattr(cfg, part)):
        return Problem("launch", f"the word {change!r}", "part.field=value, such as model.seq_length=8192")
    if not BridgeSettings(cfg).has(part, field):
        fields = vars(getattr(cfg, part)) if hasattr(getattr(cfg, part, None), "__dict__") else vars(cfg)
        todo = suggestion(field if hasattr(cfg, part) else part, fields)
        return Problem(f"cfg.{part}.{field}", "no such setting", "one that the container has", todo)
    value = None if text.lower() == "none" else value_of(text)
    setattr(*((getattr(cfg, part), field) if field else (cfg, part)), value)
    return None


def _with_precision(cfg: Any, problems: list[Problem]) -> None:
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
    """`cfg.comm_overlap` overrides overlapped communication, with Bridge's defaults for fields that it leaves out."""
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
            if not name.startswith("_") and BridgeSettings(cfg).has(part, name):
                setattr(getattr(cfg, part), name, value)


OPTION = "--bridge"
OFFLINE = "HF_HUB_OFFLINE"
HEADLINE = "the configuration cannot be read"


def container_of(name: str) -> Any:
    """Call the function `name`, module:function, and return its container. Raises `ConfigError`."""
    where, (module, _, function) = f"{OPTION} {name}", name.partition(":")
    if not module or not function:
        needed = "module:function, which returns a ConfigContainer, or a file (.yaml) of one"
        raise ConfigError(HEADLINE, [Problem(where, name or "nothing", needed)])
    with _beside_the_user():
        try:
            return getattr(import_module(module), function)()
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code, and a hub's
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            finding = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200] or 'no reason'}"
            needed = f"a function that returns a ConfigContainer here, without a network ({OFFLINE}=0: with one)"
            todo = f"or write the container to a file where it can be had, cfg.to_yaml('cfg.yaml'): {OPTION} cfg.yaml"
            raise ConfigError(HEADLINE, [Problem(where, finding, needed, todo)]) from None


@contextmanager
def _beside_the_user() -> Iterator[None]:
    """Import from the current folder, with hubs offline unless the user decides otherwise: without a network they retry."""
    folder, said = os.getcwd(), os.environ.get(OFFLINE)
    sys.path.insert(0, folder)
    os.environ.setdefault(OFFLINE, "1")
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path.remove(folder)
        if said is None:
            del os.environ[OFFLINE]


HYBRID = ("HybridModelProvider", "MambaModelProvider", "HybridModelConfig", "MambaModelConfig")
MODELS = ("GPTModelProvider", "MLAModelProvider", "GPTModelConfig", "BridgeGPTModelConfig", *HYBRID)
LAYERS_OF_TE = ("default_layer_spec", "transformer_engine_layer_spec", "get_gpt_decoder_block_spec", "None")
LAYERS_OF_MEGATRON = "local_layer_spec"
STACKS = {
    "hybrid_stack_spec": ("get_default_hybrid_stack_spec", "transformer_engine_hybrid_stack_spec"),
    "mamba_stack_spec": ("get_default_mamba_stack_spec", "transformer_engine_mamba_stack_spec"),
    "mamba_chunk_size": ("128",),
}
ACTIVATIONS = {("gelu", False), ("silu", True), ("squared_relu", False), ("quick_gelu", True), ("fast_gelu", False)}


def refused_model(container: Container, table: FlagTable) -> Iterator[Problem]:
    """Yield settings of the model that no flag sets and that are not modelled, such as fields of a user's own class."""
    model = container.cfg.model
    if (kind := _other_class(model)) is not None:
        needed = f"{' or '.join(MODELS[:2])}, which build a GPT, or {' or '.join(HYBRID[:2])}"
        yield Problem("cfg.model", kind, needed, "other models are not planned for")
    if activation(container) not in ACTIVATIONS:
        name, gated = activation(container)
        needed = "gelu or squared_relu without a gate, silu or quick_gelu with one (cfg.model.gated_linear_unit)"
        yield Problem("cfg.model.activation_func", f"{name}, {'gated' if gated else 'not gated'}", needed)
    fields = {**vars(model), **vars(getattr(model, "transformer", None) or SimpleNamespace())}
    known = {field for name in table.of_name for part, field in places_of(name) if part == "model"}
    known |= table.no_flag | table.no_flag_of_bridge
    for field, value in fields.items():
        if str(plain(value)) in STACKS.get(field, ()):
            continue
        if field.startswith("_") or field in known or not value or (value == 1 and value is not True):
            continue
        yield Problem(f"cfg.model.{field}", str(plain(value)), "a model without it: what it takes is not known")
    if vocabulary(container) is None:
        where = "cfg.tokenizer.vocab_size" if container.has("tokenizer", "vocab_size") else "cfg.model.vocab_size"
        todo = f"say {where.removeprefix('cfg.')}=N behind --: no tokenizer is loaded here"
        yield Problem(where, "None", "the entries of the tokenizer, which Bridge takes for the vocabulary", todo)


def _other_class(model: Any) -> str | None:
    if (target := getattr(model, "_target_", None)) is not None:
        name = str(target).rpartition(".")[2]
        return None if name in MODELS else name
    if isinstance(model, SimpleNamespace):
        return None
    defining_class = next((one for one in type(model).__mro__ if "provide" in vars(one)), type(model))
    return None if defining_class.__name__ in MODELS else type(model).__name__


def activation(container: Container) -> tuple[str, bool]:
    return str(container.get("model.activation_func", "gelu")), bool(container.get("model.gated_linear_unit"))


def is_of_tokenizer(container: Container) -> bool:
    return bool(container.get("tokenizer.use_tokenizer_vocab_size")) or container.get("model.vocab_size") is None


def vocabulary(container: Container) -> int | None:
    return container.get("tokenizer.vocab_size" if is_of_tokenizer(container) else "model.vocab_size")  # type: ignore[no-any-return]


def given_container(container: Container, table: FlagTable) -> tuple[Given, list[Problem]]:
    problems = [*refused_model(container, table), *container.refused()]
    release, values = table.releases[-1], {}
    for name, flags in table.of_name.items():
        flag = next((flag for flag in flags if release in flag.releases), None)
        place = container.place(name)
        if flag is None or place is None or not place[1]:
            continue
        said, default = "cfg." + ".".join(place), table.default(name, release)
        value = TOLD[name](container) if name in TOLD else container.get(".".join(place))
        counts = flag.is_read and name not in REPLACED
        if value is None or (not counts and (value == default or not (value or default))):
            continue
        if isinstance(value, list) and flag.takes in (0, 1):
            value = ",".join(map(str, value)) if name == "window_size" else str(value)
        values[name] = Value(flag, said, checked(flag, said, value, problems) if flag.is_read else value)
    if vocabulary(container) is None:  # reported by `refused_model`
        flag = next(flag for flag in table.of_name["vocab_size"] if release in flag.releases)
        values["vocab_size"] = Value(flag, "cfg.tokenizer.vocab_size", None)
    packed = next((f"cfg.dataset.{name}" for name in PACKING if container.get(f"dataset.{name}")), "")
    return Given(values, (release,), table, packed=packed), problems


PACKING = ("enable_offline_packing", "enable_in_batch_packing", "packed_sequence_specs", "pack_sequences_in_batch")
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def _layout(container: Container) -> str | None:
    said = container.get("model.pipeline_model_parallel_layout")
    if not isinstance(said, list):
        return None if said is None else str(said)
    stages = [stage if isinstance(stage, list) else [stage] for stage in said]
    return "|".join("".join(LETTERS.get(str(one), str(one)) for one in stage) for stage in stages)


def _layers(container: Container) -> str:
    return str(container.get("model.transformer_layer_spec"))


def _pattern(container: Container) -> Any:
    return container.get("model.hybrid_layer_pattern") or container.get("model.hybrid_override_pattern")


Read = Callable[[Container], Any]


def _any_of(*places: str) -> Read:
    return lambda container: any(bool(container.get(place)) for place in places)


def _only_if(condition: str, place: str, value: Any = None) -> Read:
    return lambda container: (
        container.get(place) if (container.get(condition) if value is None else container.get(condition) == value) else None
    )


TOLD: dict[str, Read] = {
    "swiglu": lambda container: activation(container) == ("silu", True),
    "squared_relu": lambda container: activation(container) == ("squared_relu", False),
    "quick_geglu": lambda container: activation(container) == ("quick_gelu", True),
    "untie_embeddings_and_output_weights": lambda container: not container.get("model.share_embeddings_and_output_weights", True),
    "group_query_attention": lambda container: (
        container.get("model.num_query_groups") not in (None, container.get("model.num_attention_heads"))
    ),
    "grad_reduce_in_bf16": lambda container: not container.get("ddp.grad_reduce_in_fp32"),
    "vocab_size": vocabulary,
    "pad_vocab_size": lambda container: (
        is_of_tokenizer(container) or (container.is_resolved and bool(container.get("model.should_pad_vocab")))
    ),
    "transformer_impl": lambda container: "local" if _layers(container) == LAYERS_OF_MEGATRON else "transformer_engine",
    "spec": lambda container: None if _layers(container) in (*LAYERS_OF_TE, LAYERS_OF_MEGATRON) else _layers(container),
    "is_hybrid_model": lambda container: None if _pattern(container) else container.get("model.is_hybrid_model"),
    "hybrid_layer_pattern": _pattern,
    "cuda_graph_modules": lambda container: (
        modules if (modules := container.get("model.cuda_graph_modules")) != "full" else container.get("model.cuda_graph_scope")
    ),
    "use_distributed_optimizer": _any_of("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    "fp8_param_gather": _any_of("ddp.fp8_param_gather", "model.fp8_param"),
    "fp4_param_gather": _any_of("ddp.fp4_param_gather", "model.fp4_param"),
    "te_rng_tracker": _any_of("rng.te_rng_tracker", "model.use_te_rng_tracker"),
    "pipeline_model_parallel_layout": _layout,
    "overlap_p2p_comm": _only_if("model.virtual_pipeline_model_parallel_size", "model.overlap_p2p_comm"),
    "apply_rope_fusion": _only_if("model.position_embedding_type", "model.apply_rope_fusion", "rope"),
    "cpu_offloading_num_layers": _only_if("model.cpu_offloading", "model.cpu_offloading_num_layers"),
    **dict.fromkeys(
        (
            *("hybrid_override_pattern", "recompute_activations", "num_layers_per_virtual_pipeline_stage", "vocab_file"),
            *("max_position_embeddings", "async_tensor_model_parallel_allreduce"),
        ),
        lambda container: None,
    ),
}
