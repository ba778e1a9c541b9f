"""Shapes of a model from its Hugging Face `config.json`, as values under Megatron's names.

{"model_type": "qwen3", "hidden_size": 4096, "num_key_value_heads": 8, ...}  ──>  hidden_size 4096, group_query_attention, ...

hf_config.json has, for each `model_type`, the keys that are read and needed, and values that the type implies. The launch's own
flags replace these values. Keys that are in no table are listed as unread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lynx.errors import ConfigError, Problem, suggestion
from megatron_lynx.launch_arguments.command_line import Entry, values_of
from megatron_lynx.launch_arguments.given import Given
from megatron_lynx.whole_file import json_in

OPTION, FILE = "--hf-config", "config.json"
HEADLINE = "the model's shapes cannot be read"
ACTIVATIONS = {"hidden_act": "silu", "mlp_hidden_act": "relu2"}
NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
NUMBERS = (
    *("num_hidden_layers", "num_attention_heads", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace"),
    *("decoder_sparse_step", "sliding_window"),
)


class Shapes(NamedTuple):
    model: str
    entries: tuple[Entry, ...]
    unread: tuple[str, ...]


def shapes_in(path: Path) -> Shapes:
    """Read a `config.json`, or the one in a folder. Raises `ConfigError` with all problems."""
    file = path / FILE if path.is_dir() else path
    data = json_in(file, "a model's config.json, as Hugging Face writes it")
    kind = str(data.get("model_type"))
    if kind not in _tables()["models"]:
        needed = f"one of {', '.join(_tables()['models'])}"
        todo = suggestion(kind, _tables()["models"]) or "give its shapes as Megatron's flags, or in a job with model.opaque"
        raise ConfigError(HEADLINE, [Problem(f"{file}: model_type", kind, needed, todo)])
    row = _row(kind)
    if problems := list(_problems(file, data, row)):
        raise ConfigError(HEADLINE, problems)
    entries = [(f"{FILE}: model_type {kind}", name, value) for name, value in row["sets"].items()]
    entries += [(f"{FILE}: {key}", name, data[key]) for key, name in row["keys"].items() if name and data.get(key) is not None]
    entries += [(f"{FILE}: {key}", name, value) for key, name, value in _derived(data, row)]
    known = (*row["keys"], *_tables()["without_matter"])
    unread = (key for key, value in data.items() if value and not any(fnmatchcase(key, pattern) for pattern in known))
    return Shapes(kind, tuple(entries), tuple(unread))


def with_shapes(given: Given, shapes: Shapes, problems: list[Problem]) -> Given:
    values = values_of(shapes.entries, given.table, given.release, problems)
    return replace(
        given, values={**values, **given.values}, unknown=(*given.unknown, *(f"{FILE}: {key}" for key in shapes.unread))
    )


@cache
def _tables() -> dict[str, Any]:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _row(kind: str) -> dict[str, Any]:
    tables = _tables()
    said = tables["models"][kind]
    base = _row(said["like"]) if "like" in said else {"sets": tables["always"], "keys": tables["keys"], "needed": NEEDED}
    keys = dict(base["keys"])
    for table in said.get("reads", ()):
        keys |= tables[table]
    needed = (*base["needed"], *said.get("needed", ()))
    return {"sets": base["sets"] | said.get("sets", {}), "keys": keys, "needed": needed, "if": said.get("if", {})}


def _problems(file: Path, data: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[Problem]:
    for key in row["needed"]:
        if data.get(key) is None:
            yield Problem(f"{file}: {key}", "nothing", "this key", suggestion(key, data))
    for key in NUMBERS:
        if not isinstance(data.get(key, 0), int | None):
            yield Problem(f"{file}: {key}", repr(data[key]), "a whole number")
    for key, known in ACTIVATIONS.items():
        if key in row["keys"] and data.get(key, known) != known:
            yield Problem(f"{file}: {key}", str(data[key]), known, "other activations of this model are not modelled")


def _derived(data: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[Entry]:
    sets, layers = row["sets"], data.get("num_hidden_layers", 0)
    yield "tie_word_embeddings", "untie_embeddings_and_output_weights", not data.get("tie_word_embeddings")
    groups = data.get("num_key_value_heads")
    if groups is not None and "multi_latent_attention" not in sets:
        yield "num_key_value_heads", "group_query_attention", groups != data["num_attention_heads"]
    for key, implied in row["if"].items():
        yield from ((key, name, value) for name, value in implied.items() if data.get(key))
    if (width := data.get("moe_intermediate_size")) and data.get("n_shared_experts") and "mamba_num_heads" not in data:
        yield "n_shared_experts", "moe_shared_expert_intermediate_size", data["n_shared_experts"] * width
    if data.get("norm_topk_prob") is False and sets.get("moe_router_score_function") != "sigmoid":
        yield "norm_topk_prob", "moe_router_pre_softmax", True
    if dense := data.get("first_k_dense_replace"):
        yield "first_k_dense_replace", "moe_layer_freq", f"([0]*{dense}+[1]*{layers - dense})"
    step, only = data.get("decoder_sparse_step") or 1, data.get("mlp_only_layers") or ()
    if "decoder_sparse_step" in row["keys"] and (step > 1 or only):
        having = [int((layer + 1) % step == 0 and layer not in only) for layer in range(layers)]
        yield "decoder_sparse_step", "moe_layer_freq", str(having)
    if "sliding_window" in row["keys"]:
        yield "sliding_window", "window_size", f"{data['sliding_window'] - 1},0"
        kinds = data.get("layer_types")
        windows = [int(kind == "sliding_attention") for kind in kinds] if kinds else 2
        yield "layer_types" if kinds else "sliding_window", "window_attn_skip_freq", str(windows)
