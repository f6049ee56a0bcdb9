"""From observation leaves of any kind to one feature vector per row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from hpcrl.nets.torso import MLP, Activation, ImpalaResNet, NatureCNN, SmallCNN
from hpcrl.specs import ObservationLeaf

Torso = Literal["mlp", "small_cnn", "nature_cnn", "impala_resnet"]
_ImageTorso = SmallCNN | NatureCNN | ImpalaResNet
_TORSOS: dict[str, type[_ImageTorso]] = {
    "small_cnn": SmallCNN,
    "nature_cnn": NatureCNN,
    "impala_resnet": ImpalaResNet,
}


class OneHot(nn.Module):
    """One-hot code of components with their own numbers of categories, side by side.

    Attributes:
      output_size: sum of the numbers of categories.
    """

    _first: Tensor

    def __init__(self, nvec: Sequence[int]):
        super().__init__()
        self.output_size = sum(nvec)
        counts = torch.tensor(nvec, dtype=torch.int64)
        self.register_buffer("_first", counts.cumsum(0) - counts, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `<float32>[..., output_size]` for categories `[..., len(nvec)]`."""
        code = torch.zeros(*x.shape[:-1], self.output_size, device=x.device)
        return code.scatter_(-1, x.long() + self._first, 1.0)


class ObservationEncoder(nn.Module):
    """Images through a convolutional torso each, everything else flattened; then dense layers.

    Discrete leaves become one-hot, bytes are divided by 255, flags and other numbers are taken as
    they are. With the mlp torso images are flattened, too.

    Attributes:
      output_size: features per row.
    """

    def __init__(
        self,
        leaves: Mapping[str, ObservationLeaf],
        torso: Torso,
        hidden_sizes: Sequence[int],
        activation: Activation,
    ):
        """Build the torsos.

        Args:
          leaves: of the observation, by path.
          torso: of the images.
          hidden_sizes: of the dense layers.
          activation: of the dense layers.

        Raises:
          ValueError: there is no image for a convolutional torso, or it is too small.
        """
        super().__init__()
        self._leaves = dict(leaves)
        self._images = {
            path: _image_axes(leaf)
            for path, leaf in leaves.items()
            if torso != "mlp" and _is_image(leaf)
        }
        if torso != "mlp" and not self._images:
            shapes = {path: leaf.seen.shape for path, leaf in leaves.items()}
            raise ValueError(
                f"network.torso is {torso}, but no leaf of the observation is an image: {shapes}; "
                "use mlp"
            )
        # Paths may hold dots, which names of submodules must not: numbered in leaf order.
        self.torsos = nn.ModuleList(
            _image_torso(torso, leaves[path], axes) for path, axes in self._images.items()
        )
        self.one_hots = nn.ModuleList(
            OneHot(leaf.nvec * leaf.stack) for leaf in leaves.values() if leaf.kind == "discrete"
        )
        size = sum(module.output_size for module in (*self.torsos, *self.one_hots))
        size += sum(
            leaf.stack * math.prod(leaf.seen.shape)
            for path, leaf in leaves.items()
            if path not in self._images and leaf.kind != "discrete"
        )
        self.dense = MLP(size, hidden_sizes, activation)
        self.output_size = self.dense.output_size

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Return features `[T * B, output_size]` for leaves `[T, B, ...]` by path."""
        torsos, one_hots = iter(self.torsos), iter(self.one_hots)
        features = []
        for path, leaf in self._leaves.items():
            x = observation[path].flatten(0, 1)
            if leaf.bits:
                x = unpack_bits(x, leaf.bits)
            if path in self._images:
                features.append(next(torsos)(_channels_first(x, leaf, self._images[path])))
            elif leaf.kind == "discrete":
                features.append(next(one_hots)(x.flatten(1) if x.dim() > 1 else x[:, None]))
            else:
                x = x.reshape(len(x), -1)
                is_bytes = leaf.kind == "box" and x.dtype == torch.uint8
                features.append(x.float() / 255 if is_bytes else x.float())
        return self.dense(features[0] if len(features) == 1 else torch.cat(features, -1))


def _is_image(leaf: ObservationLeaf) -> bool:
    num_axes = len(leaf.seen.shape)
    return leaf.kind != "discrete" and (
        num_axes == 3 or (num_axes == 2 and leaf.seen.dtype == "uint8")
    )


def _image_axes(leaf: ObservationLeaf) -> Literal["HW", "HWC", "CHW"]:
    """Return the axes of one frame: of three, the smaller of the outer two are the channels."""
    shape = leaf.seen.shape
    if len(shape) == 2:
        return "HW"
    return "HWC" if shape[2] <= shape[0] else "CHW"


def _image_torso(torso: Torso, leaf: ObservationLeaf, axes: str) -> _ImageTorso:
    sizes = {"C": 1, **dict(zip(axes, leaf.seen.shape, strict=True))}
    is_bytes = leaf.kind == "box" and leaf.array.dtype == "uint8"
    scale = 1 / 255 if is_bytes else 1.0
    return _TORSOS[torso](sizes["C"] * leaf.stack, sizes["H"], sizes["W"], scale)


def _channels_first(x: Tensor, leaf: ObservationLeaf, axes: str) -> Tensor:
    """Return `[N, stack * C, H, W]`, a view where the memory allows it."""
    if leaf.stack == 1:
        x = x[:, None]  # [N, 1, *frame]
    if axes == "HW":
        return x
    if axes == "HWC":
        x = x.movedim(-1, 2)
    return x.flatten(1, 2)


def unpack_bits(packed: Tensor, bits: Sequence[int]) -> Tensor:
    """Return the flags `<uint8>[..., *bits]` of `<uint8>[..., n]`; undoes `numpy.packbits`."""
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    flags = (packed[..., None] >> places) & 1  # [..., n, 8]
    return flags.flatten(-2)[..., : math.prod(bits)].reshape(*packed.shape[:-1], *bits)
