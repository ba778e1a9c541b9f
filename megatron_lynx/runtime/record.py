"""Recording a half: run it once, and let go of every saved tensor that its replay will regenerate.

[1] code between sites runs under default hooks: what a replayed item saves becomes a handle
[2] a replayed site without parameters runs the same way
[3] any other site runs without default hooks (rule R11); afterwards single saved tensors of its nodes become handles:
      replayed site   all but parameters
      kept site       only those that share memory with an argument which the replay regenerates anyway
[4] what a kept site returned is remembered, as far as a replay will have to pass it
[5] the code behind a kept item keeps what it saves, and so what it hands to the next site stays too
[6] a site's first part is an item of its own: of the site's node its tensors become handles where it is replayed
[7] with a shipment, what is kept becomes a handle as well, of which the shipment decides whether its data goes to the host
[8] what a site keeps from call to call (scales of FP8) is captured behind its call, which does not change it
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.frame import Absent, Frame, Handle, Memo, View
from megatron_lynx.runtime.offload import Hosted, Shipment
from megatron_lynx.runtime.rng import RandomSource
from megatron_lynx.runtime.saved import detached, saved_between, storage_of, suspended, tensors_in
from megatron_lynx.runtime.site_call import SiteCall


class Recorder:
    """Records one call of one half. `take(handle)` is how backward gets a tensor back."""

    def __init__(
        self, frame: Frame, random: RandomSource, take: Callable[[Handle], Tensor], shipment: Shipment | None = None
    ) -> None:
        self.frame = frame
        self._shipment = shipment
        self.collectives = 0
        self._random = random
        self._take = take
        self._item: str | None = None
        self._segment = 0
        self._ordinal = 0
        self._row_segment = -1
        self._resident = {storage_of(tensor) for tensor in tensors_in(frame.inputs)}
        self._hooks: Any = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        try:
            with self._hooks:
                outputs = self.frame.code(*args, **kwargs)
        finally:
            self._hooks = None  # it refers back to here: a cycle would keep the frame until the next garbage collection
        self._settle_memos()
        if self._shipment is not None and self.frame.lets_go:
            self._stow_what_replay_needs(self._shipment)
        return outputs

    def site(self, call: SiteCall) -> Any:
        arguments = call.arguments
        if not self._replays(self._item):
            self._resident.update(map(storage_of, arguments))  # [5]
        if call.first is not None:
            self._enter(call.first.item)
        self._enter(call.name)
        outputs = self._called(call, arguments)
        if call.state is not None and self.frame.policy.replay:
            self.frame.site_states[self._segment] = call.state.capture()  # [8]
        self._enter(self.frame.policy.section.code_behind.get(call.name, call.name))
        return outputs

    def _called(self, call: SiteCall, arguments: list[Tensor]) -> Any:
        if not self._replays(call.name):
            return self._keep(call, arguments)
        if not call.owns_parameters:
            return call()  # [2]
        with suspended(self._hooks):
            outputs = call()
        self._let_go(call, outputs, arguments, arguments)  # [3]
        return outputs

    def _keep(self, call: SiteCall, arguments: list[Tensor]) -> Any:
        if not self.frame.policy.replay:
            with suspended(self._hooks):
                outputs = call()
            self._let_go(call, outputs, arguments, [])
            return outputs
        before = self._random.capture()
        with suspended(self._hooks):
            outputs = call()
        behind = self._random.capture()
        regenerated = [tensor for tensor in arguments if storage_of(tensor) not in self._resident]
        self._let_go(call, outputs, arguments, regenerated)  # [3]
        if call.name == self.frame.policy.section.row_parallel:
            self._row_segment = self._segment
            remembered = map_nest(Tensor, _absent, outputs)
        else:
            remembered = map_nest(Tensor, detached, outputs)
            self._resident.update(map(storage_of, tensors_in(outputs)))
        self.frame.memos[self._segment] = Memo(remembered, None if self._random.same(before, behind) else behind)  # [4]
        return outputs

    def _let_go(self, call: SiteCall, outputs: Any, arguments: list[Tensor], regenerated: list[Tensor]) -> None:
        """Turn saved tensors of the site's nodes into handles: views of regenerated arguments; where the site is replayed,
        everything else but parameters; what is kept, where it may go to the host."""
        lasting = {storage_of(tensor) for tensor in call.lasting}
        argument_at = {storage_of(tensor): index for index, tensor in reversed(list(enumerate(arguments)))}
        may_go = {storage_of(tensor) for tensor in regenerated}
        first = self._of_first_part(call, outputs, arguments)
        for raw, tensor in saved_between(outputs, arguments):
            storage = storage_of(tensor)
            if storage in lasting:
                continue
            if storage in first:
                raw.register_hooks(partial(self._pack_first, first[storage]), self._unpack)  # [6]
            elif storage in may_go:
                raw.register_hooks(partial(self._pack_view, argument_at[storage]), self._unpack)
            elif self._replays(self._item) and storage not in argument_at:
                raw.register_hooks(self._pack, self._unpack)
            elif self._shipment is not None and self._shipment.may_go(tensor):
                raw.register_hooks(self._shipment.stow, self._unpack)  # [7]

    def _of_first_part(self, call: SiteCall, outputs: Any, arguments: list[Tensor]) -> dict[int, int]:
        """From the storages of what a replayed first part made to the place of each among its tensors."""
        if call.first is None or not self._replays(call.first.item):
            return {}
        saved = enumerate(call.first.saved(outputs, arguments))
        return {storage_of(tensor): index for index, tensor in saved if tensor is not None}

    def _pack_first(self, index: int, tensor: Tensor) -> Handle:
        return self.frame.want((self._segment - 1, index), tensor.nbytes)

    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        key = (self._segment, self._ordinal)
        self._ordinal += 1
        if self._replays(self._item):
            return self.frame.want(key, tensor.nbytes)  # [1]
        # A tensor that stays is packed without its graph: an output that its own node holds would never be freed.
        return tensor.detach() if self._shipment is None else self._shipment.stow(tensor)  # [7]

    def _pack_view(self, argument: int, tensor: Tensor) -> Handle:
        key = (self._segment, -1 - len(self.frame.views))
        self.frame.views[key] = View.of(tensor, argument)
        return self.frame.want(key, tensor.nbytes)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Handle):
            return self._take(packed)
        return packed.tensor() if isinstance(packed, Hosted) else packed

    def _settle_memos(self) -> None:
        """Drop what no replay will pass, and the values of what it passes only to reach the code behind the row-parallel site."""
        wanted, memos = self.frame.wanted, self.frame.memos
        last = max((segment for segment, _ in wanted), default=-1)
        last_with_values = max((segment for segment, _ in wanted if segment <= self._row_segment), default=-1)
        for segment in list(memos):
            if segment >= last:
                del memos[segment]
            elif segment >= last_with_values:
                memos[segment] = Memo(map_nest(Tensor, _absent, memos[segment].outputs), memos[segment].random)

    def _stow_what_replay_needs(self, shipment: Shipment) -> None:
        """Hand the half's inputs and the memos of kept sites to the shipment."""
        self.frame.inputs = shipment.stow_all(self.frame.inputs)
        for segment, memo in self.frame.memos.items():
            self.frame.memos[segment] = Memo(shipment.stow_all(memo.outputs), memo.random)

    def _replays(self, item: str | None) -> bool:
        return item in self.frame.policy.replay

    def _enter(self, item: str) -> None:
        self._segment += 1
        self._ordinal = 0
        self._item = item


class Passage:
    """One call of a half that lets nothing go. Only its collectives are counted, and not even those where the half is opaque."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.collectives = 0

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.frame.code(*args, **kwargs)

    def site(self, call: SiteCall) -> Any:
        return call()


def _absent(tensor: Tensor) -> Any:
    return tensor if isinstance(tensor, torch.nn.Parameter) else Absent.of(tensor)
