"""The models that are trained, each as many layers as one GPU of 80 GB holds with everything kept; in a dry run tiny ones.

States are those of a launch: weights in bf16, gradients in fp32, Megatron's Adam with main weights and both moments in fp32,
18 bytes a parameter. The vocabulary is small (8192), so that layers are what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_lynx.config.job import Batch, Job
from megatron_lynx.config.loader import bundled_configs, load_cluster
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.testbed.cpu_device import transformer_engine_can_run
from megatron_lynx.yaml_file import read_yaml

CLUSTER = "clusters/h100-80g"
VOCAB = 8192
TINY = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 64, "seq": 16, "attention": "unfused", "fusions": ()}


@dataclass(frozen=True)
class Subject:
    """A model, and how it is trained."""

    name: str
    shows: str
    """In words, for the page."""
    job: Job
    alone: bool = False
    """Whether this rank is the only one of its job that exists: it is the first stage, and messages bring what lies in memory."""
    repeatable: bool = False
    """Whether only kernels run that compute the same bits twice."""

    @property
    def uses_te(self) -> bool:
        return self.job.model.uses_te


def subjects(*, dry: bool, fusions: bool = True) -> list[Subject]:
    """All of them, the most important first. `fusions`: those that a launch has if it says nothing; else none."""
    return [*_subjects(_Jobs(dry, fusions))]


class _Jobs:
    """Makes jobs of one size."""

    def __init__(self, dry: bool, fusions: bool) -> None:
        self._dry, self._fusions = dry, fusions
        self._te = not dry or transformer_engine_can_run()

    def of(self, model: str, *, microbatches: int, te: bool = True, pipeline: int = 1, **fields: Any) -> Job:
        layers = fields["layers"]
        tiny = TINY | ({"layers": 2 * pipeline}) if self._dry else {}
        said = {} if self._fusions else {"fusions": ()}
        implementation = {"implementation": "transformer_engine"} if te and self._te else {}
        grouped = {"kv_groups": 2 if self._dry and fields.get("kv_groups") else TINY["heads"]} if self._dry else {}
        facts = {**_model(model), "vocab": VOCAB, **fields, "layers": layers, **implementation, **said, **tiny, **grouped}
        return Job(
            model=Model(**facts),
            cluster=load_cluster(CLUSTER, "benchmarks.one_gpu"),
            gpus=pipeline,
            parallel=Parallel(pipeline=pipeline, distributed_optimizer=True),
            batch=Batch.model_validate({"micro": 1, "global": microbatches}),
        )


def _model(name: str) -> dict[str, Any]:
    return dict(read_yaml(bundled_configs() / "models" / f"{name}.yaml"))


def _subjects(jobs: _Jobs) -> Iterator[Subject]:
    llama = jobs.of("llama3-8b", layers=8, kv_groups=8, microbatches=2)
    yield Subject("llama", "8 layers of Llama 3 8B, sequence 8192, Transformer Engine, fused attention", llama)
    small: dict[str, Any] = {"layers": 16, "hidden": 1024, "ffn": 2816, "heads": 16, "kv_groups": 4, "seq": 2048}
    host = jobs.of("llama3-8b", **small, microbatches=4)
    yield Subject("small", "16 layers of width 1024, sequence 2048, Transformer Engine: they wait for Python", host)
    issued = jobs.of("llama3-8b", **small | {"hidden": 256, "ffn": 704, "heads": 4, "seq": 128}, microbatches=4)
    yield Subject("issued", "16 layers again with next to nothing to compute: a step takes what Python takes", issued)
    compiled = ("bias_dropout", "bias_activation")  # Megatron's kernel for softmax comes with Apex
    gpt = jobs.of("gpt-13b", layers=6, microbatches=4, te=False, fusions=compiled)
    yield Subject("gpt", "6 layers of GPT-3 13B, sequence 2048, Megatron's local layers, attention not fused, dropout", gpt)
    stage = jobs.of("llama3-8b", layers=16, kv_groups=8, pipeline=4, microbatches=8)
    words = "the first of four stages, 4 layers of Llama 3 8B: four micro-batches in flight, copies to the host"
    yield Subject("stage", words, stage, alone=True)
    bits = jobs.of("llama3-8b", layers=2, kv_groups=8, microbatches=2)
    words = "2 layers of Llama 3 8B, only kernels that compute the same bits twice: every gradient is compared"
    yield Subject("bits", words, bits, repeatable=True)
