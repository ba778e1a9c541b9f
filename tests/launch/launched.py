"""Launches for tests: torchrun, a script, and what it printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lynx.anatomy import Facts, sections_of
from megatron_lynx.plan import save_plan
from megatron_lynx.plan.plan import Plan
from tests.hurry import skip_in_a_hurry
from tests.nursery.process import OF_LAUNCHES, start, with_megatron
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

ROOT = Path(__file__).parents[2]
ITERATION = re.compile(r" iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+) ")
GLUED = re.compile(r"(?<=[^\n ])(?= ?\[\d{4}-\d\d-\d\d \d\d:)|(?<=\|)(?=megatron-lynx: )")
"""Where a line of one rank may have begun behind another's: Megatron writes a line and its end apart."""

LONGEST_S = 240

FOUR_RANKS = {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "microbatches": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {"microbatches": 4},
    "pipeline 2": {"pipeline": 2, "microbatches": 4, "dtype": "bf16"},
    "expert 2": {"replicas": 2, "microbatches": 2},
    "tensor 2": {"tensor": 2, "microbatches": 4},
    "pipeline 4": {"pipeline": 4, "microbatches": 4},
    "pipeline 2, two chunks on each stage": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
    "context 2 x pipeline 2": {"context": 2, "context_exchange": "all_gather", "pipeline": 2, "microbatches": 4},
    "tensor 2, sequence parallel": {"tensor": 2, "sequence_parallel": True, "microbatches": 4},
    "tensor 2 x pipeline 2, sequence parallel": FOUR_RANKS,
    "tensor 2 x pipeline 2, sequence parallel, two chunks on each stage": {**FOUR_RANKS, "layers_per_chunk": 1},
}
SIZE = {"hidden": 64, "ffn": 256, "seq": 64, "vocab": 256}

MODEL = shlex.split(
    """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --attention-dropout 0.1 --hidden-dropout 0.1 --vocab-size 255 --tokenizer-type NullTokenizer
    --micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 10
    --split 100,0,0 --eval-iters 0 --eval-interval 100 --log-interval 1 --num-workers 0
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization
    --no-persist-layer-norm --no-gradient-accumulation-fusion
    """
)
TE = ["--transformer-impl", "transformer_engine", "--attention-backend", "unfused"]
"""Behind `MODEL`: Transformer Engine's layers instead of local ones."""

EXPERTS = shlex.split(
    """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-layer-freq ([0]+[1]*3)
    --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --no-bias-gelu-fusion
    """
)
"""Behind `MODEL`: a mixture of experts in all layers but the first, shared out over pairs of ranks."""
GROUPED = [*EXPERTS, "--moe-grouped-gemm", "--no-bias-dropout-fusion"]
"""The same in one grouped GEMM of Transformer Engine's, behind `TE`."""
WITH_EXPERTS = {"experts": {"count": 4, "per_token": 2, "ffn": 128, "layers": ("2-4",)}, "expert": 2, "expert_tensor": 1}
"""The same in a job."""

LATENT = shlex.split(
    """
    --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12
    --qk-layernorm --position-embedding-type rope --mtp-num-layers 1
    """
)
"""Behind `TE`: a layer that predicts one more token, and latent attention with its fused rotary kernel, which
Megatron builds of Transformer Engine's layers alone."""
WITH_LATENT = {
    "mtp": 1,
    "latent": {"q_rank": 24, "kv_rank": 16, "head_size": 16, "rope_size": 8, "value_head_size": 12, "fused_rotary": True},
    "qk_norm": True,
    "position": "rope",
}
"""The same in a job."""


@dataclass(frozen=True)
class Launched:
    """What became of one launch."""

    status: int
    text: str

    @property
    def iterations(self) -> list[tuple[str, ...]]:
        """(iteration, loss, gradient norm), each digit as printed."""
        return [match.groups() for match in ITERATION.finditer(self.text)]

    @property
    def ours(self) -> list[str]:
        """Lines that megatron-lynx printed, and the problems listed under them."""
        return [line for line in self.text.splitlines() if line.startswith(("megatron-lynx", "  - "))]


def launch(
    script: Path,
    arguments: Sequence[str | Path],
    *,
    ranks: int = 1,
    module: str = "tests.instruments",
    path: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    as_users_do: bool = False,
) -> Launched:
    """`torchrun -m MODULE SCRIPT ARGUMENTS`, on this machine; its processes import torch each for itself if `as_users_do`."""
    arguments = ["--standalone", f"--nproc-per-node={ranks}", "-m", module, str(script), *map(str, arguments)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *map(str, path), os.environ.get("PYTHONPATH")])),
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
    }
    skip_in_a_hurry()
    if module == "tests.instruments" and not as_users_do:
        environment[OF_LAUNCHES] = with_megatron(environment, "training")[0].removeprefix("\0")
    environment |= env or {}
    with tempfile.TemporaryFile("w+") as said:
        if as_users_do:
            command = [sys.executable, "-m", "torch.distributed.run", *arguments]
            started = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        else:
            started = start("tests.launch.torchrun", arguments, environment, said.fileno())
        try:
            status = started.wait(LONGEST_S)
        finally:
            started.kill()
        said.seek(0)
        return Launched(status, GLUED.sub("\n", said.read()))


def plan_of(
    layout: str,
    *,
    implementation: str = "local",
    schedule: str = "flush",
    experts: bool = False,
    latent: bool = False,
    overlapped: bool = False,
    userbuffers: bool = False,
    fp8: str | None = None,
    held: bool = False,
    **options: Any,
) -> Plan:
    """`overlapped`: with experts, exchanges beside another micro-batch's computing. `fp8`: the recipe of linears, whose weights
    may be `held` in FP8, too."""
    also: dict[str, Any] = {"userbuffers": userbuffers, **(WITH_EXPERTS if experts else {}), **(WITH_LATENT if latent else {})}
    if fp8:
        also |= {"fp8": {"recipe": fp8, "parameters": held}, "distributed_optimizer": held, "dtype": "bf16"}
    if overlapped:
        also |= {**WITH_EXPERTS, "experts": {**WITH_EXPERTS["experts"], "overlapped": True}, "dtype": "bf16"}
    job = tiny_job("gpt", **LAYOUTS[layout] | SIZE | also, implementation=implementation)
    return uniform_plan(job.model_copy(update={"schedule": schedule}), **options)


def inside_experts(plan: Plan) -> Plan:
    """The same plan, with everything of experts recomputed on demand, too."""
    attention, experts = sections_of(Facts(experts=True))
    return _with_experts(plan, lambda items: [*(item for item in items if item in attention.names), *experts.recomputable])


def keeping_rows(plan: Plan) -> Plan:
    """The same plan, but experts keep what they save for each row."""
    experts = sections_of(Facts(experts=True))[-1]
    return _with_experts(plan, lambda items: [item for item in items if item not in experts.on_rows])


def _with_experts(plan: Plan, recompute: Callable[[Sequence[str]], list[str]]) -> Plan:
    """The same plan with other items recomputed in layers of experts."""
    attention, experts = sections_of(Facts(experts=True))
    facts = plan.model_dump(mode="json")
    for stage, entry in zip(facts["stages"], plan.stages, strict=True):
        stage["rules"] = [entry.rule_for(layer).model_dump(mode="json") | {"layers": layer} for layer in entry.layers]
        for rule in stage["rules"]:
            if plan.model.has_experts(rule["layers"]):
                recomputed = recompute(rule["recompute"])
                kept = [item for item in attention.names + experts.names if item not in recomputed]
                rule |= {"recompute": recomputed, "keep": kept}
    return Plan.model_validate(facts)


def offloading(plan: Plan, size_bytes: int, pace: int | None = None, *, experts: bool = False) -> Plan:
    """The same plan, with so many bytes of every micro-batch and chunk on the host; with a pace of the last chunk, too.
    `experts`: what these keep as well."""
    facts = plan.model_dump(mode="json")
    for stage in facts["stages"]:
        stage["offload"] = {"bytes": size_bytes, "smallest_tensor_bytes": 1024, "pace_bytes": pace} | (
            {"experts": True} if experts else {}
        )
    return Plan.model_validate(facts)


def saved(plan: Plan, path: Path) -> Path:
    save_plan(plan, path)
    return path


def flags_of(layout: str) -> list[str]:
    """Megatron's flags of a layout."""
    facts = LAYOUTS[layout]
    flags = ["--tensor-model-parallel-size", str(facts.get("tensor", 1))]
    flags += ["--pipeline-model-parallel-size", str(facts.get("pipeline", 1))]
    if facts.get("sequence_parallel"):
        flags.append("--sequence-parallel")
    if context := facts.get("context"):
        flags += ["--context-parallel-size", str(context), "--cp-comm-type", facts["context_exchange"]]
    if layers := facts.get("layers_per_chunk"):
        flags += ["--num-layers-per-virtual-pipeline-stage", str(layers)]
    return flags
