"""The layers of one chunk under a stock setting, in order: which are recomputed as a whole, which offload, what each holds.

block 2 of 4       [input]  [input]  [ whole layer ]  [ whole layer ]
uniform 2 of 4     [input      ·   ]  [input      ·   ]         one checkpoint for two layers
half offloaded     [ ─────> host   ]  [ ─────> host   ]  [ stays ]  [ stays ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_lynx.config.job import Job
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.layer_bytes import LayerBytes, layer_bytes
from megatron_lynx.stock.setting import NONE, StockSetting


@dataclass(frozen=True)
class StockLayer:
    """One micro-batch in one layer."""

    experts: bool
    halves: LayerBytes
    whole: bool = False
    """Whether it is recomputed as a whole."""
    begins: bool = True
    """If so: whether a checkpoint begins with it, which keeps its input."""
    input_bytes: int = 0

    @property
    def stays(self) -> int:
        """What it keeps on the device."""
        return self.input_bytes * self.begins if self.whole else sum(half.stays for half in self.halves)

    @property
    def leaves(self) -> int:
        return 0 if self.whole else sum(half.leaves for half in self.halves)

    @property
    def copied(self) -> int:
        return 0 if self.whole else sum(half.copied for half in self.halves)


def chunk_layers(job: Job, setting: StockSetting, stage: int, chunk: int = 0) -> tuple[StockLayer, ...]:
    """The layers of one chunk of a stage."""
    shape, numbers = LayerShape.of(job), job.layers_of(stage, chunk)
    layers = [_layer(shape, setting, number in job.model.expert_layers, at) for at, number in enumerate(numbers)]
    if setting.offload:
        count = offloading_layers(setting, len(layers))
        layers = layers[:count] + [_kept_whole(layer) for layer in layers[count:]]
        if (stage, chunk) != (0, 0) and layers:
            layers[0] = replace(layers[0], halves=(layers[0].halves[0].received, *layers[0].halves[1:]))
    return tuple(layers)


def _layer(shape: LayerShape, setting: StockSetting, experts: bool, at: int) -> StockLayer:
    """The layer at a place of its chunk, counted from 0."""
    whole = setting.method == "uniform" or (setting.method == "block" and at < (setting.layers or 0))
    begins = setting.method != "uniform" or at % (setting.layers or 1) == 0
    halves = layer_bytes(shape, NONE if whole else replace(setting, method=None, layers=None), experts)
    return StockLayer(experts, halves, whole, begins, shape.input_bytes)


def _kept_whole(layer: StockLayer) -> StockLayer:
    return replace(layer, halves=tuple(half.kept_whole for half in layer.halves))


def offloading_layers(setting: StockSetting, layers: int) -> int:
    """How many of a chunk's layers offload all that they are asked to. Megatron takes whole groups, one for each module of each
    layer, off the end."""
    groups = len(setting.offload)
    count = layers * groups
    return (count - int(count * (1 - setting.fraction))) // groups if groups else 0


def made_again_bytes(layers: Sequence[StockLayer]) -> int:
    """How much more a chunk's layers hold in the backward of one micro-batch than when it begins, at most.

    From the last layer down: a checkpoint makes all its inside again, and what backward has passed is let go.
    """
    held = most = 0
    inside = 0
    for layer in reversed(layers):
        if layer.whole:
            inside += sum(half.stays for half in layer.halves)
            if layer.begins:
                most = max(most, held + inside - layer.stays)
                held, inside = held - layer.stays, 0
            continue
        for half in reversed(layer.halves):
            most = max(most, held + half.again)
            held -= half.stays
    return most
