"""Yuan et al. (USENIX ATC '24): memory at every offload ratio, the smallest ratio of every run, utilisation from throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lynx.config import Job
from megatron_lynx.cost.flops import mfu
from megatron_lynx.cost.stage_memory import stage_memory
from megatron_lynx.published.jobs import catalogued_job
from megatron_lynx.published.row import Row
from megatron_lynx.solver.offload import smallest_ratio

SOURCE = "Yuan et al., ATC '24"
POLICIES = {"no": "none", "ours": "balanced", "full": "full"}
"""Their `ckpt`, in our words."""
CLUSTERS = {"A800": "a800-80g", "H800": "h800-80g"}


def rows(figures: Mapping[str, Any]) -> Iterator[Row]:
    """`figures`: their part of the file."""
    yield from _memory(figures["figure7_max_memory_allocated_bytes"])
    yield from _offload_ratios(figures["figure9"])
    yield from _utilisation(figures["demo_7b"])


def job_of(run: Mapping[str, Any], cluster: str = "h800-80g", **fields: Any) -> Job:
    """A run as they state it: `model`, `seq`, `n_gpus`, `B` and the layout's letters."""
    layout = {"tensor": run["t"], "context": run["c"], "pipeline": run["p"], "layers_per_chunk": run["l"]}
    return catalogued_job(
        run["model"].lower(),
        cluster,
        seq=run["seq"],
        gpus=run["n_gpus"],
        parallel={**layout, "sequence_parallel": run["t"] > 1, "distributed_optimizer": True},
        batch={"micro": 1, "global": run["B"]},
        policy=POLICIES[run["ckpt"]],
        **fields,
    )


def _memory(figure: Mapping[str, Any]) -> Iterator[Row]:
    job = job_of({**figure["config"], "ckpt": "ours"})
    for ratio, published in figure["ckpt_ours"].items():
        computed = max(stage_memory(job, stage, float(ratio)).total for stage in range(job.parallel.pipeline))
        yield Row(SOURCE, f"figure 7: memory, offload ratio {ratio}", published, computed, "B", bound=1.5)


def _offload_ratios(runs: list[Mapping[str, Any]]) -> Iterator[Row]:
    for run in runs:
        layout = f"t{run['t']} p{run['p']} l{run['l']}, {run['ckpt']}"
        what = f"figure 9: offload ratio, {run['model']} on {run['n_gpus']} GPUs ({layout})"
        yield Row(SOURCE, what, run["alpha"], smallest_ratio(job_of(run)), "", bound=0.01, error_in="unit")


def _utilisation(demo: Mapping[str, Any]) -> Iterator[Row]:
    config = {**demo["config"], "model": "Llama-7B", "n_gpus": demo["config"]["gpus"]}
    for run in demo["rows"]:
        for name, cluster in CLUSTERS.items():
            if name in run:
                job = job_of({**config, "ckpt": run["ckpt"]}, cluster)
                computed = 100 * mfu(job.model, run[name]["tok_s_gpu"], _peak(job))
                what = f"demo: MFU of {run['method']}, Llama-7B on {name}, from its tokens/s"
                yield Row(SOURCE, what, run[name]["mfu"], computed, "points", bound=0.1, error_in="unit")


def _peak(job: Job) -> float:
    assert job.cluster.matmul is not None, "catalogued GPU clusters have one"
    return job.cluster.matmul.peak_flop_per_s(job.model.dtype)
