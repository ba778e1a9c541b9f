"""Errors of training steps that recomputation cannot support (rules R2, R10 and R14). Each names its half and what to do."""

from __future__ import annotations

from typing import NamedTuple

from megatron_lynx.errors import Problem, RecomputeError


class Refusal(NamedTuple):
    headline: str
    where: str
    finding: str
    needed: str
    todo: str

    def of(self, half: str, **names: str) -> RecomputeError:
        """Return the error for one half. `names`: other names in the texts."""
        where, *texts = (text.format(half=half, **names) for text in self[1:])
        return RecomputeError(self.headline, [Problem(where, *texts)])


FOREIGN_HOOKS = Refusal(
    "other saved-tensor hooks are active",
    "forward of {half}",
    "torch.autograd.graph.saved_tensors_hooks (or save_on_cpu, or an offload) around the model",
    "none around layers that the plan recomputes or offloads",
    "leave that context before the model runs, or keep every item of these layers in the plan, on the device",
)
PARTIAL_BACKWARD = Refusal(
    "torch.autograd.grad (or backward with inputs=) cannot run through recomputed activations",
    "backward of {half}",
    "a backward for chosen inputs",
    "a whole backward: what it does not reach would stay in memory",
    "call .backward() without inputs=, or remove the installation around this call",
)
SECOND_ORDER = Refusal(
    "a recomputed activation has no second derivative",
    "backward of {half}",
    "backward with create_graph=True",
    "create_graph=False",
    "remove the installation around this call",
)
COLLECTIVE_INSIDE = Refusal(
    "a recomputation would communicate",
    "recomputation of {half}",
    "a collective of the tensor-parallel group",
    "none: it would queue after the one that hides the recomputation (rule R2)",
    "keep the site that communicates, or give its half a gather in the plan",
)
HOOK_CHANGES = Refusal(
    "a forward hook changes a recomputed tensor",
    "forward of {half}: {hook}, a hook of {module}",
    "other tensors, or other values in them, than it was called with",
    "a hook that only reads: recomputation calls no hooks",
    "put the change into the module's forward, or keep every item of this half in the plan",
)
OTHER_NODES = Refusal(
    "a recomputation differs from its forward",
    "recomputation of {half}: {site}",
    "other operations in its graph",
    "those of the forward: what they save is what backward needs",
    "keep the site in the plan, and tell us what it does",
)
OTHER_INPUT = Refusal(
    "a half is not called with what the half before it returned",
    "forward of {half}",
    "other tensors: code in between has put something in their place",
    "the very tensor: a checkpoint keeps no input of this half, but has the half before make it again",
    "checkpoint this layer's halves by themselves (checkpoint: halves)",
)
ASKED_TWICE = Refusal(
    "a recomputed activation was requested twice",
    "backward of {half}",
    "a second backward through the same graph (retain_graph=True, or saved_tensors read twice)",
    "one backward per forward: a regenerated tensor is dropped when it was used",
    "run this part without the plan, or keep the layer's items in the plan",
)
