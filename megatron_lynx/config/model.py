"""The model, as a job file states it: what a GPT is made of, and whose layers and kernels it is made with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

from pydantic import Field, model_validator

from megatron_lynx.anatomy import Facts, Half, LayerKind, Section, halves_of, sections_of
from megatron_lynx.config.cluster import AttentionKernel
from megatron_lynx.config.experts import BALANCED, Experts, as_spans
from megatron_lynx.config.host_time import Implementation
from megatron_lynx.config.opaque import Opaque
from megatron_lynx.fp8_recipes import Recipe
from megatron_lynx.kinds.captured import CapturedModule
from megatron_lynx.kinds.experts.section import Dispatcher
from megatron_lynx.kinds.latent.sizes import LatentSizes
from megatron_lynx.kinds.opaque.section import OpaqueName
from megatron_lynx.kinds.sections import KindName
from megatron_lynx.validation import Part

Fusion = Literal["bias_dropout", "bias_activation", "rope", "masked_softmax"]
"""Bias, dropout and residual addition (`--no-bias-dropout-fusion` switches it off); bias and activation (`--no-bias-gelu-fusion`,
`--no-bias-swiglu-fusion`); rotary positions, with a kernel of Transformer Engine's (`--no-rope-fusion`); mask and softmax of
local layers' scores (`--no-masked-softmax-fusion`)."""


LISTED = ("fusions", "kinds", "opaque", "captured")
"""Keys of a model that are lists in a file."""


class Fp8(Part):
    """Megatron's `--fp8-format`, `--fp8-recipe` and `--fp8-param-gather`; or `--fp4-format`, `--fp4-recipe`."""

    format: Literal["hybrid", "e4m3", "e2m1"] = "hybrid"
    """hybrid: E4M3, but gradients in E5M2. e2m1: FP4, of recipe nvfp4."""
    recipe: Recipe = "delayed"
    parameters: bool = False
    """Whether the linears' weights themselves are held in FP8 (`--fp8-param-gather`), and gathered so by the distributed
    optimizer. Otherwise they stay in the model's type, and have copies in FP8."""
    first_in_bf16: int = Field(default=0, ge=0)
    """How many layers from the first on compute in bf16 (`--first-last-layers-bf16`, `--num-layers-at-start-in-bf16`)."""
    last_in_bf16: int = Field(default=0, ge=0)
    """How many up to the last one do (`--num-layers-at-end-in-bf16`)."""
    copies_kept: bool | None = None
    """Whether a checkpointed half keeps the copy that its last linear has of what it reads, so that this linear need not run
    again. None: a plan does what is faster."""

    @model_validator(mode="before")
    @classmethod
    def _usual_format(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("recipe") == "nvfp4":
            return {"format": "e2m1", **data}
        return data

    @model_validator(mode="after")
    def _fp4(self) -> Fp8:
        if (self.format == "e2m1") != (self.recipe == "nvfp4"):
            raise ValueError(f"format e2m1 and recipe nvfp4 need each other, found {self.format} and {self.recipe}")
        return self


class Window(Part):
    """Attention that sees a window. Seconds and FLOPs of the core attention are the mean of all layers'."""

    keys: int = Field(ge=1)
    """How many keys a query sees, its own among them."""
    share: float = Field(default=1.0, ge=0, le=1)
    """Share of the layers in which that is so; in the others it sees all."""

    def seen(self, seq: int) -> float:
        """Pairs of queries and keys in the mean of all layers, over those that a causal mask leaves of a sequence."""
        keys = min(self.keys, seq)
        return 1 - self.share + self.share * keys * (2 * seq - keys + 1) / (seq * (seq + 1))


class Model(Part):
    """A decoder-only transformer in Megatron's terms. Sizes count elements, not bytes."""

    layers: int = Field(ge=1, le=1_000)
    """Transformer layers in the whole model (L)."""
    hidden: int = Field(ge=1)
    """Width of the residual stream (h)."""
    ffn: int = Field(ge=1)
    """Width between the two GEMMs of the MLP (H); with SwiGLU, of each of the two halves."""
    heads: int = Field(ge=1)
    """Attention heads (a)."""
    kv_groups: int = Field(ge=1)
    """Key/value heads (g); equal to `heads` without grouped-query attention."""
    vocab: int = Field(ge=1)
    """Entries of the embedding table (V). Megatron pads them to a multiple of 128 x tensor: write that number to count them."""
    seq: int = Field(ge=1)
    """Tokens of one sequence (s)."""
    kv_channels: int | None = Field(default=None, ge=1)
    """Width of a head (d), as Megatron's `--kv-channels`. None: hidden / heads."""
    activation: Literal["gelu", "swiglu", "quick_geglu", "squared_relu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    position: Literal["learned", "rope"] = "learned"
    """Default: rope with rmsnorm, as Llama-like models have them, and with latent attention, else learned."""
    bias: bool = True
    """Whether the linear layers have biases."""
    attention: Literal["flash", "unfused"] = "flash"
    """`unfused` keeps the s x s scores (Megatron's local DotProductAttention)."""
    attention_kernel: AttentionKernel = "usual"
    """Whose fused kernels: those that Transformer Engine takes on these GPUs (cuDNN's on Hopper and later), or FlashAttention-2's
    (`--attention-backend flash`, or NVTE_FUSED_ATTN=0)."""
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    hidden_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    implementation: Implementation = "local"
    """Whose layers (Megatron's `--transformer-impl`): with Transformer Engine the norms are made inside `linear_qkv` and
    `linear_fc1`, with its own kernels."""
    qk_norm: bool = False
    """Whether queries and keys are normed, head by head (Megatron's `--qk-layernorm`), as `norm` says."""
    fusions: tuple[Fusion, ...] | None = None
    """Megatron's fusions that the launch has on: layers are measured and compared with them, and estimated by them. None: what
    Megatron has on if nothing is said, on GPUs; on CPU ranks none."""
    glu_offset: bool = True
    """Whether a gated activation that is not fused adds an offset to its linear half (of SwiGLU 0), as it does since 0.14."""
    activation_clamped: bool = False
    """Whether a gated activation is handed clamped values (`--activation-func-clamp-value`)."""
    window: Window | None = None
    """What queries see of the keys before them, in some layers (`--window-size`). None: all, in every layer."""
    sinks: bool = False
    """Whether each head's softmax has a logit more, which is learned (`--softmax-type learnable`)."""
    cross_entropy: Literal["unfused", "native", "te"] = "unfused"
    """Whose kernels compute the loss: one for each operator, those that Megatron fuses (`--cross-entropy-loss-fusion`), or
    Transformer Engine's (`--cross-entropy-fusion-impl te`)."""
    deterministic: bool = False
    """Whether kernels are asked for that add up in one order (`--deterministic-mode`): fused attention's backward is slower, and
    holds more, by `cluster.ordered_attention`. A measured profile has what was measured."""
    tied_embeddings: bool = False
    """Whether input and output embedding share their weight."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Type of weights in forward and backward, and of activations."""
    fp8: Fp8 | None = None
    """The format in which the layers' linears compute, if not in `dtype`."""
    latent: LatentSizes | None = None
    """The sizes of multi-latent attention (Megatron's `--multi-latent-attention`); `kv_channels` then matters to nothing, and
    `qk_norm` is of what was compressed. None: the usual attention."""
    experts: Experts | None = None
    """What some layers, or all, have in place of an MLP; `ffn` is that of the others. None: no layer has experts."""

    mtp: int = Field(default=0, ge=0, le=64)
    """Layers of multi-token prediction (`--mtp-num-layers`): behind the last layer and like it, on the last stage, each with a
    projection, norms and a loss of its own. No plan treats them: they keep everything."""

    opaque: tuple[Opaque, ...] = ()
    """Halves of some layers that nobody looks into: plans keep them whole. Of one layer and half the first one that names it."""

    captured: tuple[CapturedModule, ...] = ()
    """The modules of every layer that run as captured graphs (`--cuda-graph-impl transformer_engine`): plans keep them whole."""

    kinds: tuple[KindName, ...] = ()
    """Kinds of what fills a half, in every layer, that no other key speaks of (`megatron_lynx.kinds`)."""

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, data: Any) -> Any:
        """A file's list is checked as Python's, once somebody has looked at its data."""
        if not isinstance(data, dict):
            return data
        return {
            **data,
            **{name: tuple(data[name]) for name in LISTED if isinstance(data.get(name), list)},
        }

    @model_validator(mode="before")
    @classmethod
    def _usual_position(cls, data: Any) -> Any:
        if isinstance(data, dict) and "position" not in data:
            rotary = data.get("norm") == "rmsnorm" or data.get("latent") is not None
            return {**data, "position": "rope" if rotary else "learned"}
        return data

    @model_validator(mode="after")
    def _divisible(self) -> Model:
        problems = []
        if self.kv_channels is None and self.latent is None and self.hidden % self.heads:
            problems.append(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.heads % self.kv_groups:
            problems.append(f"heads ({self.heads}) must be a multiple of kv_groups ({self.kv_groups})")
        for name, found, needed in (("implementation", self.implementation, "transformer_engine"), ("dtype", self.dtype, "bf16")):
            if self.fp8 is not None and found != needed:
                problems.append(f"fp8 needs {name} {needed}, found {found}")
        if self.deterministic and self.cross_entropy != "unfused":
            problems.append(f"deterministic true needs cross_entropy unfused, found {self.cross_entropy}, as Megatron refuses it")
        if self.sinks and self.latent is not None:
            problems.append("sinks go with no latent attention, found both")
        if self.activation_clamped and not self.gated:
            problems.append(f"activation_clamped needs activation swiglu or quick_geglu, found {self.activation}")
        problems += self._beside_latents()
        named = [each.kind for each in self.opaque]
        problems += [f"opaque has {kind} twice, needed once" for kind in dict.fromkeys(named) if named.count(kind) > 1]
        for at, opaque in enumerate(self.opaque):
            if (number := opaque.beyond(self.layers)) is not None:
                problems.append(f"opaque.{at}.layers has {number}, but the model has layers 1-{self.layers}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _beside_latents(self) -> Iterator[str]:
        """What a model with latent attention cannot have beside it."""
        if self.latent is None:
            return
        if self.kv_groups != self.heads:
            yield f"latent needs kv_groups {self.heads} (heads), found {self.kv_groups}: there are keys for every head"
        if self.position != "rope":
            yield f"latent needs position rope, found {self.position}"

    @property
    def facts(self) -> Facts:
        """What decides which kinds fill the halves of layers without experts."""
        copies_go = self.fp8 is not None and not self.fp8.copies_kept
        return Facts(te=self.uses_te, latent=self.latent, kinds=self.kinds, captured=self.captured, copies_go=copies_go)

    @property
    def halves(self) -> Mapping[Half, Section]:
        """What fills the halves of a layer without experts."""
        return halves_of(self.facts)

    @property
    def every_section(self) -> tuple[Section, ...]:
        """Every content of a half that some layer has, the usual ones first, whether a layer has them or not."""
        mixture = () if self.experts is None else (self.kind_sections(experts=True)[1],)
        return (*self.halves.values(), *mixture, *dict.fromkeys(each.section for each in self.opaque))

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation element."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def uses_te(self) -> bool:
        """Whether the layers are Transformer Engine's."""
        return self.implementation == "transformer_engine"

    def fuses(self, fusion: Fusion) -> bool:
        """Whether this fusion is on, on GPUs."""
        return self.fusions is None or fusion in self.fusions

    @property
    def fuses_rotary(self) -> bool:
        """Whether one kernel turns queries and keys."""
        return self.fuses("rope") if self.latent is None else self.latent.fused_rotary

    @property
    def fuses_activation(self) -> bool:
        """Whether the activation and the bias before it are one kernel. Megatron has none for squared ReLU with a bias."""
        if self.activation == "squared_relu":
            return not self.bias
        return self.fuses("bias_activation")

    @property
    def fp8_recipe(self) -> Recipe | None:
        return None if self.fp8 is None else self.fp8.recipe

    @property
    def first_in_bf16(self) -> range:
        """The layers, by number, that compute in bf16 at the beginning of a model in FP8."""
        return range(1, 1 + (0 if self.fp8 is None else self.fp8.first_in_bf16))

    @property
    def last_in_bf16(self) -> range:
        """The same at its end."""
        return range(self.layers + 1 - (0 if self.fp8 is None else self.fp8.last_in_bf16), self.layers + 1)

    @property
    def fp8_parameters(self) -> bool:
        """Whether the linears' weights are held in FP8."""
        return self.fp8 is not None and self.fp8.parameters

    @property
    def expert_layers(self) -> frozenset[int]:
        """Numbers (from 1) of the layers whose MLP half is a mixture of experts."""
        return frozenset() if self.experts is None else self.experts.numbers(self.layers)

    @property
    def shared_experts(self) -> bool:
        """Whether layers of experts have shared ones, which every token passes."""
        return self.experts is not None and self.experts.shared_ffn > 0

    @property
    def moe_dispatcher(self) -> Dispatcher:
        """Who brings tokens to experts on other ranks."""
        return "alltoall" if self.experts is None else self.experts.dispatcher

    @property
    def moe_delayed(self) -> bool:
        """Whether gradients of weights are nodes of their own beside overlapped exchanges."""
        return self.experts is not None and self.experts.overlapped and self.experts.delayed

    @property
    def moe_overlapped(self) -> bool:
        """Whether tokens travel beside the computing of another micro-batch, in Megatron's combined schedule."""
        return self.experts is not None and self.experts.overlapped

    @property
    def experts_whole(self) -> bool:
        """Whether plans keep all of the halves that have experts, on the device."""
        return self.experts is not None and self.experts.whole

    @property
    def moe_load(self) -> float:
        """The load of the fullest rank's experts for which bytes are counted."""
        return BALANCED if self.experts is None else self.experts.held_load

    def sections(self, layer: int) -> LayerKind:
        """What fills the halves of a layer (its number from 1), in the order of a forward."""
        return self.each_kind([layer])[0]

    def each_kind(self, layers: Iterable[int]) -> list[LayerKind]:
        """The same of every one of these layers."""
        contents = [
            (layer in self.expert_layers, tuple(each.kind for each in self.opaque if layer in each.numbers(self.layers)))
            for layer in layers
        ]
        kinds = {content: self.kind_sections(experts=content[0], opaque=content[1]) for content in set(contents)}
        return [kinds[content] for content in contents]

    def kind_sections(self, *, experts: bool, opaque: tuple[OpaqueName, ...] = ()) -> LayerKind:
        """The same of one of its kinds of layers."""
        return sections_of(
            self.facts._replace(
                experts=experts,
                shared_experts=self.shared_experts,
                dispatcher=self.moe_dispatcher,
                overlapped=self.moe_overlapped,
                opaque=opaque,
            )
        )

    def kinds_of(self, layers: Iterable[int]) -> Counter[LayerKind]:
        """How many layers of each kind there are among these."""
        return Counter(self.each_kind(layers))

    def opaque_in(self, section: Section) -> Opaque:
        """The figures of a half that nobody looks into."""
        return next(each for each in self.opaque if each.section is section)

    @property
    def alike(self) -> bool:
        """Whether all layers are of one kind."""
        return len(self.kinds_of(range(1, self.layers + 1))) == 1

    @property
    def opaque_layers(self) -> Mapping[OpaqueName, tuple[int | str, ...]]:
        """The layers of each kind that nobody looks into, as a plan writes them."""
        having: dict[OpaqueName, list[int]] = {}
        for layer in range(1, self.layers + 1) if self.opaque else ():
            for section in self.sections(layer):
                if section.opaque:
                    having.setdefault(cast("OpaqueName", section.name), []).append(layer)
        return {name: as_spans(numbers) for name, numbers in having.items()}

    @property
    def moe_layers(self) -> tuple[int | str, ...]:
        """The layers of experts as a plan writes them: `("2-27",)`."""
        return as_spans(self.expert_layers)

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Columns of all queries, and rows of the projection behind the attention: h, unless `kv_channels` says otherwise. Of
        latent attention, the rows of that projection alone."""
        return self.heads * (self.head_size if self.latent is None else self.latent.value_head_size)

    @property
    def qkv_width(self) -> int:
        """Columns of the fused QKV projection over all tensor-parallel ranks: (a + 2g)d."""
        return self.query_width + 2 * self.kv_groups * self.head_size

    @property
    def gated(self) -> bool:
        """Whether one half of what the first linear makes gates the other."""
        return self.activation in ("swiglu", "quick_geglu")

    @property
    def seen(self) -> float:
        """Pairs of queries and keys in the mean of all layers, over those that a causal mask leaves."""
        return 1.0 if self.window is None else self.window.seen(self.seq)

    @property
    def fc1_width(self) -> int:
        """Columns of the first MLP GEMM over all tensor-parallel ranks: H, or 2H where it is gated."""
        return 2 * self.ffn if self.gated else self.ffn

    def norm_parameters(self, width: int | None = None) -> int:
        """Parameters of one norm, of what is so wide: the residual stream where nothing is given."""
        return (width or self.hidden) * (2 if self.norm == "layernorm" else 1)
