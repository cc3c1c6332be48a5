"""Eleven small networks, each with one thing that makes cutting a graph hard."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.torch_bridge.zoo.specimen import integers, network, normal


def vectors(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 8),)


def labelled(rows: int) -> dict[str, Any]:
    return {"ids": integers(20, rows, 5)}


@network(lambda rows: (normal(rows, 8), torch.tensor(1.5)), name="two linears with a scalar")
class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any, scale: Any) -> Any:
        return self.second(self.first(x) * scale + 2.0) * scale


@network(vectors, name="one activation, three layers")
class SharedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.activation = nn.ReLU()

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


@network(vectors, name="fork and join")
class ForkJoin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        return self.head(torch.tanh(self.left(x)) + F.gelu(self.right(x)) * x)


@network(vectors, name="tied linear")
class TiedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@network(vectors, name="operators without parameters")
class NoParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = torch.sigmoid(self.first(x)).cumsum(-1).roll(1, -1)
        return self.second(torch.cat([y[:, :4] - y[:, 4:], y.flip(-1)[:, ::2]], -1)).exp()


@network(vectors, name="captured constant")
class Captured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.plain = torch.arange(8.0) / 8

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x) * self.plain) + torch.tensor([0.5, -0.5] * 4)


@network(labelled, name="embedding")
class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, ids: Any) -> Any:
        return F.cross_entropy(self.head(torch.tanh(self.body(self.embed(ids)))).flatten(0, 1), ids.flatten())


def _looped(x: torch.Tensor, layers: Any, times: int) -> torch.Tensor:
    for i in range(times):
        x = torch.relu(layers[i % len(layers)](x)) if i % 2 else layers[i % len(layers)](x) - i
    return x


@network(vectors, name="function with loop and branch")
class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return _looped(x, self.layers, 5 if x.shape[-1] == 8 else 2)


@network(
    lambda rows: {"x": normal(rows, 8), "target": normal(rows, 4, seed=1)}, name="loss inside, two inputs"
)
class LossInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(8, 8), nn.Linear(8, 4), nn.MSELoss()

    def forward(self, x: Any, target: Any) -> Any:
        return self.loss(self.second(torch.relu(self.first(x))), target)


@network(lambda rows: (normal(rows, 1, 28, 28),), name="lenet")
class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 8, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(128, 24), nn.Linear(24, 16), nn.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc3(F.relu(self.fc2(x))), -1)


class Product(torch.autograd.Function):
    """A linear layer whose weight learns at half the rate, and whose input sees a smooth activation."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return torch.relu(x @ weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad * torch.sigmoid(x @ weight.t())
        return grad @ weight, grad.t() @ x / 2


@network(vectors, name="backwards of its own")
class OwnBackwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = Product.apply(x, layer.weight) + layer.bias
        return x
