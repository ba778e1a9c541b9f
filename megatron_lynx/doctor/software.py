"""Finds which versions are installed, and whether Megatron reads as recorded. Nothing is imported to learn a version."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from megatron_lynx.doctor.finding import Finding
from megatron_lynx.errors import HookRefused


def software() -> Iterator[Finding]:
    """The versions of torch, Transformer Engine, Apex and megatron-core, and whether megatron-core reads as recorded."""
    torch = version_of("torch")
    yield Finding("torch", "good", torch) if torch else Finding("torch", "defeats", "not installed", "no training", "install it")
    te = version_of("transformer-engine", "transformer_engine")
    if te is None:
        costs, todo = "Megatron's default layers need it", "install it, or launch with --transformer-impl local"
        yield Finding("Transformer Engine", "note", "not installed", costs, todo)
    else:
        yield _te(te)
    apex = version_of("apex")
    costs = "local layers have no fused norm, and refuse --sequence-parallel" if te is None else ""
    yield Finding("Apex", "good" if apex or te else "note", apex or "not installed", costs if apex is None else "")
    yield from _megatron()


def _te(found: str) -> Finding:
    """Whether this Transformer Engine is known. How it reads is compared when a plan is installed: importing it needs a GPU."""
    from megatron_lynx.apply.releases import minor_of
    from megatron_lynx.apply.transformer_engine import KNOWN

    if minor_of(found) in KNOWN:
        return Finding("Transformer Engine", "good", found)
    costs, todo = (
        "plans for its layers are refused",
        f"install one of {', '.join(KNOWN)}, or launch with --transformer-impl local",
    )
    return Finding("Transformer Engine", "defeats", found, costs, todo)


def version_of(*names: str) -> str | None:
    """The version of a package by the first of its names that is installed; nothing is imported for it."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _megatron() -> Iterator[Finding]:
    try:
        from megatron_lynx.apply.inventory import inventory
        from megatron_lynx.apply.releases import installed_version, present_release

        found = installed_version()
    except ImportError as error:
        yield Finding("megatron-core", "defeats", f"cannot be imported: {error}", "no training", "install it")
        return
    try:
        held = list(inventory(present_release()))
    except HookRefused as error:
        problem = error.problems[0]
        yield Finding(
            "megatron-core", "defeats", found, "every plan is refused: its functions are not known", f"{problem.needed}"
        )
        return
    yield Finding("megatron-core", "good", found)
    stale = [each.site for each in held if not each.as_recorded]
    if stale:
        costs, todo = "every plan is refused", "megatron-lynx hooks says which; install the release as it was published"
        yield Finding("hooks", "defeats", f"{len(stale)} of {len(held)} functions not as recorded: {stale[0]}", costs, todo)
    else:
        yield Finding("hooks", "good", f"all {len(held)} functions as recorded")
