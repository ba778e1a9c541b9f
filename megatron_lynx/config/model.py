"""The model of a job file: GPT sizes, layer implementation and kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from megatron_lynx.anatomy import Facts, Half, LayerKind, Section, halves_of, sections_of
from megatron_lynx.config.cluster import AttentionKernel, Implementation
from megatron_lynx.config.experts import AS_TUPLE, BALANCED, Experts, Opaque, as_spans, first_beyond
from megatron_lynx.fp8_recipes import Recipe
from megatron_lynx.kinds.captured import CapturedModule
from megatron_lynx.kinds.dense.section import LINEARS
from megatron_lynx.kinds.experts.section import Dispatcher
from megatron_lynx.kinds.latent.section import LatentSizes
from megatron_lynx.kinds.opaque.section import OPAQUE, OpaqueName
from megatron_lynx.kinds.sections import KindName
from megatron_lynx.validation import Part

Fusion = Literal["bias_dropout", "bias_activation", "rope", "masked_softmax"]
"""Megatron's fusions: bias, dropout and residual addition (off: `--no-bias-dropout-fusion`); bias and activation
(`--no-bias-gelu-fusion`, `--no-bias-swiglu-fusion`); RoPE with Transformer Engine's kernel (`--no-rope-fusion`); mask and softmax
of local layers' scores (`--no-masked-softmax-fusion`)."""


class Fp8(Part):
    """FP8 (Megatron's `--fp8-format`, `--fp8-recipe`, `--fp8-param-gather`) or FP4 (`--fp4-format`, `--fp4-recipe`) linears."""

    format: Literal["hybrid", "e4m3", "e2m1"] = "hybrid"
    """hybrid: E4M3, with gradients in E5M2. e2m1: FP4, with recipe nvfp4."""
    recipe: Recipe = "delayed"
    parameters: bool = False
    """Whether the linears' weights are stored in FP8 (`--fp8-param-gather`), and gathered so by the distributed optimizer.
    Otherwise they stay in the model's type, with copies in FP8."""
    first_in_bf16: int = Field(default=0, ge=0)
    """Layers at the start that compute in bf16 (`--first-last-layers-bf16`, `--num-layers-at-start-in-bf16`)."""
    last_in_bf16: int = Field(default=0, ge=0)
    """Layers at the end that compute in bf16 (`--num-layers-at-end-in-bf16`)."""
    copies_kept: bool | None = None
    """Whether a checkpointed half keeps the FP8 copy of its last linear's input, so that this linear is not recomputed; None: a
    plan takes the faster one."""

    @model_validator(mode="before")
    @classmethod
    def _usual_format(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("recipe") == "nvfp4":
            return {"format": "e2m1", **data}
        return data

    def _problems(self) -> Iterator[str]:
        if (self.format == "e2m1") != (self.recipe == "nvfp4"):
            yield f"format e2m1 and recipe nvfp4 need each other, found {self.format} and {self.recipe}"


if TYPE_CHECKING:
    Adaptable = str
else:
    Adaptable = Literal[LINEARS]
BESIDE_NO_ADAPTERS = ("fp8", "latent", "experts", "mtp", "opaque", "captured", "kinds")


class Adapters(Part):
    """Low-rank adapters (LoRA) beside linears. All other weights are frozen: they have no gradient and no optimizer state.

    input ──> frozen linear ──────────────────────────────────────────> + ──> output
       └────> dropout ──> linear_in (to rank) ──> linear_out ──> scale ─┘
    """

    rank: int = Field(ge=1)
    targets: Annotated[tuple[Adaptable, ...], AS_TUPLE] = LINEARS
    dropout: float = Field(default=0.0, ge=0, lt=1)
    whole: bool = False
    """Whether each tensor-parallel rank has all of the weight that is not cut like the linear's (ms-swift)."""

    def _problems(self) -> Iterator[str]:
        if not self.targets or len(set(self.targets)) < len(self.targets):
            yield f"targets is {', '.join(self.targets) or 'empty'}, needed at least one linear, each once"


class LogProbabilities(Part):
    """A loss on log-probabilities, and the entropy, which a frontend computes from logits, as in reinforcement learning."""

    peak_bytes: float = Field(gt=0)
    """Most bytes per logit in the loss or its backward, including the model's output."""
    saved_bytes: float = Field(ge=0)
    """Bytes per logit between the two passes; 0: logits are never whole."""
    weight_bytes: float = Field(default=0, ge=0)
    """Bytes per weight of the output layer in the loss's backward."""


class Window(Part):
    """Sliding-window attention. Seconds and FLOPs of core attention are averages over all layers."""

    keys: int = Field(ge=1)
    """Keys that a query attends to, including its own."""
    share: float = Field(default=1.0, ge=0, le=1)
    """Share of the layers with a window; the others attend to all keys."""

    def seen(self, seq: int) -> float:
        """Return the mean query-key pairs of all layers, relative to a causal sequence."""
        keys = min(self.keys, seq)
        return 1 - self.share + self.share * keys * (2 * seq - keys + 1) / (seq * (seq + 1))


class Model(Part):
    """A decoder-only transformer in Megatron's terms. Sizes count elements, not bytes."""

    layers: int = Field(ge=1, le=1_000)
    """Transformer layers of the whole model (L)."""
    hidden: int = Field(ge=1)
    """Width of the residual stream (h)."""
    ffn: int = Field(ge=1)
    """Width between the two GEMMs of the MLP (H); with SwiGLU, of each of the two halves."""
    heads: int = Field(ge=1)
    """Attention heads (a)."""
    kv_groups: int = Field(ge=1)
    """Key/value heads (g); equal to `heads` without grouped-query attention."""
    vocab: int = Field(ge=1)
    """Entries of the embedding table (V). Megatron pads them to a multiple of 128 x tensor; give the padded number to count the
    padding."""
    seq: int = Field(ge=1)
    """Tokens per sequence (s)."""
    kv_channels: int | None = Field(default=None, ge=1)
    """Width of a head (d), Megatron's `--kv-channels`; None: hidden / heads."""
    activation: Literal["gelu", "swiglu", "quick_geglu", "squared_relu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    position: Literal["learned", "rope"] = "learned"
    """Default: rope with rmsnorm (Llama-like models) and with latent attention, else learned."""
    bias: bool = True
    attention: Literal["flash", "unfused"] = "flash"
    """`unfused` keeps the s x s scores (Megatron's local DotProductAttention)."""
    attention_kernel: AttentionKernel = "usual"
    """Fused attention kernels: Transformer Engine's default on these GPUs (cuDNN on Hopper and later), or FlashAttention-2
    (`--attention-backend flash`, or NVTE_FUSED_ATTN=0)."""
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    hidden_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    implementation: Implementation = "local"
    """Layer implementation (Megatron's `--transformer-impl`). Transformer Engine, the default with latent attention, computes the
    norms inside `linear_qkv` and `linear_fc1`."""
    qk_norm: bool = False
    """Whether queries and keys are normalized per head (Megatron's `--qk-layernorm`), with `norm`."""
    fusions: Annotated[tuple[Fusion, ...] | None, AS_TUPLE] = None
    """Enabled fusions of Megatron; None: Megatron's defaults on GPUs; none on CPU ranks."""
    glu_offset: bool = True
    """Whether an unfused gated activation adds an offset to its linear half (0 for SwiGLU), as since megatron-core 0.14."""
    activation_clamped: bool = False
    """Whether the inputs of a gated activation are clamped (`--activation-func-clamp-value`)."""
    window: Window | None = None
    sinks: bool = False
    """Whether each head's softmax has an additional learned logit (`--softmax-type learnable`)."""
    cross_entropy: Literal["unfused", "native", "te"] = "unfused"
    """Kernels of the loss: one per operator, Megatron's fused ones (`--cross-entropy-loss-fusion`), or Transformer Engine's
    (`--cross-entropy-fusion-impl te`)."""
    log_probabilities: LogProbabilities | None = None
    """A frontend's loss in place of Megatron's, in bytes; its seconds are those of `cross_entropy`."""
    deterministic: bool = False
    """Whether kernels sum in a fixed order (`--deterministic-mode`): fused attention's backward takes more time and memory, by
    `cluster.ordered_attention`. A measured profile includes this."""
    tied_embeddings: bool = False
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Type of weights in forward and backward, and of activations."""
    fp8: Fp8 | None = None
    """FP8 or FP4 format of the layers' linears; None: `dtype`."""
    latent: LatentSizes | None = None
    """Multi-latent attention (Megatron's `--multi-latent-attention`); `kv_channels` is then unused, and `qk_norm` normalizes the
    compressed latents; None: standard attention."""
    experts: Experts | None = None
    """Experts in place of the MLP of some or all layers; `ffn` is the width of the dense ones; None: no experts."""
    mtp: int = Field(default=0, ge=0, le=64)
    """Layers of multi-token prediction (`--mtp-num-layers`): on the last stage, like its last layer, each with its own
    projection, norms and loss. Plans keep all their activations."""
    opaque: Annotated[tuple[Opaque, ...], AS_TUPLE] = ()
    """Opaque halves of some layers, which plans keep whole. The first entry that names a layer and half applies."""
    adapters: Adapters | None = None
    captured: Annotated[tuple[CapturedModule, ...], AS_TUPLE] = ()
    """Modules of every layer that run as CUDA graphs (`--cuda-graph-impl transformer_engine`): plans keep them whole."""
    kinds: Annotated[tuple[KindName, ...], AS_TUPLE] = ()
    """Further kinds of every layer's halves (`megatron_lynx.kinds`) that no other key selects."""

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("latent") is not None:
            return {"position": "rope", "implementation": "transformer_engine"} | data
        return {"position": "rope" if data.get("norm") == "rmsnorm" else "learned"} | data

    def _problems(self) -> Iterator[str]:
        if self.kv_channels is None and self.latent is None and self.hidden % self.heads:
            yield f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})"
        if self.heads % self.kv_groups:
            yield f"heads ({self.heads}) must be a multiple of kv_groups ({self.kv_groups})"
        for name, setting, needed in (
            ("implementation", self.implementation, "transformer_engine"),
            ("dtype", self.dtype, "bf16"),
        ):
            if self.fp8 is not None and setting != needed:
                yield f"fp8 needs {name} {needed}, found {setting}"
        if self.deterministic and self.cross_entropy != "unfused":
            yield f"deterministic true needs cross_entropy unfused, found {self.cross_entropy}, as Megatron refuses it"
        if self.sinks and self.latent is not None:
            yield "sinks go with no latent attention, found both"
        if self.activation_clamped and not self.gated:
            yield f"activation_clamped needs activation swiglu or quick_geglu, found {self.activation}"
        if self.latent is not None and self.kv_groups != self.heads:
            yield f"latent needs kv_groups {self.heads} (heads), found {self.kv_groups}: there are keys for every head"
        if self.latent is not None and self.position != "rope":
            yield f"latent needs position rope, found {self.position}"
        if self.latent is not None and not self.uses_te:
            yield f"latent needs implementation transformer_engine, found {self.implementation}: Megatron has no other"
        if self.adapters is not None:
            others = [name for name in BESIDE_NO_ADAPTERS if getattr(self, name)]
            yield from (f"adapters go with no {name}, found both: its frozen weights are not modelled" for name in others)
        named = [opaque.kind for opaque in self.opaque]
        yield from (f"opaque has {kind} twice, needed once" for kind in dict.fromkeys(named) if named.count(kind) > 1)
        for at, opaque in enumerate(self.opaque):
            if (number := first_beyond(opaque.layers, self.layers)) is not None:
                yield f"opaque.{at}.layers has {number}, but the model has layers 1-{self.layers}"

    @property
    def facts(self) -> Facts:
        copies_go = self.fp8 is not None and not self.fp8.copies_kept
        return Facts(latent=self.latent, kinds=self.kinds, captured=self.captured, copies_go=copies_go)

    @property
    def halves(self) -> Mapping[Half, Section]:
        return halves_of(self.facts)

    @property
    def every_section(self) -> tuple[Section, ...]:
        mixture = () if self.experts is None else (self.kind_sections(experts=True)[1],)
        named = (section for opaque in self.opaque for section in self.kind_sections(experts=False, opaque=(opaque.kind,)))
        return (*self.halves.values(), *mixture, *dict.fromkeys(section for section in named if section.name in OPAQUE))

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "fp32" else 2

    @property
    def uses_te(self) -> bool:
        return self.implementation == "transformer_engine"

    def fuses(self, fusion: Fusion) -> bool:
        return self.fusions is None or fusion in self.fusions

    @property
    def fuses_activation(self) -> bool:
        """Whether bias and activation are one kernel. Megatron has none for squared ReLU with a bias."""
        if self.activation == "squared_relu":
            return not self.bias
        return self.fuses("bias_activation")

    @property
    def adapted(self) -> tuple[str, ...]:
        return () if self.adapters is None else tuple(name for name in LINEARS if name in self.adapters.targets)

    @property
    def fp8_recipe(self) -> Recipe | None:
        return None if self.fp8 is None else self.fp8.recipe

    @property
    def first_in_bf16(self) -> range:
        return range(1, 1 + (0 if self.fp8 is None else self.fp8.first_in_bf16))

    @property
    def last_in_bf16(self) -> range:
        return range(self.layers + 1 - (0 if self.fp8 is None else self.fp8.last_in_bf16), self.layers + 1)

    @property
    def fp8_parameters(self) -> bool:
        return self.fp8 is not None and self.fp8.parameters

    @property
    def expert_layers(self) -> frozenset[int]:
        return frozenset() if self.experts is None else self.experts.numbers(self.layers)

    @property
    def shared_experts(self) -> bool:
        return self.experts is not None and self.experts.shared_ffn > 0

    @property
    def moe_dispatcher(self) -> Dispatcher:
        return "alltoall" if self.experts is None else self.experts.dispatcher

    @property
    def moe_delayed(self) -> bool:
        return self.experts is not None and self.experts.overlapped and self.experts.delayed

    @property
    def moe_overlapped(self) -> bool:
        return self.experts is not None and self.experts.overlapped

    @property
    def routed_hidden(self) -> int:
        latent = None if self.experts is None else self.experts.latent
        return self.hidden if latent is None else latent

    @property
    def experts_whole(self) -> bool:
        return self.experts is not None and self.experts.whole

    @property
    def moe_load(self) -> float:
        return BALANCED if self.experts is None else self.experts.held_load

    def sections(self, layer: int) -> LayerKind:
        return self.each_kind([layer])[0]

    def each_kind(self, layers: Iterable[int]) -> list[LayerKind]:
        experts, opaque_layers = self.expert_layers, [(opaque.kind, opaque.numbers(self.layers)) for opaque in self.opaque]
        contents = [(layer in experts, tuple(kind for kind, numbers in opaque_layers if layer in numbers)) for layer in layers]
        kinds = {content: self.kind_sections(experts=content[0], opaque=content[1]) for content in set(contents)}
        return [kinds[content] for content in contents]

    def kind_sections(self, *, experts: bool, opaque: tuple[OpaqueName, ...] = ()) -> LayerKind:
        return sections_of(
            self.facts._replace(
                experts=experts,
                shared_experts=self.shared_experts,
                dispatcher=self.moe_dispatcher,
                overlapped=self.moe_overlapped,
                opaque=opaque,
            )
        )

    @property
    def uniform(self) -> bool:
        """Whether all layers are of one kind."""
        parts = self.expert_layers, *(opaque.numbers(self.layers) for opaque in self.opaque)
        return all(len(layers) in (0, self.layers) for layers in parts)

    def kinds_of(self, layers: Sequence[int]) -> Counter[LayerKind]:
        return Counter({self.sections(layers[0]): len(layers)} if self.uniform and layers else self.each_kind(layers))

    def opaque_in(self, section: Section) -> Opaque:
        return next(opaque for opaque in self.opaque if opaque.kind == section.name)

    @property
    def opaque_layers(self) -> Mapping[OpaqueName, tuple[int | str, ...]]:
        having: dict[OpaqueName, list[int]] = {}
        for layer in range(1, self.layers + 1) if self.opaque else ():
            for section in self.sections(layer):
                if section.name in OPAQUE:
                    having.setdefault(cast("OpaqueName", section.name), []).append(layer)
        return {name: as_spans(numbers) for name, numbers in having.items()}

    @property
    def moe_layers(self) -> tuple[int | str, ...]:
        """Layers with experts, in the notation of plans: `("2-27",)`."""
        return as_spans(self.expert_layers)

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Columns of all queries, and rows of the output projection; with latent attention, the latter only."""
        return self.heads * (self.head_size if self.latent is None else self.latent.value_head_size)

    @property
    def qkv_width(self) -> int:
        """Columns of the fused QKV projection over all tensor-parallel ranks: (a + 2g)d."""
        return self.query_width + 2 * self.kv_groups * self.head_size

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "quick_geglu")

    @property
    def seen(self) -> float:
        return 1.0 if self.window is None else self.window.seen(self.seq)

    @property
    def fc1_width(self) -> int:
        """Columns of the first MLP GEMM over all tensor-parallel ranks: H, or 2H if gated."""
        return 2 * self.ffn if self.gated else self.ffn

    def norm_parameters(self, width: int | None = None) -> int:
        return (width or self.hidden) * (2 if self.norm == "layernorm" else 1)
