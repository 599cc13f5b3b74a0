"""The sizes of Mamba-2 layers, and which architectures have some. No torch."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

MAMBA_ARCHITECTURES = (
    *("Mamba2ForCausalLM", "BambaForCausalLM", "GraniteMoeHybridForCausalLM"),
    *("NemotronHForCausalLM", "FalconH1ForCausalLM"),
)
"""Those whose layers, or some of them, have a state in place of keys and values."""


class Multipliers(Struct, frozen=True, kw_only=True):
    """What is multiplied by a number of its own in every layer (muP: Yang et al., arXiv:2203.03466)."""

    mixer_inputs: tuple[float, float, float, float, float]
    """What a mixer's row is projected to, as `MambaConfig.parts` has it."""
    mixer_output: float
    attention_inputs: tuple[float, float, float]
    """Queries, keys, values."""
    attention_output: float
    gate: float
    """Of an MLP, before it is activated."""
    down: float


class MambaConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A Mamba-2 mixer (Dao and Gu, "Transformers are SSMs", arXiv:2405.21060): a causal convolution, and heads that
    each keep a state of `head_dim` times `state_dim` numbers of all tokens before."""

    heads: int
    head_dim: int
    groups: int
    """Of neighbouring heads, which share what writes to and reads from their states (the paper's B and C)."""
    state_dim: int
    kernel: int
    """Tokens that the convolution sees, the newest included."""
    conv_bias: bool
    bias: bool
    """Whether the projections into and out of the mixer have one."""
    normed: bool = True
    """Whether what heads give is normed in groups, and not gated alone."""

    @property
    def kind(self) -> str:
        """What such layers are called, for errors."""
        return "state-space layers"

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: the heads' inputs, then each group's B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def projected(self) -> int:
        """What a row is projected to: the gate, the convolution's channels, and each head's time step."""
        return self.inner + self.conv_dim + self.heads

    @property
    def state_elements(self) -> int:
        """Numbers that one layer keeps of a sequence, however long that is."""
        return (self.kernel - 1) * self.conv_dim + self.inner * self.state_dim

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """What a row is projected to, by what it is for: the gate, inputs, B and C of all groups, time steps."""
        shared = self.groups * self.state_dim
        return self.inner, self.inner, shared, shared, self.heads

    def parameters(self, hidden: int) -> int:
        """Weights of one layer's matrices."""
        return hidden * (self.projected + self.inner)

    def share(self, heads: int, groups: int) -> MambaConfig:
        """The sizes of so many heads in so many groups."""
        return replace(self, heads=heads, groups=groups)
