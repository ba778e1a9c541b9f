"""What of a container's model is planned for: a GPT of usual layers, or a hybrid stack. All else is refused by name.

`cfg.model` is an object of a class that builds something, with fields of which most are a flag of Megatron-LM's, too. A field
that is none is named here if somebody has judged it; one that nobody has, of a class of the user's own, say, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from megatron_lynx.bridge_settings import places_of
from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.container import Container, plain
from megatron_lynx.launch_arguments.flag_table import FlagTable

HYBRID = ("HybridModelProvider", "MambaModelProvider")
"""Of 0.6, and of 0.5."""
MODELS = ("GPTModelProvider", "MLAModelProvider", "GPTModelConfig", *HYBRID)
"""Classes of models whose layers are those of a launch of Megatron-LM; and those made of them that build nothing else."""

LAYERS_OF_TE = ("default_layer_spec", "transformer_engine_layer_spec", "get_gpt_decoder_block_spec", "None")
LAYERS_OF_MEGATRON = "local_layer_spec"
STACKS = {
    "hybrid_stack_spec": ("get_default_hybrid_stack_spec", "transformer_engine_hybrid_stack_spec"),
    "mamba_stack_spec": ("get_default_mamba_stack_spec", "transformer_engine_mamba_stack_spec"),
    "mamba_chunk_size": ("128",),
}
"""What hybrid stacks are planned with: Transformer Engine's layers, and Mamba layers that scan as many tokens at a time as
Megatron-LM's do."""
ACTIVATIONS = {("gelu", False), ("silu", True), ("squared_relu", False), ("quick_gelu", True), ("fast_gelu", False)}


def refused_model(container: Container, table: FlagTable) -> Iterator[Problem]:
    """What no flag says, and nobody has modelled. Fields of a class of the user's own are among them."""
    model = container.cfg.model
    if (kind := _other_class(model)) is not None:
        needed = f"{' or '.join(MODELS[:2])}, which build a GPT, or {' or '.join(HYBRID)}"
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
    """The name of a model's class that builds something else than a GPT."""
    if (target := getattr(model, "_target_", None)) is not None:
        name = str(target).rpartition(".")[2]
        return None if name in MODELS else name
    if isinstance(model, SimpleNamespace):
        return None
    own = next((one for one in type(model).__mro__ if "provide" in vars(one)), type(model))
    return None if own.__name__ in MODELS else type(model).__name__


def activation(container: Container) -> tuple[str, bool]:
    """Whose name, and whether a gate is multiplied with it."""
    return str(container.get("model.activation_func", "gelu")), bool(container.get("model.gated_linear_unit"))


def is_of_tokenizer(container: Container) -> bool:
    """Whether the vocabulary is the tokenizer's: then it is padded."""
    return bool(container.get("tokenizer.use_tokenizer_vocab_size")) or container.get("model.vocab_size") is None


def vocabulary(container: Container) -> int | None:
    return container.get("tokenizer.vocab_size" if is_of_tokenizer(container) else "model.vocab_size")  # type: ignore[no-any-return]
