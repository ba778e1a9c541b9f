"""The kinds' faces to a run: who holds on to layers asks what fills their halves, and knows no kind."""

from __future__ import annotations

from torch.nn import Module

from megatron_lynx.apply.graphs import captured_modules
from megatron_lynx.apply.live_run import LiveRun
from megatron_lynx.kinds.captured import in_graph
from megatron_lynx.kinds.dense.running import HeldAttention, HeldMlp
from megatron_lynx.kinds.experts.running import HeldExperts
from megatron_lynx.kinds.held import Classes, Layers, Running
from megatron_lynx.kinds.latent.running import HeldLatentAttention
from megatron_lynx.kinds.opaque.running import HELD_OPAQUE
from megatron_lynx.kinds.section import HALVES, Half, Section

FACES: list[Running] = [HeldAttention(), HeldMlp(), HeldLatentAttention(), HeldExperts(), *HELD_OPAQUE]
"""The usual content of each half first: it answers to every layer."""


def sections_in(layer: Module) -> tuple[Section, Section]:
    """What fills the halves of a live layer, in the order of a forward."""
    attention, mlp = (in_graph(_found(half, layer)[1], captured_modules(layer.config)) for half in HALVES)
    return attention, mlp


def classes_of(section: Section, *, te: bool) -> Classes:
    """The classes that the sites of a section may have, in Transformer Engine's layers or in Megatron's own."""
    face = next(face for face in reversed(FACES) if face.has(section))
    return face.te if te else face.local


def layers_by_kind(run: LiveRun) -> list[tuple[Running, Layers]]:
    """Every kind, and the rank's layers that have it."""
    having: dict[Running, dict[int, Module]] = {face: {} for face in FACES}
    for number, layer in run.layers.items():
        for half in HALVES:
            having[_found(half, layer)[0]][number] = layer
    return list(having.items())


def kinds_of(run: LiveRun) -> list[Running]:
    """The kinds that some layer of the rank has."""
    return [face for face, layers in layers_by_kind(run) if layers]


def _found(half: Half, layer: Module) -> tuple[Running, Section]:
    answers = ((face, face.section_in(layer)) for face in reversed(FACES) if face.half == half)
    return next((face, section) for face, section in answers if section is not None)
