"""Errors of training steps that recomputation cannot support (rules R2, R10 and R14). Each names its half and what to do."""

from __future__ import annotations

import torch

from megatron_lynx.errors import Problem, RecomputeError


def refuse_foreign_hooks(half: str) -> None:
    """Raise `RecomputeError` if other saved-tensor hooks are active: they would see handles, or no tensors (rule R14)."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise _refusal(
            "other saved-tensor hooks are active",
            where=f"forward of {half}",
            found="torch.autograd.graph.saved_tensors_hooks (or save_on_cpu, or an offload) around the model",
            needed="none around layers that the plan recomputes or offloads",
            todo="leave that context before the model runs, or keep every item of these layers in the plan, on the device",
        )


def partial_backward(half: str) -> RecomputeError:
    return _refusal(
        "torch.autograd.grad (or backward with inputs=) cannot run through recomputed activations",
        where=f"backward of {half}",
        found="a backward for chosen inputs",
        needed="a whole backward: what it does not reach would stay in memory",
        todo="call .backward() without inputs=, or remove the installation around this call",
    )


def second_order(half: str) -> RecomputeError:
    return _refusal(
        "a recomputed activation has no second derivative",
        where=f"backward of {half}",
        found="backward with create_graph=True",
        needed="create_graph=False",
        todo="remove the installation around this call",
    )


def collective_in_recompute(half: str) -> RecomputeError:
    return _refusal(
        "a recomputation would communicate",
        where=f"recomputation of {half}",
        found="a collective of the tensor-parallel group",
        needed="none: it would queue after the one that hides the recomputation (rule R2)",
        todo="keep the site that communicates, or give its half a gather in the plan",
    )


def hook_changes(half: str, module: str, hook: str) -> RecomputeError:
    return _refusal(
        "a forward hook changes a recomputed tensor",
        where=f"forward of {half}: {hook}, a hook of {module}",
        found="other tensors, or other values in them, than it was called with",
        needed="a hook that only reads: recomputation calls no hooks",
        todo="put the change into the module's forward, or keep every item of this half in the plan",
    )


def other_nodes(half: str, site: str) -> RecomputeError:
    return _refusal(
        "a recomputation differs from its forward",
        where=f"recomputation of {half}: {site}",
        found="other operations in its graph",
        needed="those of the forward: what they save is what backward needs",
        todo="keep the site in the plan, and tell us what it does",
    )


def other_input(half: str) -> RecomputeError:
    return _refusal(
        "a half is not called with what the half before it returned",
        where=f"forward of {half}",
        found="other tensors: code in between has put something in their place",
        needed="the very tensor: a checkpoint keeps no input of this half, but has the half before make it again",
        todo="checkpoint this layer's halves by themselves (checkpoint: halves)",
    )


def asked_twice(half: str) -> RecomputeError:
    return _refusal(
        "a recomputed activation was requested twice",
        where=f"backward of {half}",
        found="a second backward through the same graph (retain_graph=True, or saved_tensors read twice)",
        needed="one backward per forward: a regenerated tensor is dropped when it was used",
        todo="run this part without the plan, or keep the layer's items in the plan",
    )


def _refusal(headline: str, *, where: str, found: str, needed: str, todo: str) -> RecomputeError:
    return RecomputeError(headline, [Problem(where, found, needed, todo)])
