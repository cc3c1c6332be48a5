"""Networks by hand: what people write when they do not take a library's."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.torch_bridge.zoo.specimen import integers, network, normal


def vectors(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 8),)


def sequence(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 6, 8),)


def picture(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 3, 16, 16),)


def _double(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
    )  # fmt: skip


@network(picture, name="u-net", listed=True)
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _double(3, 4), _double(4, 8), _double(8, 16)
        self.up2, self.up1 = (
            nn.ConvTranspose2d(16, 8, 2, stride=2),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        )
        self.join2, self.join1, self.head = _double(16, 8), _double(12, 4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Any) -> Any:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        y = self.join2(torch.cat([b, self.up2(c)], 1))
        return self.head(self.join1(torch.cat([a, self.up1(y)], 1)))


@network(sequence, name="mixture of experts by hand")
class Experts(nn.Module):
    """Top two of four experts, all computed and weighted, with the usual balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up = nn.Parameter(0.3 * torch.randn(4, 8, 16))
        self.down = nn.Parameter(0.3 * torch.randn(4, 16, 8))

    def forward(self, x: Any) -> Any:
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        gates = torch.zeros_like(shares).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("btc,ech->bteh", x, self.up))
        out = torch.einsum("bteh,ehc,bte->btc", hidden, self.down, gates)
        return out, (shares.mean((0, 1)) * (gates > 0).float().mean((0, 1))).sum() * 4


@network(lambda rows: (normal(rows, 7, 8), integers(7, 2, 12)), name="graph network")
class GraphNetwork(nn.Module):
    """Messages along edges, summed at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(16, 8), nn.GRUCell(8, 8)

    def forward(self, x: Any, edges: Any) -> Any:
        source, target = edges
        for _ in range(2):
            messages = torch.relu(self.message(torch.cat([x[:, source], x[:, target]], -1)))
            at = target[None, :, None].expand_as(messages)
            total = torch.zeros_like(x).scatter_add(1, at, messages)
            degree = torch.zeros(x.shape[1]).index_add(0, target, torch.ones(target.shape[0])).clamp(min=1)
            x = self.update((total / degree[None, :, None]).flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return x.mean(1)


@network(vectors, name="normalising flow")
class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.register_buffer("order", torch.tensor([1, 0, 3, 2, 5, 4, 7, 6]))

    def forward(self, x: Any) -> Any:
        logdet = torch.zeros(x.shape[0])
        for net in self.nets:
            a, b = x.chunk(2, -1)
            shift, scale = net(a).chunk(2, -1)
            x = torch.cat([a, b * torch.exp(torch.tanh(scale)) + shift], -1)[:, self.order]
            logdet = logdet + torch.tanh(scale).sum(-1)
        base = torch.distributions.Normal(torch.zeros(8), torch.ones(8))
        return -(base.log_prob(x).sum(-1) + logdet).mean()


@network(vectors, name="variational autoencoder", random=True)
class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x: Any) -> Any:
        mean, logvar = self.encoder(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, (0.5 * logvar).exp())
        z = posterior.rsample() if self.training else mean
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        reconstruction = self.decoder(z)
        return reconstruction, F.mse_loss(reconstruction, x) + torch.distributions.kl_divergence(
            posterior, prior
        ).mean()


@network(lambda rows: (normal(rows, 4), normal(rows, 3, 8, 8)), name="adversarial pair")
class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Unflatten(1, (4, 2, 2)),
            nn.ConvTranspose2d(4, 3, 4, 4),
            nn.Tanh(),
        )
        conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 4, 2, 1))
        self.critic = nn.Sequential(conv, nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1))

    def forward(self, z: Any, real: Any) -> Any:
        fake = self.generator(z)
        critic = F.softplus(self.critic(fake.detach())).mean() + F.softplus(-self.critic(real)).mean()
        return {"critic": critic, "generator": F.softplus(-self.critic(fake)).mean(), "fake": fake}


@network(lambda rows: (integers(10, rows, 1),), name="autoregressive loop")
class Autoregressive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(10, 8), nn.LSTMCell(8, 8), nn.Linear(8, 10)

    def forward(self, ids: Any) -> Any:
        state, kept = None, []
        for _ in range(4):
            state = self.cell(self.embed(ids[:, -1]), state)
            logits = self.head(state[0])
            kept.append(logits)
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        return torch.stack(kept, 1), ids


class _Heads(nn.Module):
    """Attention written out; a subclass says what it adds to the scores or does to the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)

    def turn(self, x: Any) -> Any:
        return x

    def bias(self, length: int) -> Any:
        return 0.0

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k = self.turn(q), self.turn(k)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(4) + self.bias(x.shape[1])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        shares = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
        return self.out(torch.einsum("bhts,bhsd->bthd", shares, v).flatten(2))


@network(sequence, name="attention by einsum")
class EinsumAttention(_Heads):
    pass


@network(sequence, name="rotary by complex numbers")
class ComplexRotary(_Heads):
    def turn(self, x: Any) -> Any:
        angles = torch.outer(torch.arange(x.shape[2]).float(), torch.tensor([1.0, 0.1]))
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], 2, 2)) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.view_as_real(turned).flatten(-2)


@network(sequence, name="rotary by halves")
class Rotary(_Heads):
    def turn(self, x: Any) -> Any:
        angles = torch.outer(torch.arange(x.shape[2]).float(), torch.tensor([1.0, 0.1])).repeat(1, 2)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


@network(sequence, name="alibi")
class Alibi(_Heads):
    def bias(self, length: int) -> Any:
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]
        return distance[None] * torch.tensor([0.5, 0.25])[:, None, None]


@network(sequence, name="relative position bias")
class RelativeBias(_Heads):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 2)

    def bias(self, length: int) -> Any:
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]
        return self.table(distance.clamp(-4, 4) + 4).permute(2, 0, 1)


@network(sequence, name="stochastic depth", drops=True)
class StochasticDepth(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers, self.rate = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), rate

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            branch = torch.relu(layer(x))
            if self.training and self.rate > 0:
                keep = torch.empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)
                branch = branch * keep / (1 - self.rate)
            x = x + branch
        return x


@network(vectors, name="gumbel softmax", random=True)
class Gumbel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.codes = nn.Linear(8, 5), nn.Linear(5, 8)

    def forward(self, x: Any) -> Any:
        logits = self.body(x)
        chosen = F.gumbel_softmax(logits, tau=0.7, hard=True) if self.training else logits.softmax(-1)
        return self.codes(chosen)


@network(lambda rows: (normal(rows, 6, 8), 1 + torch.arange(rows) % 6), name="packed sequences")
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x: Any, lengths: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=6)[0]


@network(vectors, name="module containers")
class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ModuleDict(
            {"a.b".replace(".", "_"): nn.Linear(8, 8), "second": nn.Sequential(nn.Linear(8, 8), nn.ReLU())}
        )
        self.scales = nn.ParameterList([torch.ones(8), torch.ones(1)])
        self.shifts = nn.ParameterDict({"x": torch.zeros(8)})

    def forward(self, x: Any) -> Any:
        for module in self.by_name.values():
            x = module(x) * self.scales[0] + self.shifts["x"]
        return {"out": x * self.scales[1], "list": [x, (x + 1, None)], "flag": True, "size": x.shape[-1]}


@network(vectors, name="scripted module")
class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.act = (
            torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
            torch.jit.script(nn.GELU()),
        )

    def forward(self, x: Any) -> Any:
        return self.act(self.body(x))


@network(vectors, name="one module called twice")
class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        return self.norm(self.body(self.norm(self.body(x))))


class _Tree(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.here = nn.Linear(8, 8)
        self.left, self.right = (_Tree(depth - 1), _Tree(depth - 1)) if depth else (None, None)

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.here(x))
        return y if self.left is None or self.right is None else self.left(y) + self.right(y)


@network(vectors, name="deep recursion")
class Recursive(_Tree):
    def __init__(self) -> None:
        super().__init__(3)


@network(
    lambda rows: (normal(rows, 3, 8, 8).contiguous(memory_format=torch.channels_last),), name="channels last"
)
class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).to(
            memory_format=torch.channels_last
        )

    def forward(self, x: Any) -> Any:
        return self.body(x).permute(0, 2, 3, 1).flatten(1)


@network(lambda rows: (normal(rows, 8).bfloat16(),), name="bfloat16")
class Bfloat16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).bfloat16()

    def forward(self, x: Any) -> Any:
        return self.body(x).float()


@network(vectors, name="complex parameters")
class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6, dtype=torch.complex64))
        self.poles = nn.Parameter(torch.randn(6))

    def forward(self, x: Any) -> Any:
        z = torch.complex(x, x.flip(-1)) @ self.weight
        return (z * torch.exp(1j * self.poles)).real, z.abs(), torch.fft.ifft(z).imag


@network(sequence, name="spectral convolution")
class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8, 2))

    def forward(self, x: Any) -> Any:
        weight = torch.view_as_complex(self.weight)
        spectrum = torch.fft.rfft(x, dim=1)
        return torch.fft.irfft(torch.einsum("bkc,kcd->bkd", spectrum, weight), n=x.shape[1], dim=1)


@network(sequence, name="checkpointed layers", drops=True)
class Checkpointed(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(rate)) for _ in range(2)
        )

    def forward(self, x: Any) -> Any:
        for layer, reentrant in zip(self.layers, (False, True), strict=True):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x


@network(vectors, name="moving average")
class MovingAverage(nn.Module):
    """A buffer that forward writes under no_grad, and a codebook lookup with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("codes", torch.randn(5, 8))

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        nearest = self.codes[torch.cdist(y, self.codes).argmin(-1)]
        return y + (nearest - y).detach(), F.mse_loss(y, nearest), y - self.mean


@network(vectors, name="frozen part")
class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.frozen(x) + self.adapter(x)


@network(lambda rows: (normal(rows, 2, 8),), name="siamese")
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))

    def forward(self, pair: Any) -> Any:
        a, b = (F.normalize(self.tower(x), dim=-1) for x in pair.unbind(1))
        logits = a @ b.T / 0.1
        target = torch.arange(pair.shape[0])
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@network(
    lambda rows: (normal(rows, 8), {"a": normal(rows, 8, seed=1), "b": [normal(rows, 8, seed=2), 3]}),
    name="nested inputs",
)
class NestedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Any, more: Any) -> Any:
        return self.body(x + more["a"]) * more["b"][1] + more["b"][0]


@network(lambda rows: (normal(rows, 16, 3),), name="point network")
class Points(nn.Module):
    """Farthest points, neighbours, pooling: sampling by loops over indices."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, x: Any) -> Any:
        rows = torch.arange(x.shape[0])
        far = torch.zeros(x.shape[0], dtype=torch.long)
        distance = torch.full(x.shape[:2], 1e4)
        chosen = []
        for _ in range(4):
            chosen.append(far)
            distance = torch.minimum(distance, ((x - x[rows, far][:, None]) ** 2).sum(-1))
            far = distance.argmax(-1)
        centres = torch.gather(x, 1, torch.stack(chosen, 1)[..., None].expand(-1, -1, 3))
        near = torch.cdist(centres, x).topk(3, largest=False).indices
        groups = x[rows[:, None, None], near] - centres[:, :, None]
        return self.body(groups.flatten(1, 2).mT).view(x.shape[0], 8, 4, 3).amax(-1)
