"""Memory blocks that a half's backward needs: size, the item that made each, and the items that saved it.

A block is a storage: its views count once, and keep all of it. Two passes are recorded and kept alive together; blocks common to
both (parameters, masks, rotary tables, the input) belong to neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.nest import all_in
from megatron_lynx.profiler.measured.half_run import HalfRun, code_behind, first_of, nbytes_of
from megatron_lynx.profiler.profile import SavedTensor


@dataclass
class _Block:
    bytes: int
    made_by: str
    saved_by: list[str] = field(default_factory=list)
    output: bool = False


def blocks_of(run: HalfRun) -> tuple[tuple[SavedTensor, ...], dict[str, int]]:
    first, second = _recorded(run), _recorded(run)
    own = [block for address, block in second[0].items() if address not in first[0] and (block.saved_by or block.output)]
    tensors = tuple(
        SavedTensor(bytes=block.bytes, made_by=block.made_by, saved_by=tuple(block.saved_by), output=block.output)
        for block in own
        if block.saved_by or block.made_by in run.section.handing_on
    )
    return tensors, second[1]


def held_bytes(run: Callable[[], Tensor], width: int, sequence_shards: int = 1) -> int:
    """Return the bytes that one pass of the embedding or output layer saves, without blocks common to two passes (parameters, and
    a shared input).

    Under sequence parallelism, blocks of tensors `width` wide are sharded: divided by `sequence_shards`.
    """
    (first, _kept_first), (second, _kept_second) = _saved_by(run), _saved_by(run)
    own = [(size, last) for address, (size, last) in second.items() if address not in first]
    return sum(size // (sequence_shards if last == width else 1) for size, last in own)


def _saved_by(run: Callable[[], Tensor]) -> tuple[dict[int, tuple[int, int]], list[Tensor]]:
    """Return bytes and last dimension of every saved block by address, and tensors to keep so that no address is reused."""
    blocks: dict[int, tuple[int, int]] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor.detach())
        storage = tensor.untyped_storage()
        blocks.setdefault(storage.data_ptr(), (storage.nbytes(), tensor.shape[-1] if tensor.ndim else 1))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held.append(run())
    return blocks, held


def _recorded(run: HalfRun) -> tuple[dict[int, _Block], dict[str, int], Any]:
    """Record one pass with saved-tensor hooks. Keep the third result, so that no address is reused."""
    blocks: dict[int, _Block] = {}
    outputs: dict[str, int] = {}
    held: list[Tensor] = []
    item = [code_behind(run.section, None)]
    taken: list[Any] = [()]

    def seen(tensor: Tensor) -> _Block:
        held.append(tensor.detach())
        storage = tensor.untyped_storage()
        return blocks.setdefault(storage.data_ptr(), _Block(storage.nbytes(), item[0]))

    def pack(tensor: Tensor) -> Tensor:
        if not has_memory(tensor):
            return tensor
        block = seen(tensor)
        if item[0] not in block.saved_by:
            block.saved_by.append(item[0])
        return tensor.detach()

    def entered(name: str, arguments: Any) -> None:
        for tensor in all_in(Tensor, arguments):
            seen(tensor)
        item[0], taken[0] = name, arguments

    def left(name: str, result: Any) -> None:
        block = seen(first_of(result))
        block.output = block.output or block.made_by == name
        if (norm := run.inner_norms.get(name)) is not None:
            _tell_apart(blocks, norm.saved(result, taken[0]), norm.item, name)
        outputs[name] = nbytes_of(first_of(result))
        item[0] = code_behind(run.section, name)

    start = run.input.detach().requires_grad_()
    blocks[start.untyped_storage().data_ptr()] = _Block(nbytes_of(start), "input")
    with run.watched(entered, left), torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        result = run.forward(start, **run.arguments)
    outputs[run.section.residual] = nbytes_of(first_of(result))
    if run.section.column_parallel in run.inner_norms:
        outputs[run.section.norm] = nbytes_of(start)
    return blocks, outputs, (held, result)


def _tell_apart(blocks: dict[int, _Block], saved: tuple[Tensor | None, ...], norm: str, linear: str) -> None:
    """Assign the norm's part of a fused linear's saved tensors: the norm made all of them, the linear reads its output, the norm
    its statistics."""
    *output, mean, deviation = saved
    for parts, reader in ((output, linear), ((mean, deviation), norm)):
        for part in parts:
            if part is not None:
                block = blocks[part.untyped_storage().data_ptr()]
                block.made_by, block.saved_by = norm, [reader]


def has_memory(tensor: Tensor) -> bool:
    """Return False for wrappers around other tensors, such as a weight's FP8 copy."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True
