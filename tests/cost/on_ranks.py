"""What a plan really recomputes and holds, on a rank. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan


@dataclass
class Counted:
    """One step."""

    flops: int
    resident_bytes: int
    frames: int
    """Halves that were recomputed."""
    hidden: int
    """Those of them that were recomputed in a window."""
    state_bytes: int
    """One random state."""


def count(rank: int, job: Job, plans: list[Plan | None]) -> list[Counted]:
    """One counted step under each plan, after a warm-up (None: stock)."""
    from megatron_lynx.measure.memory import remember_blocks
    from tests.instruments.groups import initialise

    initialise(job)
    remember_blocks()
    forget_auxiliary_losses()
    return [_count(job, plan) for plan in plans]


def forget_auxiliary_losses() -> None:
    """Those of routers, which Megatron keeps in a tensor of as many layers as the first model in this process had."""
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    get_moe_layer_wise_logging_tracker().clear()


def _count(job: Job, plan: Plan | None) -> Counted:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_lynx.apply.installation import install
    from megatron_lynx.figures import Figures
    from megatron_lynx.measure.memory import count_step, marked
    from megatron_lynx.testbed.training import forward_step, run_schedule, synthetic_batches
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    training = Training(job, build_model(job), optimizer=None)
    installation = install(training.chunks, plan) if plan is not None else None
    batches = synthetic_batches(job)
    training.step(batches)
    if installation is not None:
        installation.engine.take_counts()
    with FlopCounterMode(display=False) as counter:
        training.step(batches)
    counts = installation.engine.take_counts() if installation is not None else Figures()

    def step(meter):
        run_schedule(training.chunks, job, batches, forward_step_func=marked(forward_step, meter, "forward"))

    resident = count_step(step, "cpu", training.parameters().values()).resident_bytes
    if installation is not None:
        installation.remove()
    return Counted(counter.get_total_flops(), resident, counts.recomputed, counts.in_windows, torch.get_rng_state().nbytes)


def parameters_of_experts(rank: int, job: Job) -> tuple[int, int, int]:
    """Numbers of all parameters of this rank, of its experts, and those that its distributed optimizer steps."""
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    training = Training(job, build_model(job), ddp=True, optimizer="megatron")
    sizes = {name: parameter.numel() for name, parameter in training.parameters().items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    groups = [group for optimizer in training.optimizer.chained_optimizers for group in optimizer.param_groups]
    return sum(sizes.values()), experts, sum(each.numel() for group in groups for each in group["params"])


def matrices_of_muon(rank: int, job: Job, sharers: list[int]) -> tuple[int, list[tuple[int, int]]]:
    """Numbers of the parameters that Megatron's layer-wise optimizer updates; for each number of ranks those of the fullest one
    and those of the buffer."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as LayerWise
    from megatron.core.optimizer.layer_wise_optimizer import is_managed_by_layer_wise_optimizer

    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model

    initialise(job)
    parameters = [parameter for chunk in build_model(job) for parameter in chunk.parameters()]
    own = [parameter for parameter in parameters if is_managed_by_layer_wise_optimizer(parameter)]
    found, config = [], DistributedDataParallelConfig(use_distributed_optimizer=True)
    for ranks in sharers:
        layout = LayerWise._compute_per_buffer_param_layout(own, None, ranks, config)
        ((begin, end),) = layout.bucket_indices
        shares = [0] * ranks
        for first, last, _ in layout.param_index_map.values():
            shares[first * ranks // (end - begin)] += last - first
        found.append((max(shares), end - begin))
    return sum(parameter.numel() for parameter in own), found
