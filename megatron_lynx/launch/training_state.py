"""Saves and restores the state that a forward and backward pass changes besides gradients, so that a step can run again.

random numbers     python, numpy, torch's generators, Megatron's tracker
buffers            of the model (routers' biases and counts, running statistics)
extra states       of modules that save one in checkpoints; scales and amax histories of Transformer Engine's FP8
logged losses      auxiliary losses of routers, multi-token prediction and sparse attention, summed until they are logged
validated results  of Megatron's rerun state machine
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module

from megatron_lynx.apply.hooks.random_state import MegatronRandom
from megatron_lynx.nest import all_in, map_nest


class AllRandom(MegatronRandom):
    def capture(self) -> Any:
        return random.getstate(), numpy.random.get_state(), super().capture()

    def restore(self, state: Any) -> None:
        of_python, of_numpy, of_megatron = state
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        super().restore(of_megatron)

    def same(self, one: Any, other: Any) -> bool:
        same_numpy = all(numpy.array_equal(mine, yours) for mine, yours in zip(one[1], other[1], strict=True))
        of_megatron = zip(all_in(Tensor, one[2]), all_in(Tensor, other[2]), strict=True)
        return one[0] == other[0] and same_numpy and all(torch.equal(mine, yours) for mine, yours in of_megatron)


class TrainingState:
    def __init__(self, model: Sequence[Module]) -> None:
        from megatron.core import rerun_state_machine

        self._random = AllRandom()
        self._drawn = self._random.capture()
        modules = [module for chunk in model for module in chunk.modules()]
        self._buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)]
        # newer releases of Transformer Engine refuse to read the extra states of their own modules
        stateful = [module for module in modules if type(module).get_extra_state is not Module.get_extra_state]
        self._extra = [(module, _copied(module.get_extra_state())) for module in stateful if not in_fp8(module)]
        self._scales = Fp8Scales(modules)
        self._logged = [(losses, _copied(losses)) for losses in _logged_losses()]
        machine = getattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)
        self._validated = [] if machine is None else [(machine, _copies(vars(machine)))]

    def restore(self) -> None:
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for module, extra in self._extra:
            module.set_extra_state(_copied(extra))
        self._scales.restore()
        for losses, sums in self._logged:
            losses.clear()
            losses.update(_copied(sums))
        for machine, fields in self._validated:
            vars(machine).clear()
            vars(machine).update(_copies(fields))
        self._random.restore(self._drawn)


_LOGGED = (
    ("megatron.core.transformer.moe.moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER"),  # 0.16, 0.17
    ("megatron.core.transformer.moe.moe_logging", "_MOE_METRICS_TRACKER._metrics"),  # from 0.18 on
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper.tracker"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper.tracker"),
)
"""Dicts in which releases sum up losses for their log. A module that is not imported has none."""


def _logged_losses() -> Iterator[dict[str, Any]]:
    for module, path in _LOGGED:
        attribute: Any = sys.modules.get(module)
        for name in path.split("."):
            attribute = getattr(attribute, name, None)
        if isinstance(attribute, dict):
            yield attribute


def _copies(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in fields.items()}


def _copied(value: Any) -> Any:
    """A copy with its own tensors. Log entries are dataclasses; their process groups are shared."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        twin = copy.copy(value)
        vars(twin).update({name: _copied(part) for name, part in vars(value).items()})
        return twin
    return map_nest(Tensor, torch.clone, value)


def in_fp8(module: Module) -> bool:
    """Whether it is one of Transformer Engine's modules, which may run in FP8."""
    return hasattr(module, "fp8_meta")


class Fp8Scales:
    """FP8 scales and amax histories: every pass in FP8 changes them, and extra states lack those of unused modules."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._modules = [module for module in modules if in_fp8(module)]
        self._before = {key: tensor.clone() for key, tensor in self._present()}

    @torch.no_grad()
    def restore(self) -> None:
        """Write the values back into the same tensors, as process-wide lists refer to them. New tensors get initial values."""
        for key, tensor in self._present():
            before = self._before.get(key)
            tensor.copy_(before if before is not None else torch.full_like(tensor, float(key[2] == "scale")))

    def _present(self) -> Iterator[tuple[tuple[int, str, str], Tensor]]:
        for number, module in enumerate(self._modules):
            meta: Any = module.fp8_meta
            for direction in ("scaling_fwd", "scaling_bwd"):
                for part in ("scale", "amax_history"):
                    tensor = getattr(meta.get(direction), part, None)
                    if isinstance(tensor, Tensor):
                        yield (number, direction, part), tensor


class Batches:
    """Stands in for one data iterator of a step, and repeats its batches."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._random = AllRandom()
        self._read: list[tuple[Any, Any]] = []
        """Batches, each with the random state after reading it, if reading used random numbers."""
        self._next = 0

    def again(self) -> None:
        self._next = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._read):
            before, batch = self._random.capture(), next(self._source)
            after = self._random.capture()
            self._read.append((batch, None if self._random.same(before, after) else after))
        elif (behind := self._read[self._next][1]) is not None:
            self._random.restore(behind)
        self._next += 1
        return copy.deepcopy(self._read[self._next - 1][0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class DataIterators:
    """Stands in for the data iterators of Megatron's schedule: one, one for each chunk, or None on ranks that read nothing."""

    def __init__(self, given: Any) -> None:
        self._batches: dict[int, Batches] = {}
        self.stand_in = [self._for(one) for one in given] if isinstance(given, list) else self._for(given)

    def again(self) -> None:
        for batches in self._batches.values():
            batches.again()

    def _for(self, source: Any) -> Batches | None:
        if source is None:
            return None
        if id(source) not in self._batches:  # chunks may share one
            self._batches[id(source)] = Batches(source)
        return self._batches[id(source)]
