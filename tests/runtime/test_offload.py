"""Offloaded storages: what goes, when its original goes, and that it comes back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx.errors import OffloadError
from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.host_memory import HostLimit
from megatron_lynx.runtime.offload import OffloadedStorage, OffloadedTensor, Offloader, OffloadGroup, OffloadPolicy, on_device
from tests.runtime.devices import CPU, asynchronous, delay, drain, moved_bytes, on_every_device, waited_s
from tests.runtime.devices import device as device


@contextmanager
def offloader(
    size_bytes: int, *, smallest: int = 1, lasting: tuple[Tensor, ...] = (), sets: int = 1, device: Device = CPU
) -> Iterator[Offloader]:
    made = Offloader(
        {0: OffloadPolicy(size_bytes, smallest, sets)}, device=device, limit=HostLimit(10**7), lasting=lambda chunk: lasting
    )
    try:
        yield made
    finally:
        made.close()


def pushed(group: OffloadGroup, *tensors: Tensor) -> list[OffloadedTensor]:
    handles = [group.push(tensor) for tensor in tensors]
    assert all(isinstance(handle, OffloadedTensor) for handle in handles)
    return handles  # type: ignore[return-value]


def is_leaving(storage: OffloadedStorage) -> bool:
    """Whether it is on its way, and its original still here."""
    return storage._out is not None and storage._original is not None


def storages_of(group: OffloadGroup) -> list[OffloadedStorage]:
    """Those that live, of a micro-batch that has left."""
    return [storage for leaving in group._away for storage in leaving.alive()]


def there_and_back(made: Offloader, group: OffloadGroup) -> None:
    made.leave(group, None)
    drain(made.out)
    made.settle()
    assert not any(is_leaving(storage) for storage in storages_of(group))
    group.fetch()


@on_every_device
def test_memory_is_used_again_only_behind_the_copies(device: Device) -> None:
    """Kernels are late, copies are many, and what is let go is allocated and overwritten at once."""
    where, on_cuda = device.where, device.where.type == "cuda"
    count = 1 << 22 if on_cuda else 1 << 12
    made = Offloader({0: OffloadPolicy(3 * 4 * count, 1, 3)}, device=device, limit=HostLimit(10**9))
    for step in range(3):
        in_flight = []
        for number in range(3):
            group = made.open(number, 0)
            if on_cuda:
                delay(device)
            tensors = [torch.full((count,), 100.0 * step + 10.0 * number + index, device=where) for index in range(3)]
            in_flight.append((group, pushed(group, *tensors)))
            del tensors
            made.leave(group, None)
            torch.full((6 * count,), float("nan"), device=where)
        for number, (group, handles) in enumerate(in_flight):
            group.fetch()
            torch.full((6 * count,), float("nan"), device=where)
            for index, handle in enumerate(handles):
                assert bool((handle.tensor() == 100.0 * step + 10.0 * number + index).all())
            handles.clear()
    made.close()


def test_views_come_back_with_shape_stride_and_offset() -> None:
    with offloader(10**6) as made:
        group = made.open(0, 0)
        base = torch.randn(6, 8, 4)
        views = [base, base[2:, :, 1], base.transpose(0, 2), base.view(torch.int32), base[5, 7].expand(3, 4)]
        expected = [view.clone() for view in views]
        shapes = [(view.size(), view.stride(), view.storage_offset(), view.dtype) for view in views]
        handles = pushed(group, *views)
        del base, views
        there_and_back(made, group)
        assert moved_bytes(made) == (6 * 8 * 4 * 4,) * 2, "tensors that alias move once"
        returned = [handle.tensor() for handle in handles]
        assert all(torch.equal(one, other) for one, other in zip(returned, expected, strict=True))
        assert [(one.size(), one.stride(), one.storage_offset(), one.dtype) for one in returned] == shapes
        assert len({one.untyped_storage().data_ptr() for one in returned}) == 1


class Quantized(Tensor):
    """A matrix of bytes with scales, as Transformer Engine wraps it. It has no memory itself."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, shape: torch.Size, dtype: torch.dtype) -> Quantized:
        made: Quantized = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]
        made.parts = {"data": data, "scale": scale}  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)

    def get_metadata(self) -> dict[str, Tensor]:
        return self.parts  # type: ignore[attr-defined, no-any-return]


def test_the_bytes_of_a_quantized_matrix_move_and_its_small_scales_stay() -> None:
    with offloader(10**6, smallest=64) as made:
        group = made.open(0, 0)
        data, scale = torch.randint(0, 256, (16, 8), dtype=torch.uint8), torch.rand(2)
        expected = data.clone()
        matrix = Quantized(data, scale, torch.Size((16, 8)), torch.bfloat16)
        assert group.may_go(matrix)
        handle = group.push(matrix)
        del data, matrix
        there_and_back(made, group)
        assert moved_bytes(made) == (16 * 8,) * 2
        returned = handle.tensor()  # type: ignore[operator]
        assert isinstance(returned, Quantized)
        assert (returned.shape, returned.dtype) == (torch.Size((16, 8)), torch.bfloat16)
        assert torch.equal(returned.get_metadata()["data"], expected)
        assert torch.equal(returned.get_metadata()["scale"], scale)


def test_a_tensor_that_is_all_of_its_storage_comes_back_without_a_view() -> None:
    """Most are: what is copied and handed back is of their type and shape, and nothing is made of bytes first."""
    with offloader(10**6) as made:
        bits = torch.randint(0, 256, (6, 8), dtype=torch.uint8)
        tensors = [
            torch.randn(6, 8),
            torch.randn(2, 3, 4, dtype=torch.bfloat16),
            bits.view(torch.float8_e4m3fn).clone(),
            torch.rand(5) < 0.5,
            torch.tensor(2.5, dtype=torch.float64),
            torch.arange(7),
        ]
        expected = [tensor.clone() for tensor in tensors]
        for micro_batch in range(2):  # the second one has the first one's blocks
            group = made.open(micro_batch, 0)
            handles = pushed(group, *(tensor.clone() for tensor in tensors))
            there_and_back(made, group)
            for handle, tensor in zip(handles, expected, strict=True):
                returned = handle.tensor()
                assert handle.view is None
                assert (returned.dtype, returned.shape) == (tensor.dtype, tensor.shape)
                assert returned.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
            del group, handles, handle
        size_bytes = sum(tensor.nbytes for tensor in expected)
        assert moved_bytes(made) == (2 * size_bytes,) * 2


def test_the_edge_may_lie_in_a_tensor_that_is_all_of_its_storage() -> None:
    with offloader(100) as made:
        group = made.open(0, 0)
        expected = torch.randn(8, 8)
        (handle,) = pushed(group, expected.clone())
        there_and_back(made, group)
        assert moved_bytes(made) == (100, 100)
        returned = handle.tensor()
        assert returned.shape == (8, 8)
        assert torch.equal(returned, expected)


def test_bytes_are_counted_not_tensors() -> None:
    """What was made first goes first; the tensor at the edge is split; the rest stays where it is."""
    with offloader(1000) as made:
        group = made.open(0, 0)
        tensors = [torch.randn(150) for _ in range(3)]
        expected = [tensor.clone() for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        handles = pushed(group, *tensors)
        del tensors
        there_and_back(made, group)
        assert moved_bytes(made) == (1000, 1000)
        assert made.memory.bytes == 768 + 512, "600 and 400 bytes in blocks that begin at multiples of 256"
        returned = [handle.tensor() for handle in handles]
        assert all(torch.equal(one, other) for one, other in zip(returned, expected, strict=True))
        assert returned[2].data_ptr() == addresses[2]


def test_what_stays() -> None:
    parameter, mask = torch.nn.Parameter(torch.randn(64, 64)), torch.ones(64, 64)
    with offloader(10**6, smallest=1024, lasting=(parameter,)) as made:
        group = made.open(0, 0)
        group.leave([mask])
        staying: list[Tensor] = [
            parameter.detach().t(),
            mask[3:],
            torch.randn(255),
            torch.randn(64, 64).to_sparse(),
            torch.view_as_complex(torch.randn(64, 64, 2)).conj(),
        ]
        assert not any(isinstance(group.push(tensor), OffloadedTensor) for tensor in staying)
        assert isinstance(group.push(torch.randn(256)), OffloadedTensor)
        assert group.push_all({"weight": (parameter, 3)})["weight"][0] is parameter


def test_the_output_of_the_stage_stays() -> None:
    """Megatron frees its data behind autograd's back."""
    with offloader(10**6) as made:
        group = made.open(0, 0)
        output, other = torch.randn(64), torch.randn(64)
        handles = pushed(group, output, other)
        made.leave(group, (output.view(8, 8),))
        assert moved_bytes(made)[0] == 256
        assert handles[0].tensor().data_ptr() == output.data_ptr()


def test_an_original_is_let_go_behind_its_copy_and_before_the_next_but_one() -> None:
    with offloader(10**6, sets=3, device=asynchronous()) as made:
        groups, handles = [], []
        for number in range(2):
            groups.append(made.open(number, 0))
            handles += pushed(groups[-1], torch.full((256,), number, dtype=torch.uint8))
            if number == 0:
                made.leave(groups[0], None)
        (first,) = storages_of(groups[0])
        made.settle()
        assert is_leaving(first), "its copy has not ended"
        made.leave(groups[1], None)
        assert not is_leaving(first)
        assert waited_s(made) > 0
        assert [int(handle.tensor()[0]) for handle in handles] == [0, 1]


def test_a_copy_that_fails_ends_the_step_where_it_is_issued() -> None:
    """When a copy fails, and where a step ends for it, must not depend on the clock: other ranks wait for messages."""

    def broken(target: Tensor, source: Tensor) -> None:
        raise OSError("the link is down")

    with offloader(10**6) as made:
        made.out.move = broken
        group = made.open(0, 0)
        _handles = pushed(group, torch.zeros(64))
        with pytest.raises(OSError, match="the link is down"):
            made.leave(group, None)


def test_copies_that_avoid_messages_leave_behind_them_and_come_before_them() -> None:
    policy = OffloadPolicy(10**6, 1, 1, avoids_messages=True)
    made = Offloader({0: policy}, device=asynchronous(), limit=HostLimit(10**7))
    group = made.open(0, 0)
    (handle,) = pushed(group, torch.arange(64.0))
    made.leave(group, None)
    made.exchange_begins()
    assert moved_bytes(made) == (0, 0)
    made._send()
    assert moved_bytes(made) == (256, 0)
    assert waited_s(made) == 0
    made.exchange_begins()
    assert waited_s(made) > 0, "the message comes behind the copy"
    group.fetch()
    assert moved_bytes(made) == (0, 256)
    made.exchange_begins()
    assert waited_s(made) > 0, "and this one behind the reload"
    assert torch.equal(handle.tensor(), torch.arange(64.0))
    assert waited_s(made) == 0
    made.close()


def test_storages_are_fetched_last_one_first_and_once() -> None:
    with offloader(10**6) as made:
        group = made.open(0, 0)
        handles = pushed(group, *(torch.full((256,), number, dtype=torch.uint8) for number in range(4)))
        made.leave(group, None)
        order: list[int] = []

        def noted(target: Tensor, source: Tensor) -> None:
            target.copy_(source)
            order.append(int(target[0]))

        made.back.move = noted
        group.fetch()
        group.fetch()
        drain(made.back)
        assert order == [3, 2, 1, 0]
        assert moved_bytes(made) == (1024, 1024)
        assert [int(handle.tensor()[0]) for handle in handles] == [0, 1, 2, 3]


def test_what_was_not_fetched_is_fetched_on_demand() -> None:
    with offloader(10**6) as made:
        group = made.open(0, 0)
        (handle,) = pushed(group, torch.arange(64.0, requires_grad=True).detach().requires_grad_())
        made.leave(group, None)
        again = on_device(((handle,), {}))[0][0]
        assert again.requires_grad
        assert torch.equal(again.detach(), torch.arange(64.0))
        assert torch.equal(handle.tensor(), torch.arange(64.0)), "it can be asked for again"
        assert moved_bytes(made) == (256, 256)


def test_when_the_graph_goes_everything_goes() -> None:
    """A graph that is dropped without backward takes its storages along, and their blocks are lent again."""
    with offloader(10**6) as made:
        for number in range(5):
            group = made.open(number, 0)
            handles = pushed(group, torch.randn(256))
            made.leave(group, None)
            del handles
            assert list(storages_of(group)) == []
        assert made.memory.bytes == 1024


def test_a_host_that_is_too_small_is_refused_before_anything_runs() -> None:
    with pytest.raises(OffloadError, match="too little memory") as refused:
        Offloader({0: OffloadPolicy(600, 1, 2), 1: OffloadPolicy(100, 1, 1)}, device=CPU, limit=HostLimit(1200))
    assert "1200 bytes" in refused.value.problems[0].finding
    assert "1300 bytes" in refused.value.problems[0].needed


def test_an_address_is_held_by_others_only_while_it_is() -> None:
    """A story: beside overlapped exchanges of experts Megatron frees what a node was given. Another tensor lies there soon, and
    stayed on the device as if somebody held it."""
    with offloader(10**7) as made:
        group, later = made.open(0, 0), torch.zeros(1 << 20)
        given = later.detach()
        group.leave([given])
        assert not group.may_go(later)
        given.set_()  # type: ignore[call-overload]
        assert group.may_go(later)
