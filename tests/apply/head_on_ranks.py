"""What the tests of a head in pieces run on ranks. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.errors import LynxError
from megatron_lynx.plan.plan import Plan
from tests.cost.moments_on_ranks import exchange_nothing
from tests.transparency.trials import live_bytes


@dataclass(frozen=True)
class How:
    """How a step is run; everything has the usual value."""

    model: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig."""
    ddp: bool = False
    masked: bool = False
    """Whether a third of the tokens has no loss, and others count more than once."""
    evaluated: bool = False
    """Whether a forward without gradients is compared, not a step."""


@dataclass(frozen=True)
class Compared:
    """A step under a plan beside stock's, from the same weights."""

    losses: int
    """How many there are; they are compared token by token."""
    differing: dict[str, float]
    """Losses and gradients that are not equal in every bit: the largest difference over the largest value of stock's."""
    compared: int
    largest_logits: tuple[int, int]
    """The most rows x vocabulary that any loss was given, of stock and under the plan."""
    left_bytes: int
    """How much more is alive behind the planned step than behind stock's."""


@dataclass
class _Seen:
    tensors: dict[str, torch.Tensor]
    logits: int
    live_bytes: int


def compare(rank: int, job: Job, plan: Plan, how: How) -> Compared:
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.fusions import stand_in_for_fused_gradient
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    with ExitStack() as stack:
        stack.enter_context(stand_in_for_fused_gradient())
        training = Training(job, build_model(job, **how.model), optimizer=None, ddp=how.ddp)
        seen = []
        for planned in (False, False, True):  # the first one makes what stays
            seed_random_numbers(7)
            with ExitStack() as installed:
                if planned:
                    installed.enter_context(install(training.chunks, plan))
                seen.append(_step(training, how))
                seen[-1].live_bytes -= sum(tensor.nbytes for one in seen for tensor in one.tensors.values())
    _, stock, ours = seen
    differing = {}
    assert stock.tensors.keys() == ours.tensors.keys()
    for name, tensor in stock.tensors.items():
        other = ours.tensors[name]
        if not torch.equal(tensor, other):
            differing[name] = float((tensor.double() - other.double()).abs().max() / tensor.double().abs().max())
    losses = sum(name.startswith("loss") for name in stock.tensors)
    most = stock.logits, ours.logits
    return Compared(losses, differing, len(stock.tensors), most, ours.live_bytes - stock.live_bytes)


def _step(training: Any, how: How) -> _Seen:
    from megatron_lynx.testbed.training import run_schedule, synthetic_batches

    losses: list[torch.Tensor] = []

    def forward_step(batches: Any, model: Any) -> Any:
        batch = next(batches)
        output = model(batch.tokens, batch.position_ids, None, labels=batch.labels)

        def loss_func(losses_BS: torch.Tensor) -> Any:
            losses.append(losses_BS.detach().clone())
            mask = _mask(losses_BS) if how.masked else torch.ones_like(losses_BS)
            total = (losses_BS.float() * mask).sum()
            if how.model.get("calculate_per_token_loss"):
                return total, mask.sum().int(), {"loss": total.detach()}
            return total / mask.sum(), {"loss": total.detach()}

        return output, loss_func

    for chunk in training.chunks:
        if how.ddp:
            chunk.zero_grad_buffer()
        chunk.zero_grad(set_to_none=True)
    with _sizes_of_logits() as sizes:
        batches = synthetic_batches(training.job)
        run_schedule(training.chunks, training.job, batches, forward_only=how.evaluated, forward_step_func=forward_step)
    gradients = {} if how.evaluated else training.gradients()
    tensors = {f"loss {number}": loss for number, loss in enumerate(losses)} | gradients
    exchange_nothing()
    gc.collect()
    return _Seen(tensors, max(sizes, default=0), live_bytes())


def _mask(losses_BS: torch.Tensor) -> torch.Tensor:
    """0, 1 and 2 in turn."""
    return (torch.arange(losses_BS.numel()) % 3).view_as(losses_BS).to(losses_BS)


# --- refusals ------------------------------------------------------------------------------------------------------------


def refused(
    rank: int,
    job: Job,
    plan: Plan,
    spoil: Callable[[Any], None],
    called: dict[str, Any] | None = None,
    later: Callable[[Any], None] | None = None,
) -> list[str]:
    """Places and advice of what `install` says to a spoilt model, or the first call of it, if `called` with these. `later`: what
    spoils it under the plan."""
    from megatron_lynx.apply.installation import install
    from tests.apply.on_ranks import Attributes, trained

    training = trained(job)
    spoil(training.chunks[-1])
    attributes = Attributes(training.chunks[-1])
    try:
        with install(training.chunks, plan):
            if later is not None:
                later(training.chunks[-1])
            if called is not None:
                tokens = torch.zeros(job.batch.micro, job.model.seq, dtype=torch.int64)
                training.chunks[-1](tokens, tokens, None, labels=tokens, **called)
    except LynxError as error:
        assert attributes.changed() == []
        return [f"{problem.where}: {problem.todo}" for problem in error.problems]
    return []


def logits_without_labels(rank: int, job: Job, plan: Plan) -> bool:
    """Whether a call without labels returns what stock's does."""
    from megatron_lynx.apply.installation import install
    from tests.apply.on_ranks import trained

    training = trained(job)
    tokens = torch.zeros(job.batch.micro, job.model.seq, dtype=torch.int64)
    (chunk,) = training.chunks
    chunk.eval()
    with torch.no_grad():
        stock = chunk(tokens, tokens, None)
        with install(training.chunks, plan):
            return torch.equal(stock, chunk(tokens, tokens, None))


def warnings_of_whole_logits(rank: int, job: Job, plan: Plan) -> list[str]:
    """Warnings of two calls without labels and one that is trained in pieces."""
    from unittest.mock import patch

    from megatron_lynx.apply.hooks import head_in_pieces
    from megatron_lynx.apply.installation import install
    from tests.apply.on_ranks import trained

    training = trained(job)
    tokens = torch.zeros(job.batch.micro, job.model.seq, dtype=torch.int64)
    (chunk,) = training.chunks
    with install(training.chunks, plan), patch.object(head_in_pieces.log, "warning") as warning:
        with head_in_pieces.LogitsInPieces(chunk, 2):
            chunk(tokens, tokens, None)
        in_pieces = warning.call_count
        for _ in range(2):
            chunk(tokens, tokens, None)
        return [str(in_pieces), *(call.args[0] for call in warning.call_args_list)]


def scaled(chunk: Any) -> None:
    chunk.config.use_mup = True


def of_another_class(chunk: Any) -> None:
    """A head of the kind that owners of models add: a loss of their own."""

    class Distilled(type(chunk)):
        def compute_language_model_loss(self, labels: Any, logits: Any) -> Any:
            return logits.float().logsumexp(-1).square().transpose(0, 1)

    chunk.__class__ = Distilled


def read(chunk: Any) -> None:
    """A hook of the kind that `--logits-load-dir` puts on the projection, for a second loss of logits."""
    chunk.output_layer.register_forward_hook(_capture_logits)


def _capture_logits(module: Any, inputs: Any, output: Any) -> None:
    raise AssertionError("it would be shown no logits")


def replaced(chunk: Any) -> None:
    """What `--logits-save-dir` does with the loss, on the object itself."""

    def compute_zero_loss(labels: Any, logits: Any) -> Any:
        return (logits * 0).sum(dim=-1).transpose(0, 1)

    chunk.compute_language_model_loss = compute_zero_loss


def unfit(chunk: Any) -> None:
    chunk.config.defer_embedding_wgrad_compute = True
    chunk.config.enable_autocast = True
    chunk.config.config_logger_dir = "logs"
    chunk.output_layer.gather_output = True
    chunk.output_layer.output_dtype = torch.float32
    chunk.output_layer.bias = torch.nn.Parameter(torch.zeros(1))
    chunk.output_layer.weight.requires_grad = False


def nothing(chunk: Any) -> None:
    pass


# --- functions of a frontend on logits -----------------------------------------------------------------------------------


def log_probabilities(logits: torch.Tensor, label: torch.Tensor, temperature: torch.Tensor) -> dict[str, torch.Tensor]:
    """What verl computes of logits in fp32, with Megatron's own loss. Changes both arguments in place, as verl does."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    assert logits.dtype == torch.float32
    assert logits.shape[:2] == label.shape[:2]
    temperature[temperature < 0.6] = 0.6
    logits.div_(temperature.unsqueeze(-1))
    entropy = _entropy(logits.clone())
    return {"entropy": entropy, "log_probs": -vocab_parallel_cross_entropy(logits, label)}


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    largest = logits.detach().amax(-1, keepdim=True)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, get_tensor_model_parallel_group())
    exponentials = (logits - largest).exp()
    total = reduce_from_tensor_model_parallel_region(exponentials.sum(-1, keepdim=True))
    mean = reduce_from_tensor_model_parallel_region((exponentials / total * logits).sum(-1, keepdim=True))
    return (largest + total.log() - mean).squeeze(-1)


def compare_log_probabilities(rank: int, job: Job, pieces: int, run: Callable[..., dict[str, torch.Tensor]]) -> Compared:
    """`run(model, pieces, tokens, label, temperature)`: values of all tokens; with `pieces` None as the frontend has them."""
    from megatron_lynx.apply.live_run import unwrapped
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model

    initialise(job)
    seed_random_numbers(7)
    (model,) = build_model(job)
    chunk = unwrapped(model)[1]
    tokens = torch.randint(0, job.model.vocab, (job.batch.micro, job.model.seq))
    weights = torch.rand(2, *tokens.shape)
    seen, sizes = [], []
    for given in (None, pieces):
        seed_random_numbers(7)
        chunk.zero_grad(set_to_none=True)
        temperature = torch.linspace(0.5, 1.2, job.model.seq).expand_as(tokens).clone()
        with _sizes_of_logits() as calls:
            values = run(model, given, tokens, tokens.roll(-1, 1), temperature)
            (weights * torch.stack([values["log_probs"], values["entropy"]])).sum().backward()
        sizes.append(max(calls))
        tensors = {name: parameter.grad for name, parameter in chunk.named_parameters() if parameter.grad is not None}
        seen.append({**{f"loss of {name}": value.detach() for name, value in values.items()}, **tensors})
    stock, ours = seen
    assert stock.keys() == ours.keys()
    assert "forward" not in vars(chunk.output_layer), "what was there before is there again"
    scale = {name: float((tensor - ours[name]).abs().max() / tensor.abs().max()) for name, tensor in stock.items()}
    differing = {name: scale[name] for name, tensor in stock.items() if not torch.equal(tensor, ours[name])}
    return Compared(2, differing, len(stock), (sizes[0], sizes[1]), 0)


@contextmanager
def _sizes_of_logits() -> Iterator[list[int]]:
    """Elements of the logits of every call of Megatron's loss."""
    from megatron.core.tensor_parallel import cross_entropy

    sizes: list[int] = []
    original = cross_entropy._VocabParallelCrossEntropy.apply

    def counted(logits: Any, *others: Any) -> Any:
        sizes.append(logits.numel())
        return original(logits, *others)

    cross_entropy._VocabParallelCrossEntropy.apply = counted
    try:
        yield sizes
    finally:
        del cross_entropy._VocabParallelCrossEntropy.apply


def positions_of(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def as_verl_runs(model: Any, pieces: int | None, tokens: Any, label: Any, temperature: Any) -> dict[str, torch.Tensor]:
    """With the function of docs/launching.md around a forward that is called as verl's is."""
    from tests.apply.library_on_ranks import PAGE, block_of

    def forward(model: Any, tokens: Any, *, logits_processor: Any, logits_processor_args: Any) -> Any:
        return logits_processor(model(tokens, positions_of(tokens), None), **logits_processor_args)

    forward = forward if pieces is None else block_of(PAGE, 5)["in_pieces"](forward, pieces)
    arguments = {"label": label, "temperature": temperature}
    return forward(model, tokens, logits_processor=log_probabilities, logits_processor_args=arguments)


def as_slime_runs(model: Any, pieces: int | None, tokens: Any, label: Any, temperature: Any) -> dict[str, torch.Tensor]:
    """With the function of docs/launching.md on a module that computes as slime's does: one temperature, rows in a line."""
    from types import SimpleNamespace

    from tests.apply.library_on_ranks import PAGE, block_of

    def calculate(logits: Any, tokens: Any, tp_group: Any, *, with_entropy: bool) -> Any:
        assert with_entropy
        values = log_probabilities(logits[None].clone(), tokens[None], torch.ones(1, len(tokens)))
        return values["log_probs"][0][:, None], values["entropy"][0]

    losses, args = SimpleNamespace(calculate_log_probs_and_entropy=calculate), SimpleNamespace(rollout_temperature=0.9)
    heads = [] if pieces is None else [block_of(PAGE, 6)["in_pieces"](losses, args, model, pieces)]
    logits = model(tokens, positions_of(tokens), None)
    rows = logits.squeeze(0) / args.rollout_temperature
    log_probs, entropy = losses.calculate_log_probs_and_entropy(rows, label[0], None, with_entropy=True)
    for head in heads:
        head.remove()
    return {"log_probs": log_probs[:, 0][None], "entropy": entropy[None]}
