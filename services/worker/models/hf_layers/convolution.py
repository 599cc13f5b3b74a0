"""The sizes of short convolutions, and which architectures have some. No torch."""

from __future__ import annotations

from typing import Self

from msgspec import Struct
from msgspec.structs import replace

CONVOLUTION_ARCHITECTURES = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
"""Those whose layers, or most of them, have a convolution's window in place of keys and values."""
LFM3 = "Lfm3ForCausalLM"
"""So have its layers; norms and attention are others."""


class ChannelSizes(Struct, frozen=True, kw_only=True):
    """Of a mixer whose channels are computed each by itself: heads of one element, in groups of one."""

    heads: int
    """Channels."""

    @property
    def groups(self) -> int:
        """As many as channels: what they read in common, if anything, every rank has."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """A channel is one element."""
        return 1

    @property
    def inner(self) -> int:
        """Elements of all channels."""
        return self.heads

    def share(self, heads: int, _groups: int) -> Self:
        """The sizes of so many channels."""
        return replace(self, heads=heads)


class ConvolutionConfig(ChannelSizes, frozen=True, kw_only=True):
    """A gated short convolution (LFM2, arXiv:2511.23404): a causal convolution of each channel, with a gate before it
    and one behind. Its only state is the window of the convolution."""

    kernel: int
    """Tokens that the convolution sees, the newest included."""
    bias: bool
    """Whether the convolution and the projections around it have one."""

    @property
    def kind(self) -> str:
        """What such layers are called, for errors."""
        return "short convolutions"

    @property
    def projected(self) -> int:
        """What a row is projected to: the gate before the convolution, that behind it, and its input."""
        return 3 * self.heads

    @property
    def state_elements(self) -> int:
        """Numbers that one layer keeps of a sequence, however long that is."""
        return (self.kernel - 1) * self.heads

    def parameters(self, hidden: int) -> int:
        """Weights of one layer's matrices."""
        return hidden * (self.projected + self.inner)
