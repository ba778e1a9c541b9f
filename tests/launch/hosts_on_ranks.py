"""What the tests of hosts run on ranks: several launches in one process. Their frameworks are as much of the real ones as
launches hook, and train the real megatron-core. (`make bridge` does the same with Megatron-LM's and Megatron-Bridge's own.)"""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megatron_lynx.config.job import Job

from ..apply.on_ranks import Attributes, trained

NAMES = {
    "tensor_model_parallel_size": "parallel.tensor",
    "context_parallel_size": "parallel.context",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "sequence_parallel": "parallel.sequence_parallel",
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "ffn_hidden_size": "model.ffn",
    "num_attention_heads": "model.heads",
    "seq_length": "model.seq",
    "micro_batch_size": "batch.micro",
}
"""Where a job has what a launch asks of its framework."""


def one_after_the_other(rank: int, job: Job, plans: list[str], folder: str) -> list[dict[str, Any]]:
    """Of each launch: whether it trained as stock did, what of this process it left changed, and what it said."""
    from megatron_lynx.bridge import training_under
    from megatron_lynx.launch.script import read, run_script

    settings = {name: _within(job, place) for name, place in NAMES.items()}
    with _frameworks(settings, rank) as (megatron_lm, bridge):
        expected = _trained(job, megatron_lm.pretrain)
        script = Path(folder) / f"script_{rank}.py"
        script.write_text("from megatron.training import GIVEN, pretrain\n\npretrain(*GIVEN)\n")

        def launch(*given: Any) -> None:
            megatron_lm.GIVEN[:] = given
            run_script(*read([str(script), "--lynx-plan", plans[0]]))

        def under(plan: str) -> Any:
            def pretrain(*given: Any) -> None:
                with training_under(plan):
                    bridge.pretrain(*given)

            return pretrain

        return [_compared(job, how, expected) for how in (launch, under(plans[1]), under(plans[0]))]


def _compared(job: Job, how: Any, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    said = io.StringIO()
    others = _ours()  # of tests that had these ranks before
    before, words, folders = Attributes(), list(sys.argv), list(sys.path)
    with redirect_stderr(said):
        found = _trained(job, how)
    changed = [name for name in before.changed() if ".parallel_state." not in name]  # whose groups the model's job makes anew
    return {
        "differing": [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])],
        "changed": changed + ["sys"] * ((sys.argv, sys.path) != (words, folders)),
        "left": sum(not any(thing is other for other in others) for thing in _ours()),
        "said": said.getvalue(),
    }


def _ours() -> list[Any]:
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing).__name__ in ("Frame", "Launch", "Installation", "Engine")]


def _trained(job: Job, pretrain: Any) -> dict[str, torch.Tensor]:
    """Losses and gradients of two steps."""
    training, seen = trained(job), dict[str, torch.Tensor]()

    def step_ends(number: int, losses: list[torch.Tensor]) -> None:
        seen.update({f"{number}: loss {at}": loss.detach().clone() for at, loss in enumerate(losses)})
        seen.update({f"{number}: {name}": gradient for name, gradient in training.gradients().items()})

    pretrain(training, step_ends)
    return seen


@contextmanager
def _frameworks(settings: dict[str, Any], rank: int) -> Iterator[tuple[Any, Any]]:
    """The modules `megatron.training` and `megatron.bridge.training`, with the functions that launches hook."""
    args = SimpleNamespace(**settings, rank=rank, curr_iteration=0)
    cfg = SimpleNamespace(model=SimpleNamespace(**settings), logger=SimpleNamespace(log_interval=1))
    names = [f"megatron.training{name}" for name in ("", ".arguments", ".initialize", ".global_vars", ".training")]
    names += [f"megatron.bridge{name}" for name in ("", ".training", ".training.setup", ".training.pretrain", ".training.train")]
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name in names:
        parent, _, last = name.rpartition(".")
        if parent in made:
            setattr(made[parent], last, made[name])
    lm, setup, loop, step = (
        made["megatron.training"],
        *(made[f"megatron.bridge.training.{name}"] for name in ("setup", "pretrain", "train")),
    )
    lm.GIVEN = []
    lm.arguments.add_megatron_arguments = lambda parser: parser
    lm.initialize._initialize_distributed = lambda: None
    lm.global_vars.get_args = lambda: args
    lm.global_vars.get_tensorboard_writer = lm.global_vars.get_wandb_writer = lambda: None
    setup.initialize_megatron = lambda cfg: None
    lm.training.train_step = step.train_step = _train_step

    def train_lm(forward_step_func: Any, model: Any, optimizer: Any, training: Any, step_ends: Any) -> None:
        _loop(lm.training, training, optimizer, step_ends)

    def train_bridge(model: Any, optimizer: Any, global_state: Any, training: Any, step_ends: Any) -> None:
        _loop(step, training, optimizer, step_ends)

    def pretrain_lm(training: Any, step_ends: Any) -> None:
        lm.initialize._initialize_distributed()
        lm.training.train(None, training.chunks, training.optimizer, training, step_ends)

    def pretrain_bridge(training: Any, step_ends: Any) -> None:
        setup.initialize_megatron(cfg=cfg)
        counted = SimpleNamespace(train_state=SimpleNamespace(step=0), tensorboard_logger=None, wandb_logger=None)
        loop.train(training.chunks, training.optimizer, counted, training, step_ends)

    lm.training.train, loop.train, lm.pretrain, made["megatron.bridge.training"].pretrain = (
        *(train_lm, train_bridge),
        *(pretrain_lm, pretrain_bridge),
    )
    with patch.dict(sys.modules, made):
        yield lm, made["megatron.bridge.training"]


def _loop(module: Any, training: Any, optimizer: Any, step_ends: Any) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for number in range(2):
        step_ends(number, module.train_step(get_forward_backward_func(), optimizer, training, number))


def _train_step(forward_backward_func: Any, optimizer: Any, training: Any, number: int) -> Any:
    from megatron_lynx.testbed.training import synthetic_batches

    return training.step(synthetic_batches(training.job, number))


def _within(job: Job, place: str) -> Any:
    found: Any = job
    for name in place.split("."):
        found = getattr(found, name)
    return found
