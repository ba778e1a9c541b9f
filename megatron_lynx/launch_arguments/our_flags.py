"""Reads our own flags in a launch: what they say about its job, and what the launcher would refuse."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.command_line import OURS
from megatron_lynx.launch_arguments.given import Fact, Given
from megatron_lynx.two_versions import LAUNCH

SCHEDULE = "--lynx-schedule"
SCHEDULES = {"flush": "flush", "double-buffered": "double_buffered"}
"""Schedules by their name as a value of the flag, and their name in a job."""

_NAMES = ("host", "plan", "trace", "trace-step", "outcome", "check", "check-against", "schedule", "log")
FLAGS = tuple(f"{OURS}{name}" for name in _NAMES)
"""The launcher's flags, which a launch may already have before it is planned."""

COUNTS = {
    "--lynx-check": ("how many steps, from 1, or frames, or frames:N", re.compile(r"frames|(frames:)?0*[1-9][0-9]*")),
    "--lynx-trace-step": ("a whole number from 1", re.compile(r"0*[1-9][0-9]*")),
}
"""Flags that are followed by a number, what they need in words, and how that is written."""

_REFUSED = (
    *("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed", "async_save", "adlr_autoresume"),
    *("inprocess_restart", "save_wgrads_interval", "save_dgrads_interval", "save_params_interval"),
    *("save_activations_interval", "save_tokens_per_expert_interval", "decoder_seq_length", "vision_pretraining", "qk_clip"),
    *("log_max_attention_logit", "overlap_param_gather", "overlap_param_gather_with_optimizer_step"),
    *("reuse_grad_buf_for_mxfp8_param_ag", "nccl_ub", "mtp_num_layers", "num_experts", "fp8", "fp8_param_gather"),
    *("fp4", "fp4_param_gather", "use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer_cuda_graph"),
)
WITHOUT_FLUSHES = {name: LAUNCH[name][1] for name in _REFUSED}
"""Megatron's arguments that a launch without flushes refuses as soon as they are given, and why: what `launch.without_flushes`
will say, for whoever plans without Megatron. Those that no plan goes with are not among them."""


def misread(arguments: Sequence[str]) -> Iterator[Problem]:
    """What the launcher would refuse of our flags, whatever the plan is."""
    for flag in dict.fromkeys(word.partition("=")[0] for word in arguments if word.startswith(OURS)):
        if flag not in FLAGS:
            near = difflib.get_close_matches(flag, FLAGS, n=1)
            yield Problem(flag, "unknown", f"one of {', '.join(FLAGS)}", f"did you mean {near[0]}?" if near else "")
    for flag, (needed, pattern) in COUNTS.items():
        for value in _values(arguments, flag):
            if not pattern.fullmatch(value):
                yield Problem(flag, value or "nothing", needed)


def schedule_facts(arguments: Sequence[str], problems: list[Problem]) -> Iterator[Fact]:
    """Nothing where the launch does not say: it flushes. The last word counts."""
    if not (said := list(_values(arguments, SCHEDULE))):
        return
    if said[-1] in SCHEDULES:
        yield Fact("schedule", SCHEDULES[said[-1]], SCHEDULE)
    else:
        problems.append(Problem(SCHEDULE, said[-1] or "nothing", f"one of {', '.join(SCHEDULES)}"))


def refused_without_flushes(given: Given) -> Iterator[Problem]:
    """Every argument of a launch that does not go together with two versions of the weights."""
    for name, why in WITHOUT_FLUSHES.items():
        if name in given.values and given[name]:
            yield Problem(given.origin(name), "given", f"a launch without it, or without {SCHEDULE} double-buffered", why)
    mode = given["rerun_mode"]
    if "rerun_mode" in given.values and mode != "disabled":
        needed = f"disabled with {SCHEDULE} double-buffered"
        yield Problem(given.origin("rerun_mode"), str(mode), needed, "batches overlap: none can be run again alone")


def _values(arguments: Sequence[str], flag: str) -> Iterator[str]:
    """Every value that is given to a flag, empty where none is."""
    for word, following in pairwise((*arguments, "")):
        name, equals, value = word.partition("=")
        if name == flag:
            yield value if equals else "" if following.startswith("--") else following
