"""Networks at random, of operators that keep a value channels-last and operators that do not."""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[torch.Tensor], torch.Tensor]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
ADAPTIVE_MAX_POOLS = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)


class Call(nn.Module):
    """A function as a module, with a parameter beside it."""

    def __init__(self, function: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape)) if shape else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) if self.weight is None else self.function(x, self.weight)


class OneByOne(nn.Module):
    """A convolution of the first image alone, without its batch dim, added to all."""

    def __init__(self, channels: int, space: int) -> None:
        super().__init__()
        self.conv = CONVOLUTIONS[space - 1](channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x[0])


class Tokens(nn.Module):
    """As transformers see an image: a row for every place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(channels), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(2).transpose(1, 2)
        return x + self.linear(self.norm(rows)).transpose(1, 2).reshape(x.shape)


class Permuted(nn.Module):
    """ConvNeXt's detour over the last dim."""

    def __init__(self, channels: int, space: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.there = (0, *range(2, space + 2), 1)
        self.back = (0, space + 1, *range(1, space + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(x.permute(self.there))).permute(self.back)


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.linear(x.flatten(2).mean(-1)).sigmoid()
        return x * gate.view(*x.shape[:2], *(1 for _ in x.shape[2:])).expand_as(x)


class Around(nn.Module):
    """A branch that ends beside its input, or on top of it."""

    def __init__(self, channels: int, space: int, joined: str) -> None:
        super().__init__()
        self.conv = CONVOLUTIONS[space - 1](channels, channels, 3, padding=1, bias=False)
        self.joined = joined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).relu()
        if self.joined == "add":
            return x + y
        if self.joined == "where":
            return torch.where(x > y, x, 2 * y)
        dim = {"channels": 1, "batch": 0, "last": -1}[self.joined]
        return torch.cat([x, y], dim).chunk(2, dim)[1] + torch.cat([y, x], dim).chunk(2, dim)[1]


def _shuffled(x: torch.Tensor) -> torch.Tensor:
    rows, channels, *space = x.shape
    return x.reshape(rows, 2, channels // 2, *space).transpose(1, 2).reshape(x.shape)


def _written(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, 0] = x[:, 1] * 2
    x[..., 0] += 1
    return x


def _peeled(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, 1:] * x.select(1, 0).unsqueeze(1)[:, :, 1:] + x.amax(2, keepdim=True)


def _statistics(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(1, keepdim=True)
    per_column = x.mean(-1).unsqueeze(-1) + x.std(2, keepdim=True) + x.mean(0)
    return centred / (x.var((1, 2), keepdim=True) + 1).sqrt() + per_column + x.sum((0, 1)) * 0.1


def _crossed(x: torch.Tensor) -> torch.Tensor:
    """Dims change places before the image is one again."""
    return x + x.transpose(1, -1).cos().transpose(-1, 1) + x.movedim(-1, 2).sin().movedim(2, -1)


def steps(channels: int, size: tuple[int, ...]) -> dict[str, Callable[[], nn.Module]]:
    """What may come next for images `[batch, channels, *size]`, made when called."""
    space = len(size)
    conv, pool = CONVOLUTIONS[space - 1], MAX_POOLS[space - 1]
    linear = ("linear", "bilinear", "trilinear")[space - 1]
    ones = (1,) * space
    return {
        "conv": lambda: conv(channels, 8, 3, padding=1),
        "conv same": lambda: conv(channels, 6, 4, padding="same", dilation=2),
        "strided conv": lambda: conv(channels, 4, 3, 2, 1),
        "grouped conv": lambda: conv(channels, 8, 3, padding=1, groups=2, bias=False),
        "depthwise conv": lambda: conv(channels, channels, 3, padding=2, dilation=2, groups=channels),
        "transposed conv": lambda: TRANSPOSED[space - 1](channels, 4, 3, 2, 1, 1, groups=2),
        "conv of one image": lambda: OneByOne(channels, space),
        "batch norm": lambda: BATCH_NORMS[space - 1](channels),
        "instance norm": lambda: INSTANCE_NORMS[space - 1](channels, affine=True),
        "group norm": lambda: nn.GroupNorm(2, channels),
        "layer norm": lambda: nn.LayerNorm([channels, *size]),
        "activation": lambda: nn.Sequential(nn.GELU(), nn.SiLU(), nn.LeakyReLU(0.2), nn.Hardswish()),
        "prelu": lambda: nn.PReLU(channels),
        "one prelu": lambda: nn.PReLU(),
        "glu": lambda: nn.GLU(1),
        "log softmax": lambda: Call(lambda x: F.log_softmax(x, 1) + F.softmin(x, 2)),
        "softmax of channels": lambda: nn.Softmax(1),
        "softmax of columns": lambda: nn.Softmax(-1),
        "max pool": lambda: pool(3, 2, 1, ceil_mode=True),
        "max pool with indices": lambda: Call(lambda x: pool(2, 1, return_indices=True)(x)[0]),
        "average pool": lambda: AVERAGE_POOLS[space - 1](3, 1, 1, count_include_pad=False),
        "adaptive pool": lambda: ADAPTIVE_POOLS[space - 1](3),
        "adaptive max pool": lambda: ADAPTIVE_MAX_POOLS[space - 1](4),
        "nearest": lambda: nn.Upsample(scale_factor=1.5),
        "linear": lambda: nn.Upsample(size=(5,) * space, mode=linear),
        "linear by factor": lambda: nn.Upsample(scale_factor=1.25, mode=linear, align_corners=True),
        "pad": lambda: Call(lambda x: F.pad(x, (1, -1) * space, value=0.5)),
        "reflect": lambda: Call(lambda x: F.pad(x, (1, 1) * space, mode="reflect")),
        "pad channels": lambda: Call(lambda x: F.pad(x, (0, 0) * space + (1, 1))),
        "shift and scale": lambda: Call(lambda x, w: (x - 0.5) * w + w.exp(), channels, *ones),
        "scale by column": lambda: Call(lambda x, w: x * w, size[-1]),
        "add": lambda: Around(channels, space, "add"),
        "where": lambda: Around(channels, space, "where"),
        "join channels": lambda: Around(channels, space, "channels"),
        "join images": lambda: Around(channels, space, "batch"),
        "join columns": lambda: Around(channels, space, "last"),
        "gate": lambda: Gate(channels),
        "tokens": lambda: Tokens(channels),
        "permuted": lambda: Permuted(channels, space),
        "shuffle": lambda: Call(_shuffled),
        "write": lambda: Call(_written),
        "peel": lambda: Call(_peeled),
        "statistics": lambda: Call(_statistics),
        "cross": lambda: Call(_crossed),
        "flip": lambda: Call(lambda x: x.flip(1, -1) + x.roll((1, 2), (1, 2))),
        "unaware": lambda: Call(lambda x: x.cumsum(2) * 0.1 + x.sort(-1)[0]),
        "detach": lambda: Call(lambda x: x.detach() * x.to(torch.float32)),
        "channel planes": lambda: Call(lambda x: torch.stack(x.unbind(1), 1) + x.contiguous()),
    }


def _fits(name: str, shape: tuple[int, ...]) -> bool:
    even = name in ("grouped conv", "transposed conv", "group norm", "glu", "shuffle")
    return min(shape[2:]) >= 3 and max(shape[2:]) <= 12 and shape[1] >= 4 and not (even and shape[1] % 2)


class AtRandom(nn.Module):
    """A convolution, then `depth` of `steps`; the result, and what a classifier would read."""

    def __init__(self, seed: int, space: int, depth: int, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        generator = random.Random(seed)
        torch.manual_seed(seed)
        self.body = nn.Sequential(CONVOLUTIONS[space - 1](3, 8, 3, padding=1))
        self.names: list[str] = []
        x = self.example(space)
        for wanted in names or (None,) * depth:
            shape = self._shape(x)
            fitting = [name for name in steps(shape[1], shape[2:]) if _fits(name, shape)]
            if wanted is None and fitting:
                self._append(generator.choice(fitting), shape)
            elif wanted in fitting:
                self._append(wanted, shape)
            else:  # a size that everything fits
                self._append("linear", shape)
                self._append("conv", self._shape(x))
                self._append(wanted or "activation", self._shape(x))
        self.head = nn.Linear(self.body(x)[0].numel(), 3)

    def _shape(self, x: torch.Tensor) -> tuple[int, ...]:
        return tuple(self.body(x).shape)

    def _append(self, name: str, shape: tuple[int, ...]) -> None:
        self.body.append(steps(shape[1], shape[2:])[name]())
        self.names.append(name)

    @staticmethod
    def example(space: int, rows: int = 2) -> torch.Tensor:
        return torch.randn(rows, 3, *((8,), (7, 6), (5, 4, 6))[space - 1])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(x)
        return x, self.head(x.flatten(1))
