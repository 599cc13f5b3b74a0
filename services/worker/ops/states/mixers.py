"""Mixers with states between their two projections, and where the states of sequences lie. Knows tensors alone."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StateSpace(NamedTuple):
    """A Mamba-2 mixer between its two projections: H heads of P elements in G groups, N numbers of state for each
    element. Tensors are float32 and on the device."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_weight: Tensor
    """[K, C], C = H * P + 2 * G * N channels: what each token of the window is multiplied with, the oldest first."""
    conv_bias: Tensor
    """[C]"""
    decay: Tensor
    """[H] the continuous A, negative."""
    skip: Tensor
    """[H] the paper's D: how much of a head's input is in its output as it is."""
    step_bias: Tensor
    """[H] what is added to time steps before the softplus."""
    norm: Tensor | None
    """[H * P]; None: outputs are only gated, as the norm goes over other ranks' heads, too."""
    eps: float
    lightning: bool = False
    """Lightning attention: values, keys and queries are the paper's x, B and C. They go through the SiLU behind the
    convolution, which sees one token as it is; time steps are 1, and outputs are neither gated nor normed here."""

    @property
    def gates(self) -> int:
        """Elements of a row that stand before what the convolution sees."""
        return 0 if self.lightning else self.heads * self.head_dim


class DeltaNet(NamedTuple):
    """A gated delta net between its two projections: H heads of P elements of values; G heads of N elements of keys and
    queries, each shared by neighbouring heads of values. Tensors are float32 and on the device."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_weight: Tensor
    """[K, C], C = H * P + 2 * G * N channels, of values, keys and queries: as a state space's."""
    conv_bias: Tensor
    """[C]"""
    decay: Tensor
    """[H] negative: what a time step is multiplied with."""
    step_bias: Tensor
    """[H] what is added to time steps before the softplus; [H, N]: each element of a key has a time step of its own,
    and a sigmoid gates what the net gives (Kimi Delta Attention)."""
    norm: Tensor
    """[P]"""
    eps: float
    most_written: float = 1.0
    """How much of what is missing is written at the most: what a sigmoid is multiplied with."""
    lower_bound: float | None = None
    """Of a net whose elements have time steps: the logarithm of what is left of one at the least, negative. A sigmoid
    is multiplied with it then, in the softplus's place (Ling 3). None: there is no bound."""
    sigmoid_gated: bool = False
    """A sigmoid gates what the net gives where heads have one time step each, too (Qwen4), which whoever asks for
    `StateOps.mix` sees to: that gates by a SiLU there."""

    @property
    def gates(self) -> int:
        """Elements of a row that stand before what the convolution sees."""
        return self.heads * self.head_dim

    @property
    def by_element(self) -> bool:
        """Whether each element of a key is forgotten at a rate of its own; G is H then."""
        return self.step_bias.dim() == 2


class ShortConvolution(NamedTuple):
    """A short convolution of C channels: gated, between its two projections; or that of a selective space. Tensors are
    float32 and on the device."""

    conv_weight: Tensor
    """[K, C]: as a state space's."""
    conv_bias: Tensor
    """[C]"""
    gated: bool = True
    """Else what it gives goes through a SiLU."""

    @property
    def heads(self) -> int:
        """Each channel is computed by itself."""
        return self.conv_weight.shape[1]

    @property
    def head_dim(self) -> int:
        """A channel is one element."""
        return 1

    @property
    def state_dim(self) -> int:
        """There is no state but the convolution's window."""
        return 0


class SelectiveSpace(NamedTuple):
    """A Mamba-1 mixer of C channels with states of N numbers. Between its convolution, a mixer of its own, and the
    states are products with weights. Tensors are float32 and on the device."""

    conv_weight: Tensor
    """[K, C]: as a state space's."""
    conv_bias: Tensor
    """[C]"""
    decay: Tensor
    """[C, N] the continuous A, negative."""
    skip: Tensor
    """[C]"""
    step_bias: Tensor
    """[C] what is added to time steps before the softplus."""

    @property
    def convolution(self) -> ShortConvolution:
        """What comes first."""
        return ShortConvolution(self.conv_weight, self.conv_bias, gated=False)

    @property
    def heads(self) -> int:
        """Each channel has its own state."""
        return self.decay.shape[0]

    @property
    def head_dim(self) -> int:
        """A channel is one element."""
        return 1

    @property
    def state_dim(self) -> int:
        """Numbers of a channel's state."""
        return self.decay.shape[1]


class RecurrentUnit(NamedTuple):
    """A real-gated linear recurrent unit (RG-LRU: De et al., "Griffin", arXiv:2402.19427) of C channels that each keep
    one number. Between its convolution, a mixer of its own, and the recurrence are products with weights. Tensors are
    float32 and on the device."""

    conv_weight: Tensor
    """[K, C]: as a state space's."""
    conv_bias: Tensor
    """[C]"""
    decay: Tensor
    """[C] negative: the logarithm of what is left of a state at the least."""

    @property
    def convolution(self) -> ShortConvolution:
        """What comes first, between two gates that are open."""
        return ShortConvolution(self.conv_weight, self.conv_bias)

    @property
    def heads(self) -> int:
        """Each channel has its own state."""
        return self.conv_weight.shape[1]

    @property
    def head_dim(self) -> int:
        """A channel is one element."""
        return 1

    @property
    def state_dim(self) -> int:
        """Numbers of a channel's state."""
        return 1


StateMixer = StateSpace | DeltaNet | ShortConvolution | SelectiveSpace | RecurrentUnit


class StateCache(NamedTuple):
    """One layer's states, by slot, in float32."""

    windows: Tensor
    """[slots, K - 1, C] the last inputs of the convolution, the oldest first."""
    states: Tensor
    """[slots, H, P, N]"""
