import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpcrl.nets.torso import MLP, ImpalaResNet, NatureCNN, SmallCNN


def images(num_rows=2, channels=4, height=84, width=84):
    generator = torch.Generator().manual_seed(0)
    shape = (num_rows, channels, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def in_memory_format(net, memory_format):
    for parameter in net.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
    return net


def channels_last(flat, channels, height, width):
    """Undo the channels-last flattening, for comparison."""
    return flat.unflatten(-1, (height, width, channels)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_nature_cnn_is_three_plain_convolutions_of_pixels_over_255(memory_format):
    net = in_memory_format(NatureCNN(4, 84, 84, 1 / 255), memory_format)
    assert net.output_size == 3136
    x = images().float() / 255
    for layer, stride in ((net.conv1, 4), (net.conv2, 2), (net.conv3, 1)):
        nn.init.normal_(layer.bias)
        x = F.relu(F.conv2d(x, layer.weight, layer.bias, stride))
    got = channels_last(net(images()), 64, 7, 7)
    torch.testing.assert_close(got, x, rtol=1e-4, atol=1e-4)


def test_small_cnn_is_one_plain_convolution():
    net = in_memory_format(SmallCNN(6, 10, 7, 1.0), torch.channels_last)
    assert net.output_size == 16 * 8 * 5
    nn.init.normal_(net.conv.bias)
    x = images(3, 6, 10, 7) & 1
    want = F.relu(F.conv2d(x.float(), net.conv.weight, net.conv.bias))
    torch.testing.assert_close(channels_last(net(x), 16, 8, 5), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="an image of 2x7 cells is smaller than 3x3"):
        SmallCNN(6, 2, 7, 1.0)


def plain_resnet(net, x):
    for section in net.sections:
        conv, pool, *blocks = section
        x = pool(F.conv2d(x, conv.weight, conv.bias, padding=1))
        for block in blocks:
            y = F.conv2d(F.relu(x), block.conv1.weight, block.conv1.bias, padding=1)
            x = x + F.conv2d(F.relu(y), block.conv2.weight, block.conv2.bias, padding=1)
    return F.relu(x)


def test_impala_resnet_equals_its_plain_form():
    net = in_memory_format(ImpalaResNet(3, 17, 30, 1 / 255), torch.channels_last)
    assert net.output_size == 32 * 3 * 4  # 17x30 -> 9x15 -> 5x8 -> 3x4
    x = images(2, 3, 17, 30)
    got = channels_last(net(x), 32, 3, 4)
    torch.testing.assert_close(got, plain_resnet(net, x.float() / 255), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [NatureCNN, ImpalaResNet])
def test_autocast_is_close_to_float32(kind):
    torch.manual_seed(0)
    net = in_memory_format(kind(4, 36, 36, 1 / 255), torch.channels_last)
    x = images(4, 4, 36, 36)
    with torch.autocast("cpu", torch.bfloat16):
        got = net(x)
    assert got.dtype == torch.bfloat16
    want = net(x)
    assert (got.float() - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("kind", [NatureCNN, ImpalaResNet])
def test_gradients_equal_finite_differences(kind):
    torch.manual_seed(0)
    net = kind(1, 36, 36, 1 / 255).double()
    x = images(1, 1, 36, 36)
    loss = net(x).sum()
    first = next(net.parameters())
    (gradient,) = torch.autograd.grad(loss, first)
    index = np.unravel_index(7, first.shape)
    with torch.no_grad():
        first[index] += 1e-6
    assert (net(x).sum() - loss).item() / 1e-6 == pytest.approx(gradient[index].item(), rel=1e-4)


def test_nature_cnn_refuses_small_images():
    with pytest.raises(ValueError, match="35x84"):
        NatureCNN(1, 35, 84, 1.0)


@pytest.mark.parametrize(("activation", "function"), [("relu", F.relu), ("tanh", torch.tanh)])
def test_mlp_equals_its_plain_form(activation, function):
    net = MLP(3, (5, 4), activation)
    x = torch.randn(6, 3)
    want = x
    for layer in net.layers:
        want = function(F.linear(want, *layer.parameters()))
    torch.testing.assert_close(net(x), want)
    assert net.output_size == 4


def test_weights_start_orthogonal_with_gain_sqrt_2():
    weight = MLP(8, (6,), "relu").get_parameter("layers.0.weight")
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(6), rtol=1e-5, atol=1e-5)


def test_mlp_without_layers_is_the_identity():
    x = torch.randn(2, 3)
    assert MLP(3, (), "relu")(x) is x
