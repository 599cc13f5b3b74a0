"""Reads one layer's gated short convolution from a checkpoint, or a rank's share of it."""

from __future__ import annotations

from torch import Tensor

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import ConvolutionConfig
from services.worker.models.states.mixer_loading import MixerLoader, channel_outputs
from services.worker.ops.interface import ShortConvolution


class ConvolutionLoader(MixerLoader[ConvolutionConfig]):
    """Of LFM2."""

    @property
    def own_outputs(self) -> Tensor:
        """The gate before the convolution, that behind it, its input."""
        return channel_outputs(self.sizes.heads, self.shard, 3)

    def mixer(self) -> ShortConvolution:
        """All that is between them."""
        sizes, tensors, own = self.sizes, self.matrices.checkpoint, slice(*self.shard.heads)
        name, channels = f"{self.name}.conv", sizes.heads
        weight = read_exactly(tensors, f"{name}.weight", (channels, 1, sizes.kernel))[own]
        bias = read_exactly(tensors, f"{name}.bias", (channels,))[own] if sizes.bias else weight.new_zeros(())
        return ShortConvolution(
            conv_weight=weight.squeeze(1).t().contiguous().to(self.device),
            conv_bias=bias.expand(len(weight)).contiguous().to(self.device),
        )
