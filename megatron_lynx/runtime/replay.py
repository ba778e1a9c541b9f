"""Replaying a half: the same code from the same inputs, as far as needed and no further.

    [1] random state and surroundings are what they were; gradients are on, because only then does code save tensors
    [2] code between sites runs; what it saves and is wanted is collected
    [3] at a site, wanted arguments are collected first, then
          kept site       its memo is returned, the random state moves to where the site left it
          replayed site   it runs; what it saves and is wanted is collected
    [4] a site's first part runs alone where the rest of the site has a memo or is not needed
[5] when nothing is wanted any more the replay stops: between sites, never inside one (rule R13)

With sequence parallelism a replayed GEMM's input is gathered once. The replay then has two parts: up to that site (its
argument is what is to be gathered), and, when the gather was started, the whole; what ran in the first part is remembered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.frame import Absent, Frame, Memo
from megatron_lynx.runtime.offload import on_device
from megatron_lynx.runtime.rng import RandomSource, forked
from megatron_lynx.runtime.saved import detached, saved_between, storage_of, suspended
from megatron_lynx.runtime.site_call import FirstPart, SiteCall


class _Enough(Exception):
    """Nothing more is needed from this half."""


class Replayer:
    """One replay of one frame."""

    def __init__(self, frame: Frame, random: RandomSource, *, up_to_gather: bool = False) -> None:
        self.frame = frame
        self.to_gather: Tensor | None = None
        """After a run up to the gather: the site's argument."""
        self.in_gather_site = False
        self._random = random
        self._up_to_gather = up_to_gather
        self._segment = 0
        self._ordinal = 0
        self._in_site = False
        self._hooks: Any = None

    def run(self) -> None:
        assert self.frame.inputs is not None, "a frame is replayed once"
        args, kwargs = on_device(self.frame.inputs)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._collect, _never_unpacked)
        try:
            with forked(self._random), torch.enable_grad(), self._hooks:  # [1]
                self._random.restore(self.frame.random)
                with suppress(_Enough):
                    self.frame.code(*args, **kwargs)
        finally:
            self._hooks = None  # it refers back to here

    def site(self, call: SiteCall) -> Any:
        arguments = call.arguments
        self._enter()
        if call.first is not None:
            self._run_first(call.first, call, arguments)
            self._enter()
        self._collect_views(arguments)  # [3]
        if self._ends_at(call):
            self.to_gather = arguments[0].detach() if self.to_gather is None else self.to_gather
            raise _Enough
        self._stop_if_done()
        memo = self.frame.memos.get(self._segment)
        outputs = self._recall(memo) if memo is not None else self._run(call.without_graph())
        self._enter()
        self._stop_if_done()
        return outputs

    def _run_first(self, first: FirstPart, call: SiteCall, arguments: list[Tensor]) -> None:
        own = {key for key in self.frame.wanted if key[0] == self._segment}
        passed = self._segment + 1 in self.frame.memos
        if not self._ends_at(call) and (not own or not (passed or own == self.frame.wanted)):
            return  # not needed, or the whole site runs
        with torch.no_grad(), suspended(self._hooks), call.as_recorded(self.frame.site_states.get(self._segment + 1)):
            made = first.run(arguments[0])  # [4]
        self._keep_first(made, self._segment)
        if self._ends_at(call):
            self.to_gather = made[0]
        self._stop_if_done()

    def _ends_at(self, call: SiteCall) -> bool:
        return self._up_to_gather and call.name == self.frame.policy.gather_site

    def _keep_first(self, made: tuple[Tensor | None, ...], segment: int) -> None:
        for index, tensor in enumerate(made):
            if tensor is not None:
                self.frame.keep((segment, index), tensor)

    def _run(self, call: SiteCall) -> Any:
        if not call.owns_parameters:
            with self._inside_site():
                outputs = call()
        else:
            state = self.frame.site_states.get(self._segment)
            with self._at_gather(call.name), suspended(self._hooks), call.as_recorded(state):
                outputs = call()
            self._collect_saved(call, outputs)
        if self._up_to_gather:
            self.frame.memos[self._segment] = Memo(map_nest(Tensor, detached, outputs), self._random.capture())
        return outputs

    def _recall(self, memo: Memo) -> Any:
        if memo.random is not None:
            self._random.restore(memo.random)
        return map_nest(Absent, Absent.made, on_device(memo.outputs))

    def _collect_views(self, arguments: list[Tensor]) -> None:
        for key, view in self.frame.views.items():
            if key[0] == self._segment:
                self.frame.keep(key, view.in_(arguments[view.argument]))

    def _collect_saved(self, call: SiteCall, outputs: Any) -> None:
        """The saved tensors that the recorder turned into handles one by one, in the same order."""
        first = self._segment - (call.first is not None)
        if not any(first <= segment <= self._segment for segment, _ in self.frame.wanted):
            return
        arguments = call.arguments
        skipped = {storage_of(tensor) for tensor in (*call.lasting, *arguments)}
        if call.first is not None:
            made = call.first.saved(outputs, arguments)
            self._keep_first(made, first)
            skipped.update(storage_of(tensor) for tensor in made if tensor is not None)
        for _, tensor in saved_between(outputs, arguments):
            if storage_of(tensor) not in skipped:
                self.frame.keep((self._segment, self._ordinal), tensor)
                self._ordinal += 1

    def _collect(self, tensor: Tensor) -> None:
        """Stands in for autograd's saving: the replay's own graph holds nothing."""
        if isinstance(tensor, torch.nn.Parameter):
            return
        self.frame.keep((self._segment, self._ordinal), tensor)  # [2]
        self._ordinal += 1
        if not self._in_site:
            self._stop_if_done()

    def _stop_if_done(self) -> None:
        if not self.frame.wanted:
            raise _Enough  # [5]

    def _enter(self) -> None:
        self._segment += 1
        self._ordinal = 0

    @contextmanager
    def _inside_site(self) -> Iterator[None]:
        self._in_site = True
        try:
            yield
        finally:
            self._in_site = False

    @contextmanager
    def _at_gather(self, name: str) -> Iterator[None]:
        """The gathered input is there, and the hook on the gather finds it, while the site runs."""
        if name != self.frame.policy.gather_site or self.frame.gathering is None:
            yield
            return
        self.in_gather_site = True
        try:
            yield
        finally:
            self.in_gather_site = False


def _never_unpacked(_: Any) -> Tensor:
    raise AssertionError("a replay's own graph is never run backward")
