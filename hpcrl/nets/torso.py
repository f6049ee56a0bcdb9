"""Feature extractors: dense layers, and three convolutional networks for images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Literal["relu", "tanh"]
_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)

HIDDEN_GAIN = math.sqrt(2)
"""Gain of the orthogonal initialization of every layer but the heads."""


def orthogonal(layer: _Layer, gain: float = HIDDEN_GAIN) -> _Layer:
    """Initialize a layer in place, orthogonal weight and zero bias, and return it."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Module):
    """Dense layers, each followed by the non-linearity; the identity when there are none.

    Attributes:
      output_size: features per row.
    """

    def __init__(self, input_size: int, hidden_sizes: Sequence[int], activation: Activation):
        super().__init__()
        sizes = [input_size, *hidden_sizes]
        self.layers = nn.ModuleList(
            orthogonal(nn.Linear(n_in, n_out)) for n_in, n_out in pairwise(sizes)
        )
        self._activation = torch.tanh if activation == "tanh" else F.relu_
        self.output_size = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Return `[N, output_size]` for `x` of `[N, input_size]`."""
        for layer in self.layers:
            x = self._activation(layer(x))
        return x


class ImageConv2d(nn.Conv2d):
    """First layer of an image network: takes raw pixels and multiplies them by a scale.

    The scale is applied to the weight, which is small, and not to the images; bfloat16 and
    float16 hold 0 .. 255 exactly. Images are rearranged to channels-last as bytes, before the
    one conversion to floating point.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int,
        padding: int,
        scale: float,
    ):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding)
        self._scale = scale

    def forward(self, image: Tensor) -> Tensor:
        """Return `[N, out_channels, ...]` for `image` of `[N, in_channels, H, W]`."""
        device = image.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.weight.dtype
        pixels = image.contiguous(memory_format=torch.channels_last).to(dtype)
        return self._conv_forward(pixels, self.weight * self._scale, self.bias)


def _flatten_channels_last(x: Tensor) -> Tensor:
    # A view when x is channels-last, where flatten(1) would copy.
    return x.permute(0, 2, 3, 1).flatten(1)


class NatureCNN(nn.Module):
    """The three convolutions of DQN (Mnih et al. 2015), without the dense layer.

    Attributes:
      output_size: features per row.
    """

    def __init__(self, channels: int, height: int, width: int, scale: float):
        """Build the layers.

        Args:
          channels: of an image; stacked frames are channels.
          height: pixels, at least 36.
          width: pixels, at least 36.
          scale: multiplies the pixels.

        Raises:
          ValueError: the image is too small.
        """
        super().__init__()
        if min(height, width) < 36:
            raise ValueError(
                f"network.torso nature_cnn: an image of {height}x{width} pixels is smaller than "
                "36x36, so nothing would be left after its three convolutions; use impala_resnet "
                "or mlp"
            )
        self.conv1 = orthogonal(ImageConv2d(channels, 32, 8, 4, 0, scale))
        self.conv2 = orthogonal(nn.Conv2d(32, 64, 4, 2))
        self.conv3 = orthogonal(nn.Conv2d(64, 64, 3, 1))
        for kernel_size, stride in ((8, 4), (4, 2), (3, 1)):
            height, width = (
                (height - kernel_size) // stride + 1,
                (width - kernel_size) // stride + 1,
            )
        self.output_size = 64 * height * width

    def forward(self, image: Tensor) -> Tensor:
        """Return `[N, output_size]` for `image` of `[N, channels, height, width]`."""
        x = F.relu_(self.conv1(image))
        x = F.relu_(self.conv2(x))
        x = F.relu_(self.conv3(x))
        return _flatten_channels_last(x)


class SmallCNN(nn.Module):
    """The one convolution of MinAtar's agents (Young & Tian 2019, arXiv:1903.03176, section 5).

    For images of a few cells, such as binary planes of 10x10; without the dense layer.

    Attributes:
      output_size: features per row.
    """

    def __init__(self, channels: int, height: int, width: int, scale: float):
        """Build the layer.

        Args:
          channels: of an image; stacked frames are channels.
          height: pixels, at least 3.
          width: pixels, at least 3.
          scale: multiplies the pixels.

        Raises:
          ValueError: the image is too small.
        """
        super().__init__()
        if min(height, width) < 3:
            raise ValueError(
                f"network.torso small_cnn: an image of {height}x{width} cells is smaller than "
                "3x3, so nothing would be left after its convolution; use mlp"
            )
        self.conv = orthogonal(ImageConv2d(channels, 16, 3, 1, 0, scale))
        self.output_size = 16 * (height - 2) * (width - 2)

    def forward(self, image: Tensor) -> Tensor:
        """Return `[N, output_size]` for `image` of `[N, channels, height, width]`."""
        return _flatten_channels_last(F.relu_(self.conv(image)))


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = orthogonal(nn.Conv2d(channels, channels, 3, padding=1))
        self.conv2 = orthogonal(nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu_(self.conv1(F.relu(x))))


class ImpalaResNet(nn.Module):
    """The deep residual network of IMPALA, arXiv:1802.01561, figure 3 (right), without its LSTM.

    Three sections of 16, 32 and 32 channels: convolution, max-pooling by 2, two residual
    blocks. The dense layer is left to the caller.

    Attributes:
      output_size: features per row.
    """

    def __init__(self, channels: int, height: int, width: int, scale: float):
        """Build the layers.

        Args:
          channels: of an image; stacked frames are channels.
          height: pixels.
          width: pixels.
          scale: multiplies the pixels.
        """
        super().__init__()
        sections: list[nn.Module] = []
        for out_channels in (16, 32, 32):
            first = (
                nn.Conv2d(channels, out_channels, 3, padding=1)
                if sections
                else ImageConv2d(channels, out_channels, 3, 1, 1, scale)
            )
            blocks = (_ResidualBlock(out_channels), _ResidualBlock(out_channels))
            sections.append(nn.Sequential(orthogonal(first), nn.MaxPool2d(3, 2, 1), *blocks))
            channels, height, width = out_channels, (height + 1) // 2, (width + 1) // 2
        self.sections = nn.Sequential(*sections)
        self.output_size = channels * height * width

    def forward(self, image: Tensor) -> Tensor:
        """Return `[N, output_size]` for `image` of `[N, channels, height, width]`."""
        return _flatten_channels_last(F.relu_(self.sections(image)))
