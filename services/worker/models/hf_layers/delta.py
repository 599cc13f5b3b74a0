"""The sizes of gated delta nets, and which architectures have some. No torch."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from shared.models.image_models import QWEN3_5

SEEING_ARCHITECTURES = dict(zip(QWEN3_5, ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), strict=True))
"""Those with a vision tower, and what their language models are."""

OLMO_HYBRID = "OlmoHybridForCausalLM"
KIMI_LINEAR = "KimiLinearForCausalLM"
LING_3 = ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM")
"""As `transformers` calls it, and as it is published."""
GLM_NEXT = "Glm5NextForCausalLM"
"""As the language model within the published whole is called here: the library has no class of it alone."""
QWEN4 = "Qwen4ExpForCausalLM"
DELTA_ARCHITECTURES = (
    *("Qwen3NextForCausalLM", *SEEING_ARCHITECTURES.values(), *SEEING_ARCHITECTURES),
    *(OLMO_HYBRID, KIMI_LINEAR, *LING_3),
)
"""Those whose layers, or most of them, have a state in place of keys and values."""


class DeltaConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A gated delta net (Yang et al., "Gated Delta Networks", arXiv:2412.06464): a causal convolution, and heads that
    each keep a state of `head_dim` times `state_dim` numbers, a memory of values by keys."""

    heads: int
    """Of values, each with a state of its own."""
    head_dim: int
    """Elements of a value."""
    groups: int
    """Heads of queries and keys, each shared by as many neighbouring heads of values."""
    state_dim: int
    """Elements of a query or a key."""
    kernel: int
    """Tokens that the convolution sees, the newest included."""
    most_written: int = 1
    """How much of what is missing is written at the most; with 2 a state's eigenvalues may be negative
    (arXiv:2411.12537)."""
    norm_eps: float | None = None
    """Of the norm behind it; None: as the model's other norms."""
    gate_rank: int | None = None
    """Kimi Delta Attention (arXiv:2510.26692): each element of a key is forgotten at a rate of its own, and a sigmoid
    gates what comes out. Rates and gates are each made of so many numbers that a row is projected to. None: a head has
    one rate, and a SiLU gates; a row is projected to both."""
    element_rates: bool = False
    """The same without these few numbers (Ling 3): a row is projected to rates of elements and to gates."""
    lower_bound: float | None = None
    """See `DeltaNet`."""
    sigmoid_gated: bool = False
    """See `DeltaNet`."""

    @property
    def by_element(self) -> bool:
        """Whether each element of a key is forgotten at a rate of its own."""
        return self.gate_rank is not None or self.element_rates

    @property
    def kind(self) -> str:
        """What such layers are called, for errors."""
        return "gated delta nets"

    @property
    def inner(self) -> int:
        """Elements of all heads' values."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of all heads' keys, and as many of queries."""
        return self.groups * self.state_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.inner + 2 * self.keys

    @property
    def projected(self) -> int:
        """What a row is projected to: the convolution's channels, and the gate and two numbers of each head, or what
        gates and rates are made of and one number of each head, or these themselves and that."""
        if self.gate_rank is not None:
            return self.conv_dim + 2 * self.gate_rank + self.heads
        if self.element_rates:
            return self.inner + self.conv_dim + self.keys + self.heads
        return self.inner + self.conv_dim + 2 * self.heads

    @property
    def state_elements(self) -> int:
        """Numbers that one layer keeps of a sequence, however long that is."""
        return (self.kernel - 1) * self.conv_dim + self.inner * self.state_dim

    def parameters(self, hidden: int) -> int:
        """Weights of one layer's matrices."""
        return hidden * (self.projected + self.inner) + (self.gate_rank or 0) * (self.inner + self.keys)

    def share(self, heads: int, groups: int) -> DeltaConfig:
        """The sizes of so many heads in so many groups."""
        return replace(self, heads=heads, groups=groups)
