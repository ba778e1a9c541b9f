"""Reads the GPT and Llama launches among Megatron's examples, and asks Megatron's own parser whether they were read right.

examples/*.sh, run with stand-ins for torchrun, python, srun, sbatch and others that write down what they are given
                └─ launch lines ─┬─ megatron_lynx.launch_arguments ─> a job ──────┐
                                 └─ Megatron's parse_args, validate_args ─────────┴─> every value equal, or the difference

    python scripts/check_examples.py CHECKOUT ...

Exit status 1 where a launch was read differently. A launch that we refuse is read right if its values are Megatron's; what is
refused of it is printed. Where Megatron's own validation stops (it looks for GPUs, libraries, files), what it parsed is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STANDS_IN = ("torchrun", "python", "python3", "srun", "sbatch", "uv", "nsys")
WRITES_DOWN = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["LAUNCHES"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
if "sbatch" in sys.argv[0]:
    os.execvp("bash", ["bash", os.path.join(os.environ["SCRIPT_FOLDER"], sys.argv[-1])])
"""
FILLED_IN = {
    "TP": "1",
    "PP": "1",
    "MLM_MODEL_CKPT": "/checkpoint",
    "MLM_MODEL_SAVE": "/checkpoint",
    "MLM_DATA_ARGS": "--mock-data",
}
"""What scripts leave to their caller."""

LAUNCHES = re.compile(r"^(?!CMD).*pretrain_gpt\.py|/SBATCH\.sh", re.MULTILINE)
"""Matches scripts that launch, by themselves or through `SBATCH.sh`."""

SETS_OF_ARGUMENTS = (
    "post_training/modelopt/conf/*/*lama*.sh",
    "post_training/modelopt/conf/Qwen/*-A*B.sh",
    "post_training/modelopt/conf/deepseek-ai/*.sh",
    "rl/model_configs/*lama*.sh",
    "rl/model_configs/*_moe.sh",
)
"""Files that only fill a variable with a model's arguments."""

MISSING = {
    "--vocab-size": "50257",  # of the tokenizers of these examples, which are not here
    "--micro-batch-size": "1",
    "--seq-length": "4096",
}
"""Added to both readings where a launch leaves it to a tokenizer or to another file."""

DROPPED = ("--step-batch-size-schedule", "--DDP-impl", "--activations-checkpoint-method")
"""What Megatron's own parser does not take of its examples: those launches are checked without them as well."""

COMPARED = {
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "ffn_hidden_size": "model.ffn",
    "num_attention_heads": "model.heads",
    "num_query_groups": "model.kv_groups",
    "seq_length": "model.seq",
    "padded_vocab_size": "model.vocab",
    "attention_dropout": "model.attention_dropout",
    "hidden_dropout": "model.hidden_dropout",
    "add_bias_linear": "model.bias",
    "swiglu": "model.activation",
    "normalization": "model.norm",
    "position_embedding_type": "model.position",
    "untie_embeddings_and_output_weights": "model.tied_embeddings",
    "half": "model.dtype",
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "context_parallel_size": "parallel.context",
    "sequence_parallel": "parallel.sequence_parallel",
    "use_distributed_optimizer": "parallel.distributed_optimizer",
    "gradients": "optimizer.gradients",
    "num_experts": "model.experts.count",
    "moe_router_topk": "model.experts.per_token",
    "moe_ffn_hidden_size": "model.experts.ffn",
    "moe_shared_expert_intermediate_size": "model.experts.shared_ffn",
    "moe_layers": "model.experts.layers",
    "expert_model_parallel_size": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "micro_batch_size": "batch.micro",
    "global_batch_size": "batch.global",
}
"""Megatron's names, and ours for the same."""


@dataclass(frozen=True)
class Launch:
    """One launch line of an example."""

    example: str
    words: tuple[str, ...]
    gpus: int | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    wrong = sum(check(checkout.resolve()) for checkout in parser.parse_args().checkouts)
    return 1 if wrong else 0


def check(checkout: Path) -> int:
    """Print what was read of each launch; how many were read wrongly."""
    from megatron_lynx.launch_arguments import read_launch

    launches = [completed(launch) for launch in launches_of(checkout)]
    answers = megatron_on(checkout, launches)
    wrong = 0
    for launch, answer in zip(launches, answers, strict=True):
        reading = read_launch(launch.words, gpus=launch.gpus, planning=False)
        facts = {fact.place: fact.value for fact in reading.facts}
        differ = [
            f"{place}: {facts.get(place)}, Megatron {value}"
            for place, value in answer["values"].items()
            if facts.get(place) != value
        ]
        given = reading.given
        some_releases = given.unknown or given.releases != given.table.releases or not set(DROPPED).isdisjoint(launch.words)
        if not answer["taken"] and not (reading.problems or some_releases):
            differ.append("Megatron does not take this launch, and we do")
        wrong += bool(differ)
        refused = "; ".join(str(problem) for problem in reading.problems) or "nothing"
        print(
            f"{'DIFFERS' if differ else 'right  '} {launch.example} ({len(answer['values'])} values compared), refused: {refused}"
        )
        if answer["stopped"]:
            print(f"        Megatron's own validation stops: {answer['stopped']}")
        for line in differ:
            print(f"        {line}")
    print(f"{checkout.name}: {len(launches)} launches, {len(launches) - wrong} read right\n")
    return wrong


def launches_of(checkout: Path) -> Iterator[Launch]:
    examples = checkout / "examples"
    scripts = [path for path in sorted(examples.rglob("*.sh")) if LAUNCHES.search(path.read_text(errors="replace"))]
    for script in scripts:
        yield from launches_by(script, examples)
    for pattern in SETS_OF_ARGUMENTS:
        for script in sorted(examples.glob(pattern)):
            name = script.relative_to(examples).as_posix()
            yield Launch(name, tuple(shlex.split(variable_of(script))), 8)


def launches_by(script: Path, examples: Path) -> Iterator[Launch]:
    """Run a script among stand-ins; which of the commands it gave are launches of pretrain_gpt.py."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text = re.sub(r"<[a-z ]+>", "/somewhere", script.read_text())
        for other in (*script.parent.glob("*.sh"), script):
            copy = re.sub(r"<[a-z ,0-9A-Z-]+>", "/somewhere", other.read_text())
            (place / other.name).write_text(copy)
        for name in STANDS_IN:
            (place / name).write_text(WRITES_DOWN)
            (place / name).chmod(0o755)
        (place / "pretrain_gpt.py").touch()
        environment = {**FILLED_IN, "PATH": f"{folder}:/usr/bin:/bin", "LAUNCHES": f"{folder}/launches", "SCRIPT_FOLDER": folder}
        environment |= {"PWD": folder, "LAUNCH_SCRIPT": "torchrun --nproc_per_node 8", "USE_UV": "0"}
        if "modelopt" in script.parts:
            return  # its launch is the sum of the argument sets
        arguments = ["checkpoints", "logs", "vocab.json", "merges.txt", "data"] if "#<Specify" in text else []
        arguments += ["checkpoints", "model", "data"] if "TOKENIZER_MODEL=$2" in text else []
        arguments += ["--checkpoint-path", folder] if "--checkpoint-path)" in text else []
        subprocess.run(
            ["bash", script.name, *arguments], cwd=folder, env=environment, capture_output=True, check=False, timeout=60
        )
        written = (place / "launches").read_text().splitlines() if (place / "launches").exists() else []
        nodes = None
        for words in map(json.loads, written):
            name = script.relative_to(examples).as_posix()
            if words[0] == "sbatch":
                nodes = next((int(word.partition("=")[2]) for word in words if word.startswith("--nodes=")), None)
            if words[-2:-1] == ["-c"]:
                yield from with_and_without(Launch(name, tuple(shlex.split(words[-1])), 8 * nodes if nodes else 8))
            elif any(word.endswith("pretrain_gpt.py") for word in words):
                yield from with_and_without(Launch(name, tuple(words)))


def with_and_without(launch: Launch) -> Iterator[Launch]:
    """A launch, and without the flags that Megatron does not take, if it has any."""
    yield launch
    kept: list[str] = []
    dropping = False
    for word in launch.words:
        dropping = word in DROPPED or (dropping and not word.startswith("--"))
        kept += [] if dropping else [word]
    if len(kept) < len(launch.words):
        yield replace(launch, example=f"{launch.example}, its outdated flags dropped", words=tuple(kept))


def variable_of(script: Path) -> str:
    """The arguments that a file of arguments puts into its variable."""
    code = f'source "{script}" >/dev/null 2>&1; echo "${{MODEL_ARGS}}${{MODEL_OPTIONS}}${{COMMON_OPTIONS}}"'
    environment = {**FILLED_IN, "PATH": "/usr/bin:/bin", "ENV_CONFIG": "none.yaml", "CHECKPOINT": "/checkpoint"}
    done = subprocess.run(["bash", "-c", code], env=environment, cwd=script.parent, capture_output=True, text=True, check=False)
    return " ".join(done.stdout.split())


def completed(launch: Launch) -> Launch:
    """The launch with what it leaves to a tokenizer or to another file filled in."""
    words = launch.words
    launch = replace(launch, gpus=enough_gpus(launch))
    added = [word for flag, value in MISSING.items() if flag not in words for word in (flag, value)]
    return replace(launch, words=(*words, *added))


def enough_gpus(launch: Launch) -> int:
    """What the launch says, or one replica: examples leave the number of nodes to their reader."""
    from megatron_lynx.launch_arguments import read_launch

    reading = read_launch(launch.words, gpus=launch.gpus or 8)
    sizes = reading.job_data["parallel"]
    return max(launch.gpus or reading.command.gpus or 8, int(sizes["tensor"] * sizes["pipeline"] * sizes["context"]))


def megatron_on(checkout: Path, launches: list[Launch]) -> list[dict[str, Any]]:
    """What Megatron's own parser makes of launches, by our names; asked in a process of its own."""
    from megatron_lynx.launch_arguments.command_line import command_line

    questions = []
    for launch in launches:
        parts = command_line(launch.words)
        questions.append({"arguments": parts.arguments, "gpus": launch.gpus or parts.gpus or 1})
    code = "import sys; sys.path[:0] = sys.argv[1:]; import check_examples; check_examples.answer()"
    paths = [str(Path(__file__).parent), str(ROOT), str(checkout)]  # a checkout has `tests` of its own
    command = [sys.executable, "-W", "ignore", "-c", code, *paths]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{checkout}: its parser cannot be asked\n{done.stderr[-1500:]}")
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def answer() -> None:
    """Runs in the process that has Megatron on its path."""
    from tests.instruments.script_device import stand_in_for_gpu_machine

    stand_in_for_gpu_machine()
    for name in ("six", "regex"):
        sys.modules.setdefault(name, types.ModuleType(name))
    print("\n" + json.dumps([answer_to(**question) for question in json.load(sys.stdin)]))


def answer_to(arguments: list[str], gpus: int) -> dict[str, Any]:
    from megatron.training.arguments import parse_args, validate_args

    os.environ["WORLD_SIZE"] = str(gpus)
    sys.argv = ["pretrain_gpt.py", *arguments]
    stopped = None
    try:
        parsed = parse_args(modelopt_flags())
    except SystemExit:
        return {"values": {}, "taken": False, "stopped": "its parser does not take these arguments"}
    try:
        parsed = validate_args(parsed) or parsed
    except Exception as error:  # noqa: BLE001  whatever a validation of three thousand lines may raise
        stopped = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    values = vars(parsed)
    if stopped and values["tensor_model_parallel_size"] == 1:
        values["sequence_parallel"] = None  # it would have been switched off later
    values["gradients_known"] = not stopped
    return {"values": dict(by_our_names(values)), "taken": True, "stopped": stopped}


def modelopt_flags() -> Callable[..., Any] | None:
    """What adds ModelOpt's flags to the parser: a checkout has it, a wheel has not."""
    try:
        from megatron.post_training.arguments import add_modelopt_args
    except ModuleNotFoundError:
        return None
    return add_modelopt_args  # type: ignore[no-any-return]


def by_our_names(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values that Megatron has decided on; what it decides later (None) is left out."""
    values = dict(values)
    values["num_query_groups"] = values["num_query_groups" if values["group_query_attention"] else "num_attention_heads"]
    values["half"] = values["bf16"] or values["fp16"]
    if values.pop("gradients_known"):  # a validation that stopped may not have come to them
        summed = values["accumulate_allreduce_grads_in_fp32"] or not values["half"]
        values["gradients"] = "fp32" if summed else "bf16"
    values |= of_experts(values)
    positions = {"learned_absolute": "learned"}
    gated = "quick_geglu" if values.get("quick_geglu") else "gelu"
    words: dict[str, Callable[[Any], Any]] = {
        "swiglu": lambda value: "swiglu" if value else gated,
        "normalization": str.lower,
        "position_embedding_type": lambda value: positions.get(value, value),
        "untie_embeddings_and_output_weights": lambda value: not value,
        "half": lambda value: "bf16" if value else "fp32",
    }
    for name, place in COMPARED.items():
        if values.get(name) is not None:
            yield place, words[name](values[name]) if name in words else values[name]


def of_experts(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is left to say of them: nothing without any, and not what follows from the rest."""
    from megatron_lynx.config.experts import as_spans

    if not values.get("num_experts"):
        return {name: None for name, place in COMPARED.items() if "expert" in place}
    freq, tensor = values["moe_layer_freq"], values["expert_tensor_parallel_size"]
    layers = list(as_spans(at for at, one in enumerate(freq, start=1) if one)) if isinstance(freq, list) else freq
    followed = values["tensor_model_parallel_size"]
    return {"moe_layers": None if layers == 1 else layers, "expert_tensor_parallel_size": None if tensor == followed else tensor}


if __name__ == "__main__":
    sys.exit(main())
