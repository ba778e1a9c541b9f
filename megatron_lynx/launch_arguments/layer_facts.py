"""Which stage owns which layers of a launch: Megatron's ways to say it.

nothing                                                 even, or left open for a plan to decide
--num-layers-per-virtual-pipeline-stage n               L / n virtual stages, even
--num-virtual-stages-per-pipeline-rank v                v on each stage, of L / (p v) layers
--decoder-{first,last}-pipeline-num-layers              the ends have their own number, the rest is even
--account-for-{embedding,loss}-in-pipeline-split        either counts as one layer of its end
--pipeline-model-parallel-layout 'Et*3|(t*4|)*6tL'      every virtual stage: E embedding, t layer, L loss, | the next one
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.fact import Fact
from megatron_lynx.launch_arguments.given import Given

EACH, CHUNKS = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
LAYOUT = "pipeline_model_parallel_layout"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
GROUP = "microbatch_group_size_per_vp_stage"


class _Uneven(Exception):
    """Raised, with a sentence, where layers cannot be divided as asked."""


def layer_facts(given: Given, problems: list[Problem], *, left_open: bool) -> Iterator[Fact]:
    """`left_open`: where the launch says nothing about it, a plan may move layers."""
    layers = given["num_layers"] or given["encoder_num_layers"]
    pipeline = given["pipeline_model_parallel_size"]
    if not layers or not pipeline:
        return
    chunked = bool(given[EACH])
    said = [name for name in (LAYOUT, FIRST, LAST, EMBEDDING, LOSS, CHUNKS, EACH) if given[name]]
    try:
        if sum(bool(given[name]) for name in (LAYOUT, EACH, CHUNKS)) > 1:
            raise _Uneven(f"{', '.join(given.origin(name) for name in said)}: Megatron takes only one of them")
        if said in ([], [EACH]):
            yield from _plain(given, pipeline, left_open)
        else:
            partition = _partition(given, layers, pipeline)
            chunked = len(partition) > pipeline
            yield Fact("parallel.partition", list(partition), given.origin(*said))
    except _Uneven as uneven:
        problems.append(Problem(given.origin(*said), str(uneven), ""))
    if given[GROUP] not in (None, pipeline) and chunked:
        yield Fact("parallel.microbatch_group", given[GROUP], given.origin(GROUP))


def _plain(given: Given, pipeline: int, left_open: bool) -> Iterator[Fact]:
    if given[EACH]:
        yield Fact("parallel.layers_per_chunk", given[EACH], given.origin(EACH))
    elif left_open and pipeline > 1:
        yield Fact("parallel.partition", "auto", "left open: the launch does not say")


def _partition(given: Given, layers: int, pipeline: int) -> tuple[int, ...]:
    """Layers of each virtual stage, in layer order."""
    if given[LAYOUT]:
        return layers_of_layout(given[LAYOUT])
    stages = _of_stages(given, layers, pipeline)
    chunks = given[CHUNKS] or (stages[0] // given[EACH] if given[EACH] else 1)
    for stage, count in enumerate(stages):
        if not chunks or count % chunks:
            raise _Uneven(f"the {count} layers of stage {stage} do not divide into {chunks} chunks")
    partition = [stages[index % pipeline] // chunks for index in range(pipeline * chunks)]
    partition[0] -= bool(given[EMBEDDING])
    partition[-1] -= bool(given[LOSS])
    return tuple(partition)


def _of_stages(given: Given, layers: int, pipeline: int) -> list[int]:
    """Layers of each stage; what counts as one is still among them."""
    ends = {0: given[FIRST], pipeline - 1: given[LAST]}
    ends = {stage: count for stage, count in ends.items() if count is not None}
    counted = layers + bool(given[EMBEDDING]) + bool(given[LOSS])
    left, stages = counted - sum(ends.values()), pipeline - len(ends)
    if left < 0 or (left % stages if stages else left):
        raise _Uneven(f"{left} layers do not divide among the {stages} stages that are left")
    return [ends.get(stage, left // stages if stages else 0) for stage in range(pipeline)]


def layers_of_layout(text: str) -> tuple[int, ...]:
    """How many layers each virtual stage of a layout has. Raises `_Uneven` for what is no layout."""
    plain = re.sub(r"\(([^)]+)\)\*(\d+)", _repeated, text.replace(",", ""))
    plain = re.sub(r"(.)\*(\d+)", _repeated, plain)
    if strange := sorted(set(plain) - set("EtL|")):
        raise _Uneven(f"{', '.join(map(repr, strange))} in {text!r}: needed E, t, L and |")
    return tuple(stage.count("t") for stage in plain.split("|"))


def _repeated(found: re.Match[str]) -> str:
    return found[1] * int(found[2])
