"""The sizes of Mamba-1 layers and of recurrent units, and which architectures have some. No torch."""

from __future__ import annotations

from services.worker.models.hf_layers.convolution import ChannelSizes

JAMBA = "JambaForCausalLM"
SELECTIVE_ARCHITECTURES = ("MambaForCausalLM", "FalconMambaForCausalLM", JAMBA)
"""Those whose layers, or most of them, have such a mixer in place of attention."""
RECURRENT_GEMMA = "RecurrentGemmaForCausalLM"


class SelectiveConfig(ChannelSizes, frozen=True, kw_only=True):
    """A Mamba-1 mixer (Gu and Dao, "Mamba", arXiv:2312.00752): a causal convolution, and channels that each keep a
    state of `state_dim` numbers of all tokens before. Time steps, and what writes to and reads from the states (the
    paper's B and C), are made of what the convolution gives."""

    state_dim: int
    kernel: int
    """Tokens that the convolution sees, the newest included."""
    step_rank: int
    """Numbers of a row that all channels' time steps are made of."""
    conv_bias: bool
    bias: bool
    """Whether the projections into and out of the mixer have one."""
    norm_eps: float | None
    """Time steps' numbers, B and C are RMS-normed each, with this; None: they are not."""
    norm_weights: bool
    """Whether these norms have weights."""

    @property
    def kind(self) -> str:
        """What such layers are called, for errors."""
        return "selective state-space layers"

    @property
    def projected(self) -> int:
        """What a row is projected to: the convolution's input, and the gate behind the states."""
        return 2 * self.heads

    @property
    def made(self) -> int:
        """What is made of a row behind the convolution: the time steps' numbers, B and C."""
        return self.step_rank + 2 * self.state_dim

    @property
    def state_elements(self) -> int:
        """Numbers that one layer keeps of a sequence, however long that is."""
        return self.heads * (self.kernel - 1 + self.state_dim)

    def parameters(self, hidden: int) -> int:
        """Weights of one layer's matrices."""
        return hidden * (self.projected + self.inner) + self.inner * (self.made + self.step_rank)


class RecurrentConfig(ChannelSizes, frozen=True, kw_only=True):
    """A recurrent block of Griffin (De et al., arXiv:2402.19427): a causal convolution, and channels that each keep one
    number of all tokens before, forgotten at a rate that the token says (RG-LRU). What says it, and how much of an
    input is taken, is made of a block of neighbouring channels. Both projections and the convolution have biases."""

    kernel: int
    """Tokens that the convolution sees, the newest included."""
    block: int
    """Channels of a block."""

    @property
    def kind(self) -> str:
        """What such layers are called, for errors."""
        return "recurrent units"

    @property
    def state_elements(self) -> int:
        """Numbers that one layer keeps of a sequence, however long that is."""
        return self.kernel * self.heads

    def parameters(self, hidden: int) -> int:
        """Weights of one layer's matrices."""
        return 3 * hidden * self.heads + 2 * self.block * self.heads
