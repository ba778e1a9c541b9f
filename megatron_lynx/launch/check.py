"""Checked steps of `--lynx-check N`: each runs under stock and under the plan, inside `train_step`, in place of Megatron's
schedule.

    1. the state that the pass will change is saved
    2. hooks lifted: stock; its losses and gradients are copied to the host
    3. a pass under the plan, from which training continues
    4. all ranks compare bits: NaN equals the same NaN, and 0 is not -0. At a difference stock runs again, to tell whether it
       differs from itself
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_lynx.anatomy import ITEMS
from megatron_lynx.apply.installation import Installation
from megatron_lynx.apply.live_run import LiveRun, live_run, of_all_ranks
from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.ending import agree
from megatron_lynx.launch.training_state import DataIterators, TrainingState
from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.saved import tensors_in
from megatron_lynx.units import format_bytes

_AT_ONCE = 1 << 24

Gradients = Mapping[str, Tensor | None]
Position = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Difference:
    """One value of one rank that differs. Ordered by the pass over the step."""

    position: Position
    rank: int
    stage: int
    name: str
    values: str

    @property
    def place(self) -> str:
        return f"{self.name} on stage {self.stage} (rank {self.rank})"


@dataclass(frozen=True)
class Outcome:
    losses: tuple[Any, ...]
    """Values of the loss function, by micro-batch; empty on ranks without a loss."""
    gradients: Gradients
    positions: Mapping[str, Position]

    @classmethod
    def of(cls, losses: Any, chunks: Sequence[Module]) -> Outcome:
        """Read the latest pass. Gradients are views of Megatron's buffers, valid until these are zeroed."""
        parameters = list(named_parameters(chunks))
        return cls(
            tuple(losses or ()),
            {name: gradient_of(parameter) for name, parameter in parameters},
            {name: backward_position(name, parameter) for name, parameter in parameters},
        )

    def on_host(self) -> Outcome:
        losses = map_nest(Tensor, to_host, self.losses)
        gradients = {name: None if value is None else to_host(value) for name, value in self.gradients.items()}
        return Outcome(losses, gradients, self.positions)

    @property
    def size_bytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients.values() if gradient is not None)


def to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def gradient_of(parameter: Parameter) -> Tensor | None:
    gradient = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def named_parameters(chunks: Sequence[Module]) -> Iterator[tuple[str, Parameter]]:
    """Yield parameters by their names in the whole model: layers are numbered from 0 over all stages, as in checkpoints."""
    for chunk in chunks:
        layers: Any = chunk.decoder.layers  # type: ignore[union-attr]
        global_ = {f"decoder.layers.{local}.": f"decoder.layers.{layer.layer_number - 1}." for local, layer in enumerate(layers)}
        for name, parameter in chunk.named_parameters():
            prefix = next((prefix for prefix in global_ if name.startswith(prefix)), None)
            yield (name if prefix is None else global_[prefix] + name.removeprefix(prefix)), parameter


def differences(
    one: Outcome,
    other: Outcome,
    *,
    rank: int,
    stage: int,
    names: tuple[str, str],
    tolerances: Mapping[str, float] = MappingProxyType({}),
) -> list[Difference]:
    """Return all values that differ, earliest first. `tolerances`: fractions of the largest value, by names of gradients."""
    all_differences = [
        Difference((0, index), rank, stage, f"the loss of micro-batch {index}", what)
        for index, pair in enumerate(zip_longest(one.losses, other.losses))
        if (what := _loss_difference(*pair, names))
    ]
    all_differences += [
        Difference(one.positions[name], rank, stage, name, what)
        for name, mine in one.gradients.items()
        if not _near(mine, other.gradients[name], tolerances.get(name))
        and (what := difference(mine, other.gradients[name], names))
    ]
    return sorted(all_differences)


def _loss_difference(one: Any, other: Any, names: tuple[str, str]) -> str:
    mine, yours = tensors_in(one), tensors_in(other)
    if len(mine) != len(yours):
        return f"{len(mine)} values in {names[0]}, {len(yours)} in {names[1]}"
    return next((what for a, b in zip(mine, yours, strict=True) if (what := difference(a, b, names))), "")


def difference(one: Tensor | None, other: Tensor | None, names: tuple[str, str]) -> str:
    if one is None or other is None:
        present, absent = (names[1], names[0]) if one is None else names
        return "" if one is other else f"a value in {present}, none in {absent}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{tuple(one.shape)} {one.dtype} in {names[0]}, {tuple(other.shape)} {other.dtype} in {names[1]}"
    one = one.to(other.device)
    differing = (bits(one) != bits(other)).flatten()
    if not differing.any():
        return ""
    mine, yours = one.flatten()[differing].double(), other.flatten()[differing].double()
    worst = int(torch.nan_to_num((mine - yours).abs(), nan=torch.inf).argmax())
    worst_values = f"{mine[worst]:.9g} in {names[0]} and {yours[worst]:.9g} in {names[1]}"
    return f"{len(mine)} of {one.numel()} values that differ, most {worst_values}"


def _near(one: Tensor | None, other: Tensor | None, tolerance: float | None) -> bool:
    """Whether two gradients differ by at most `tolerance` times the largest value of the first. Compares in pieces."""
    if tolerance is None or one is None or other is None or one.shape != other.shape:
        return False
    pieces = zip(one.flatten().split(_AT_ONCE), other.flatten().split(_AT_ONCE), strict=True)
    largest = [[(mine.to(yours.device).double() - yours.double()).abs().max().cpu(), mine.abs().max()] for mine, yours in pieces]
    difference, value = torch.tensor(largest, dtype=torch.float64).amax(dim=0)
    return bool(difference <= tolerance * value)  # not for NaN


def backward_position(name: str, parameter: Parameter) -> Position:
    parts = name.split(".")
    if parts[0] == "embedding" or getattr(parameter, "shared_embedding", False):
        return 3, 0  # the first and the last stage add up their gradients
    if parts[:2] != ["decoder", "layers"]:
        return 1, 0  # after all layers
    item = next((ITEMS.index(part) for part in reversed(parts) if part in ITEMS), len(ITEMS))
    return 2, -int(parts[2]), -item


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


@dataclass(frozen=True)
class Compared:
    """One step of one rank."""

    counts: Counter[str]
    size_bytes: int
    differences: Sequence[Difference]
    """Earliest first."""


def in_all(compared: Iterable[Compared]) -> tuple[Counter[str], int]:
    """Sums of counts and of bytes."""
    return sum((one.counts for one in compared), Counter[str]()), sum(one.size_bytes for one in compared)


class Check:
    """`head_in_pieces`: the gradient of the head's weight need only be near stock's."""

    def __init__(self, steps: int, against: str, *, head_in_pieces: bool = False) -> None:
        self._left = steps
        self._against = against
        self._head_in_pieces = head_in_pieces
        self._compared: list[Compared] = []
        self._near: dict[str, float] = {}
        """Tolerances of gradients that need not be equal in every bit, by name."""
        self.steps = 0

    def around(self, schedule: Schedule, optimizer: Any, installation: Installation) -> Schedule:
        if self.over:
            return schedule
        self._left -= 1

        def forward_backward(*, model: Any, data_iterator: Any, **arguments: Any) -> Any:
            return self._run(Step(schedule, model, data_iterator, arguments, optimizer, installation))

        return first_call(forward_backward, schedule)

    def _run(self, step: Step) -> Any:
        with enough_memory(self.steps + 1, IN_WORDS[self._against]):
            reference = step.stock(self._against)
        with enough_memory(self.steps + 1, "the plan"):
            losses = step.planned()
        self._settle(step, reference, Outcome.of(losses, step.run.chunks))
        return losses

    def _settle(self, step: Step, reference: Outcome, planned: Outcome) -> None:
        """Compare the two passes: returns on all ranks, or exits on all of them."""
        setting = self._against
        near = head_tolerances(step.run.chunks) if self._head_in_pieces else {}
        counts = Counter(parameters=len(reference.gradients), losses=len(reference.losses))
        differing = step.differences(reference, planned, (IN_WORDS[setting], "the plan"), near)
        ranks = of_all_ranks((Compared(counts, reference.size_bytes, differing), near))
        self._compared = [compared for compared, _ in ranks]
        self._near = {name: tolerance for _, near in ranks for name, tolerance in near.items()}
        self.steps += 1
        if not (found := [difference for rank in self._compared for difference in rank.differences]):
            return
        with enough_memory(self.steps, IN_WORDS[setting]):
            again = step.stock(setting)
        repeated = step.differences(reference, again, ("the first run", "the second"))
        if restless := [difference for rank in of_all_ranks(repeated[:1]) for difference in rank]:
            agree(not_repeatable(self.steps, setting, min(restless)))
        agree(plan_differs(self.steps, setting, min(found), len(found), head_in_pieces=self._head_in_pieces))

    def summary(self) -> str | None:
        if not self._compared:
            return None
        counts, size_bytes = in_all(self._compared)
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        where = "" if len(self._compared) == 1 else f" on {len(self._compared)} ranks"
        return (
            f"checked {steps} against {IN_WORDS[self._against]}: in each, {counts['losses']} losses and the gradients of "
            f"{counts['parameters']} parameters ({format_bytes(size_bytes)}{where}) are equal in every bit{self._but_for()}"
        )

    def _but_for(self) -> str:
        if not self._near:
            return ""
        names, loosest = " and ".join(self._near), max(self._near.values())
        return f", but for {names}: within {loosest:.1g} of its largest value, as the plan's head is in pieces"

    @property
    def over(self) -> bool:
        return self._left == 0


def first_call(checked: Schedule, schedule: Schedule) -> Schedule:
    """`checked` in its first call, then `schedule`: later calls in a step (reruns of Megatron's) are not checked."""
    calls = iter([checked])
    return lambda **arguments: next(calls, schedule)(**arguments)


IN_WORDS = {"none": "stock without recomputation", "full": "stock with full recomputation"}


@contextmanager
def stock(setting: str, chunks: Sequence[Module]) -> Iterator[None]:
    """Run with Megatron's own settings inside: its layers read them at each call. Megatron's timers are off."""
    settings: dict[str, Any] = {"timers": None}
    if setting == "full":
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "distribute_saved_activations": False,
        }
    configs = {id(module.config): module.config for chunk in chunks for module in chunk.modules() if hasattr(module, "config")}
    before = [(one, name, getattr(one, name)) for one in configs.values() for name in settings if hasattr(one, name)]
    try:
        for config, name, _ in before:
            setattr(config, name, settings[name])
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


Schedule = Callable[..., Any]
"""Megatron's `forward_backward_func`, called with keywords."""


@dataclass
class Step:
    """A step that runs several times. The pass from which training continues runs last."""

    schedule: Schedule
    model: Any
    data_iterator: Any
    arguments: dict[str, Any]
    optimizer: Any
    installation: Installation
    fresh: bool = True
    """Whether no pass has run."""

    def __post_init__(self) -> None:
        run = live_run(self.model)
        assert isinstance(run, LiveRun)  # the plan is installed for it
        self.run, self.state, self.iterators = run, TrainingState(run.chunks), DataIterators(self.data_iterator)

    def planned(self) -> Any:
        trace = self.installation.engine.trace
        with self._once_more():
            if trace.runs:
                trace.start()  # drops the spans of the other passes
            return self._pass()

    def stock(self, setting: str) -> Outcome:
        with self._once_more(), self.installation.lifted(), stock(setting, self.run.chunks):
            return Outcome.of(self._pass(), self.run.chunks).on_host()

    def differences(
        self, one: Outcome, other: Outcome, names: tuple[str, str], tolerances: Mapping[str, float] = MappingProxyType({})
    ) -> list[Difference]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return differences(one, other, rank=rank, stage=self.run.stage, names=names, tolerances=tolerances)

    def _pass(self) -> Any:
        return self.schedule(model=self.model, data_iterator=self.iterators.stand_in, **self.arguments)

    @contextmanager
    def _once_more(self) -> Iterator[None]:
        """Restore the state in which Megatron called its schedule: gradients zero, nothing read."""
        if not self.fresh:
            self.state.restore()
            self.iterators.again()
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            torch.cuda.empty_cache()  # blocks of one pass would fragment the memory of the next
        self.fresh = False
        yield


IN_FP32 = 2.0**-16
"""For sums in fp32 (24 bits) in another order."""
IN_16_BITS = 2.0**-7
"""For sums rounded to 8 bits once a micro-batch, in stock and under the plan."""
ADDED_IN_16_BITS = 2.0**-4
"""For gradients accumulated in 16 bits: each sum is rounded, once a micro-batch in stock, once a piece under the plan."""


def head_tolerances(chunks: Sequence[Module]) -> dict[str, float]:
    weights = {id(weight) for chunk in chunks for weight in _head_weights(chunk)}
    return {name: tolerance_of(chunks[0], parameter) for name, parameter in named_parameters(chunks) if id(parameter) in weights}


def tolerance_of(chunk: Module, weight: Parameter) -> float:
    """As a fraction of the largest value of the weight's gradient."""
    gradient, fused = gradient_of(weight), chunk.config.gradient_accumulation_fusion  # type: ignore[union-attr]
    if gradient is not None and gradient.element_size() < 4 and hasattr(weight, "main_grad"):
        return ADDED_IN_16_BITS
    return IN_FP32 if fused or weight.element_size() == 4 else IN_16_BITS


def _head_weights(chunk: Module) -> Iterator[Parameter]:
    tied = chunk.share_embeddings_and_output_weights
    if getattr(chunk, "post_process", False):
        yield chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight  # type: ignore[operator,union-attr,misc]
    if tied and getattr(chunk, "pre_process", False):
        yield chunk.embedding.word_embeddings.weight  # type: ignore[union-attr,misc]


IN_PIECES = "its head is in pieces, whose GEMMs have fewer rows, and a device may compute these otherwise"
"""Why a correct plan may differ from stock on a GPU, which chooses a kernel by the shape of a GEMM."""


def plan_differs(step: int, setting: str, first: Difference, count: int, *, head_in_pieces: bool = False) -> LynxError:
    places = "one place" if count == 1 else f"{count} places, the first of them here"
    todo = "train without this plan, and report it with the plan and this launch's arguments"
    if head_in_pieces:
        todo = f"{IN_PIECES}: check --lynx-check frames, or a plan whose head is whole; else {todo}"
    problem = Problem(first.place, first.values, "the same bits", todo)
    return LynxError(f"--lynx-check: in step {step} the plan and {IN_WORDS[setting]} differ in {places}", [problem])


def frames_differ(first: Difference, count: int, compared: int) -> LynxError:
    todo = "train without this plan, and report it with the plan and this launch's arguments"
    problem = Problem(first.place, first.values, "the same bits", todo)
    headline = f"--lynx-check frames: {count} of {compared} tensors of backward are not what forward saved; the first of them"
    return LynxError(headline, [problem])


DETERMINISTIC = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""What `--deterministic-mode` of Megatron 0.19 sets in the environment; before 0.19 the user has to."""


def not_repeatable(step: int, setting: str, first: Difference) -> LynxError:
    wanted = ", ".join(f"{name}={value} (here {os.environ.get(name, 'not set')})" for name, value in DETERMINISTIC.items())
    todo = f"launch with --deterministic-mode, without flash attention and --cross-entropy-loss-fusion, and set {wanted}"
    problem = Problem(first.place, first.values, "the same bits: nothing can be compared with what differs from itself", todo)
    return LynxError(f"--lynx-check: in step {step} {IN_WORDS[setting]} differs from itself when it runs twice", [problem])


INSTEAD = {
    IN_WORDS["none"]: "give --lynx-check-against full: its bits are the same",
    IN_WORDS["full"]: "check with fewer layers or shorter sequences",
}
WITHOUT_CHECK = "launch without --lynx-check; where that runs out of memory, too, make a plan for less memory"


@contextmanager
def enough_memory(step: int, what: str) -> Iterator[None]:
    """Raise our error if the block runs out of device memory. `what`: the block in words."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        figures = str(error).partition("\n")[0].partition(" Including ")[0].removeprefix("CUDA out of memory. ").rstrip(".")
        reason = f"{what} ran out of device memory in step {step} ({figures})"
        problem = Problem("--lynx-check", reason, "", INSTEAD.get(what, WITHOUT_CHECK))
        raise LynxError("the plan cannot be checked like this", [problem]) from None
