"""Planning of halves that mix tokens without attention: a linear, kernels over the whole sequence, and a linear back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.delta.section import DeltaSizes
from megatron_lynx.kinds.face import Linear, Planning
from megatron_lynx.kinds.mamba.section import MambaSizes
from megatron_lynx.kinds.section import Item
from megatron_lynx.profiler.profile import SavedTensor, own_tensors
from megatron_lynx.profiler.shape import LayerShape, saved_bytes


class TokenMixer(Planning):
    @abstractmethod
    def sizes(self, model: Model) -> DeltaSizes | MambaSizes: ...

    def linears(self, shape: LayerShape) -> Mapping[str, Linear]:
        sizes, hidden, tensor = self.sizes(shape.model), shape.model.hidden, shape.parallel.tensor
        return {
            self.section.column_parallel: Linear(shape.tokens, hidden, sizes.made // tensor),
            self.section.row_parallel: Linear(shape.tokens, sizes.result // tensor, hidden),
        }

    def output_bytes(self, shape: LayerShape, item: Item) -> int:
        if item.role != "kernel":
            return super().output_bytes(shape, item)
        return column_bytes(shape) * self.sizes(shape.model).result

    def result_tensors(self, shape: LayerShape, *, output: bool = True) -> Iterator[SavedTensor]:
        """Yield the input of the last linear, which in FP8 saves a tensor more. `output`: whether a site returned it."""
        section, columns, recipe = self.section, self.sizes(shape.model).result, shape.model.fp8_recipe
        readers = (section.row_parallel,) if recipe is None else ()
        size, made_by = column_bytes(shape) * columns, section.before_row_parallel
        yield SavedTensor(bytes=size, made_by=made_by, saved_by=readers, output=output)
        if recipe is not None:
            yield from own_tensors(section.row_parallel, saved_bytes(recipe, shape.tokens, columns // shape.parallel.tensor))

    def refusals(self, job: Job) -> Iterator[Problem]:
        if job.parallel.context > 1:
            needed = f"1 with {self.section.name}: it exchanges heads for tokens, which is not counted"
            yield Problem("job: parallel.context", str(job.parallel.context), needed, "the job can be estimated")
        for name, count in self.sizes(job.model).shared.items():
            if count % job.parallel.tensor:
                needed = f"a multiple of parallel.tensor ({job.parallel.tensor}), whose ranks share them"
                yield Problem(f"job: model.opaque: {self.section.name}: {name}", str(count), needed)


def column_bytes(shape: LayerShape) -> int:
    """Return the bytes of one of the columns that tensor-parallel ranks share, on one of them."""
    return shape.tokens * shape.model.element_bytes // shape.parallel.tensor
