"""Lists the functions of the installed megatron-core that hooks rely on, and whether each reads as recorded. Needs no model.

release table: module:function -> fingerprint ──compared with the installed source──> one row each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_lynx.apply.releases import Release, fingerprint, present_release
from megatron_lynx.apply.transformer_engine import present_te
from megatron_lynx.errors import HookRefused

RELIES_ON = {
    "halves": ("transformer.transformer_layer", "transformer.transformer_block"),
    "sites": ("transformer.attention", "transformer.mlp", "transformer.dot_product_attention", "fusions.fused_bias_dropout"),
    "latents": ("transformer.multi_latent_attention",),
    "experts": tuple(
        f"transformer.moe.{name}"
        for name in ("moe_layer", "moe_utils", "router", "experts", "shared_experts", "token_dispatcher", "fused_a2a")
    ),
    "transformer_engine": ("extensions.transformer_engine",),
    "collectives": ("tensor_parallel.layers", "tensor_parallel.mappings"),
    "hybrid": ("models.hybrid.hybrid_block",),
    "random_state": ("tensor_parallel.random",),
    "steps": (
        "pipeline_parallel.schedules",
        "pipeline_parallel.combined_1f1b",
        "pipeline_parallel.utils",
        "models.common.model_chunk_schedule_plan",
        "models.common.utils",
        "models.gpt.fine_grained_callables",
    ),
    "head_in_pieces": (
        "models.gpt.gpt_model",
        "models.common.language_module.language_module",
        "tensor_parallel.cross_entropy",
        "fusions.fused_cross_entropy",
    ),
    "receives": ("pipeline_parallel.p2p_communication",),
}
"""Modules of `megatron.core` by the hook (`apply/hooks/<name>`, `apply/transformer_engine`) or kind of section that relies on
them.
"""


@dataclass(frozen=True)
class Held:
    """One function that a hook relies on."""

    hook: str
    site: str
    """`module:qualified.name`."""
    release: str
    recorded: str
    found: str | None
    """Its fingerprint now, or None if it does not exist."""

    @property
    def as_recorded(self) -> bool:
        return self.found == self.recorded


def inventory(release: Release, hook: str | None = None) -> Iterator[Held]:
    """Rows of a release's table, of megatron-core or of Transformer Engine.

    `hook`: the hook of all rows; by default found from each module.
    """
    yield from _rows(release, release.fingerprints, hook)


def held_here() -> list[Held]:
    """Rows of megatron-core, and of Transformer Engine if it is installed and known.

    Raises `HookRefused` for an unknown megatron-core.
    """
    release = present_release()
    try:
        te = present_te()
    except HookRefused:  # the doctor reports it
        return [*inventory(release), *_in_some_runs(release, but="te")]
    return [*inventory(release), *_in_some_runs(release), *inventory(te), *_in_some_runs(te)]


def _in_some_runs(release: Release, but: str = "") -> Iterator[Held]:
    """Functions that matter only in some runs. `but`: a table to leave out."""
    for what, recorded in release.only_with.items():
        yield from _rows(release, recorded) if what != but else ()


def _rows(release: Release, recorded: Mapping[str, str], hook: str | None = None) -> Iterator[Held]:
    for site, hashed in recorded.items():
        found, also = _found(site), release.also.get(site, hashed)
        yield Held(hook or hook_of(site), site, release.version, also if found == also else hashed, found)


def hook_of(site: str) -> str:
    """The hook that relies on a function; ValueError if none does."""
    if site.startswith("transformer_engine."):
        return "transformer_engine"
    module = site.partition(":")[0].removeprefix("megatron.core.")
    for hook, modules in RELIES_ON.items():
        if module in modules:
            return hook
    raise ValueError(f"no hook is known to rely on {site}")


def _found(site: str) -> str | None:
    try:
        return fingerprint(site)
    except (ImportError, AttributeError):
        return None
