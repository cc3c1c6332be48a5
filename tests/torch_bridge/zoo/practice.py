"""Networks as people bring them: detection, diffusion, graphs, speech, adapters, structured outputs."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from tests.torch_bridge.zoo.specimen import integers, network, normal


def vectors(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 8),)


def sequence(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 6, 8),)


def picture(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 3, 16, 16),)


class _SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x: Any) -> Any:
        return x * torch.sigmoid(self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True)))))


class _InvertedResidual(nn.Module):
    """Expand, convolve each channel, squeeze and excite, project; whole branches dropped at random."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, 3 * width, 1, bias=False), nn.BatchNorm2d(3 * width), nn.SiLU(inplace=True),
            nn.Conv2d(3 * width, 3 * width, 3, padding=1, groups=3 * width, bias=False),
            nn.BatchNorm2d(3 * width), nn.Hardswish(inplace=True), _SqueezeExcite(3 * width),
            nn.Conv2d(3 * width, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.scale, self.rate = nn.Parameter(torch.ones(width, 1, 1)), rate

    def forward(self, x: Any) -> Any:
        branch = self.body(x) * self.scale
        if self.training and self.rate:
            kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
            branch = branch * kept.div_(1 - self.rate)
        return x + branch


@network(picture, name="inverted residuals", drops=True)
class InvertedResiduals(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.GroupNorm(2, 4), nn.GELU(approximate="tanh"))
        self.blocks = nn.Sequential(*(_InvertedResidual(4, rate) for _ in range(2)))
        self.exponent, self.head = nn.Parameter(torch.tensor(3.0)), nn.Linear(4, 5)

    def forward(self, x: Any) -> Any:
        x = self.blocks(self.stem(x))
        x = x.clamp(min=1e-6).pow(self.exponent).mean((-2, -1)).pow(1 / self.exponent)
        return F.cross_entropy(self.head(x), torch.arange(x.shape[0]) % 5, label_smoothing=0.1), self.head(x)


def _detection_batch(rows: int) -> dict[str, Any]:
    boxes = normal(rows, 3, 4).sigmoid()
    return {"pixels": normal(rows, 3, 16, 16), "boxes": boxes, "labels": integers(4, rows, 3)}


@network(_detection_batch, name="object queries")
class ObjectQueries(nn.Module):
    """Queries attend to an image; boxes are matched greedily and compared by generalised overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 4, 4)
        self.rows, self.columns = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.queries = nn.Parameter(torch.randn(5, 8))
        layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.classes, self.box = nn.Linear(8, 5), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, *, pixels: Any, boxes: Any, labels: Any) -> Any:
        x = self.backbone(pixels)
        places = torch.cat([self.rows[:, None].expand(4, 4, 4), self.columns[None].expand(4, 4, 4)], -1)
        memory = x.flatten(2).mT + places.flatten(0, 1)
        out = self.decoder(self.queries.expand(x.shape[0], -1, -1), memory)
        logits, found = self.classes(out), self.box(out).sigmoid()
        with torch.no_grad():
            cost = torch.cdist(found, boxes, p=1) - logits.softmax(-1).gather(
                -1, labels[:, None].expand(-1, 5, -1)
            )
            matched = torch.empty_like(labels)
            for target in range(labels.shape[1]):
                matched[:, target] = cost[..., target].argmin(1)
                cost = cost.scatter(1, matched[:, target, None, None].expand(-1, -1, 3), 1e6)
        taken = found.gather(1, matched[..., None].expand(-1, -1, 4))
        wanted = torch.full(logits.shape[:2], 4).scatter(1, matched, labels)
        classes = F.cross_entropy(logits.mT, wanted, weight=torch.tensor([1.0, 1, 1, 1, 0.1]))
        overlap = _generalised_overlap(taken, boxes).mean()
        return {"loss": classes + 5 * F.l1_loss(taken, boxes) + 2 * (1 - overlap), "logits": logits}


def _generalised_overlap(a: Any, b: Any) -> Any:
    """Of boxes as centre and size."""
    (a0, a1), (b0, b1) = ((x[..., :2] - x[..., 2:] / 2, x[..., :2] + x[..., 2:] / 2) for x in (a, b))
    shared = (torch.minimum(a1, b1) - torch.maximum(a0, b0)).clamp(min=0).prod(-1)
    union = a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - shared
    hull = (torch.maximum(a1, b1) - torch.minimum(a0, b0)).prod(-1)
    return shared / union - (hull - union) / hull


@network(lambda rows: (normal(rows, 6, 8), integers(6, rows, 2, 10)), name="graph attention")
class GraphAttention(nn.Module):
    """Weights of edges by a softmax over those that meet: exponentials, scatter_add, scatter_reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = nn.Linear(8, 8, bias=False), nn.Linear(16, 1)

    def forward(self, x: Any, edges: Any) -> Any:
        x = self.body(x)
        source, target = (edges[:, i, :, None].expand(-1, -1, 8) for i in (0, 1))
        pair = torch.cat([x.gather(1, source), x.gather(1, target)], -1)
        score, at = F.leaky_relu(self.score(pair), 0.2).squeeze(-1), edges[:, 1]
        largest = torch.full(x.shape[:2], -math.inf).scatter_reduce(1, at, score, "amax")
        weight = (score - largest.gather(1, at)).exp()
        total = torch.zeros(x.shape[:2]).scatter_add(1, at, weight)
        weight = weight / total.gather(1, at).clamp(min=1e-9)
        return torch.zeros_like(x).scatter_add_(1, target, weight[..., None] * x.gather(1, source))


@network(
    lambda rows: {
        "x": normal(rows, 3, 8, 8),
        "time": torch.arange(rows) * 7,
        "noise": normal(rows, 3, 8, 8, seed=3),
    },
    name="diffusion",
)
class Diffusion(nn.Module):
    """Noise is added by a schedule of buffers; a small U-Net with attention and times tells it."""

    def __init__(self) -> None:
        super().__init__()
        alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
        self.register_buffer("alphas", alphas, persistent=False)
        self.times = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.enter, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.norm, self.qkv = nn.GroupNorm(4, 8), nn.Conv1d(8, 24, 1)
        self.scale, self.up = nn.Linear(8, 16), nn.Conv2d(16, 8, 3, padding=1)
        self.leave = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, *, x: Any, time: Any, noise: Any) -> Any:
        alpha = self.alphas[time].view(-1, *(1,) * (x.ndim - 1))
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        angles = time[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(4) / 4)
        embedded = self.times(torch.cat([angles.sin(), angles.cos()], -1))
        first = self.enter(noisy)
        h = self.down(first)
        scale, shift = self.scale(embedded)[..., None, None].chunk(2, 1)
        h = F.silu(self.norm(h) * (1 + scale) + shift)
        q, k, v = self.qkv(h.flatten(2)).reshape(x.shape[0] * 2, 12, 16).mT.chunk(3, -1)
        attended = F.scaled_dot_product_attention(q, k, v).mT.reshape(h.shape)
        up = F.interpolate(h + attended, scale_factor=2, mode="nearest")
        found = self.leave(self.up(torch.cat([up, first], 1)))
        return SimpleNamespace(loss=F.mse_loss(found, noise), sample=found)


class Latent(NamedTuple):
    mean: Any
    logvar: Any


@dataclasses.dataclass
class Reconstruction:
    sample: Any
    latent: Latent
    loss: Any = None


@network(lambda rows: (normal(rows, 8), normal(rows, 3, seed=5)), name="reparameterised")
class Reparameterised(nn.Module):
    """A variational autoencoder that is given its noise; it returns a dataclass with a NamedTuple inside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Softplus())
        self.heads = nn.ModuleDict({"mean": nn.Linear(16, 3), "logvar": nn.Linear(16, 3)})
        self.decoder = nn.Linear(3, 8)

    def forward(self, x: Any, noise: Any) -> Any:
        latent = Latent(**{name: head(self.encoder(x)) for name, head in self.heads.items()})
        sample = self.decoder(latent.mean + noise * torch.exp(0.5 * latent.logvar))
        divergence = -0.5 * (1 + latent.logvar - latent.mean**2 - latent.logvar.exp()).sum(-1)
        loss = F.binary_cross_entropy_with_logits(sample, x.sigmoid(), reduction="none").sum(-1)
        return Reconstruction(sample, latent, (loss + divergence).mean())


@network(lambda rows: tuple(normal(rows, 8, seed=s) for s in range(3)), name="triplets")
class Triplets(nn.Module):
    """The hardest negative of the batch beside the given one; the margin counts only where it is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6))

    def forward(self, anchor: Any, positive: Any, negative: Any) -> Any:
        a, p, n = (F.normalize(self.tower(x), dim=-1) for x in (anchor, positive, negative))
        near = (a - p).square().sum(-1)
        far = torch.minimum((a - n).square().sum(-1), torch.cdist(a, n).square().min(-1).values)
        margin = near - far + 0.5
        return F.triplet_margin_loss(a, p, n) + margin[margin > 0].sum() / (margin > 0).sum().clamp(min=1)


@network(picture, name="capsules")
class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.primary = nn.Conv2d(3, 8, 5, 4)
        self.weight = nn.Parameter(0.1 * torch.randn(18, 3, 4, 6))

    def forward(self, x: Any) -> Any:
        u = _squash(self.primary(x).reshape(x.shape[0], -1, 4))
        votes = torch.einsum("bid,ijdk->bijk", u, self.weight)
        logits = torch.zeros(votes.shape[:3])
        for iteration in range(3):
            shares = logits.softmax(2)
            v = _squash((shares[..., None] * votes).sum(1))
            if iteration < 2:
                logits = logits + torch.einsum("bijk,bjk->bij", votes.detach(), v)
        return v.norm(dim=-1)


def _squash(x: Any) -> Any:
    square = x.square().sum(-1, keepdim=True)
    return square / (1 + square) * x / (square + 1e-8).sqrt()


@network(vectors, name="differential equation")
class DifferentialEquation(nn.Module):
    """Fixed Runge-Kutta steps of a field whose divergence is a trace of exact vector-Jacobian products."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 8))

    def slope(self, t: float, x: Any) -> Any:
        return self.field(torch.cat([x, torch.full_like(x[:, :1], t)], -1))

    def forward(self, x: Any, *, steps: int = 4) -> Any:
        h = 1.0 / steps
        for i in range(steps):
            k1 = self.slope(i * h, x)
            k2 = self.slope((i + 0.5) * h, x + 0.5 * h * k1)
            k3 = self.slope((i + 0.5) * h, x + 0.5 * h * k2)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.slope((i + 1) * h, x + h * k3))
        trace = torch.func.vmap(
            lambda y: torch.func.jacrev(lambda z: self.slope(1.0, z[None])[0])(y).trace()
        )(x)
        return x, trace


@network(lambda rows: (integers(9, rows, 5), integers(9, rows, 4, least=1)), name="sequence to sequence")
class SequenceToSequence(nn.Module):
    """A recurrent encoder, additive attention at each step, half of the steps fed with their own words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(9, 8, padding_idx=0), nn.GRU(8, 4, 1, True, True, 0.0, True)
        self.cell, self.query = nn.GRUCell(16, 8), nn.Linear(8, 8)
        self.key, self.energy, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 1), nn.Linear(16, 9)

    def forward(self, source: Any, target: Any) -> Any:
        memory, last = self.encoder(self.embed(source))
        state, word, logits = torch.cat([*last], -1), torch.full_like(target[:, 0], 1), []
        for step in range(target.size(1)):
            energy = self.energy(torch.tanh(self.query(state)[:, None] + self.key(memory))).squeeze(-1)
            energy = energy.masked_fill(source == 0, -1e9)
            context = torch.bmm(energy.softmax(-1)[:, None], memory)[:, 0]
            state = self.cell(torch.cat([self.embed(word), context], -1), state)
            logits.append(self.head(torch.cat([state, context], -1)))
            word = target[:, step] if step % 2 else logits[-1].argmax(-1)
        stacked = torch.stack(logits, 1)
        return F.nll_loss(stacked.log_softmax(-1).flatten(0, 1), target.flatten(), ignore_index=0), stacked


@network(lambda rows: (normal(rows, 6, 8), 1 + torch.arange(rows) % 6), name="packed tagger")
class PackedTagger(nn.Module):
    """Packed sequences through two directions; the loss is of the steps that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 4, bidirectional=True, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Any, lengths: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, (h, _) = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return self.head(padded), h


@network(sequence, name="experts by dispatch")
class DispatchedExperts(nn.Module):
    """Each expert sees the tokens that chose it: where, gather, index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)
        )

    def forward(self, x: Any) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(x)


def _masked_words(rows: int) -> dict[str, Any]:
    ids = integers(20, rows, 6)
    return {"ids": ids, "labels": torch.where(ids % 3 == 0, ids, -100)}


@network(_masked_words, name="loss of masked words")
class MaskedWords(nn.Module):
    """Only the words that are to be told go through the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 20))

    def forward(self, ids: Any, labels: Any) -> Any:
        x = self.embed(ids)
        x = torch.tanh(self.mix(x.cumsum(1)))
        told = labels != -100
        logits = self.head(x[told])
        accuracy = (logits.argmax(-1) == labels[told]).float().mean()
        return {"loss": F.cross_entropy(logits, labels[told]), "accuracy": accuracy}


class _LowRank(nn.Module):
    def __init__(self, outside: int, inside: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(0.1 * torch.randn(2, inside)), nn.Parameter(torch.zeros(outside, 2))

    def forward(self, weight: Any) -> Any:
        return weight + 2.0 * self.b @ self.a


class _Adapter(nn.Module):
    """Beside a frozen layer, not in its weight."""

    def __init__(self, base: nn.Linear, rate: float) -> None:
        super().__init__()
        self.base, self.drop = base.requires_grad_(False), nn.Dropout(rate)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.scaling = {"default": 0.5}

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.base(x, *args, **kwargs) + self.up(self.down(self.drop(x))) * self.scaling["default"]


@network(vectors, name="adapters", drops=True)
class Adapters(nn.Module):
    """Low-rank changes beside layers and in weights, old-style weight norm, hooks, an orthogonal map."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.second = _Adapter(nn.Linear(8, 8), rate), nn.Linear(8, 8)
        self.second.weight.requires_grad_(False)
        parametrize.register_parametrization(self.second, "weight", _LowRank(8, 8))
        self.third = torch.nn.utils.weight_norm(nn.Linear(8, 8))
        self.fourth = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
        self.gain = nn.Parameter(torch.ones(8))
        self.second.register_forward_hook(lambda module, args, out: out * self.gain)
        self.third.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x: Any) -> Any:
        for layer in (self.first, self.second, self.third, self.fourth):
            x = torch.tanh(layer(x))
        return x


@network(vectors, name="fake quantisation")
class FakeQuantisation(nn.Module):
    """Ranges are averaged in training; rounding passes its gradient on inside the range."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(0.0))
        self.register_buffer("seen", torch.tensor(0))

    def quantised(self, x: Any) -> Any:
        if self.training:
            low, high = torch.aminmax(x.detach())
            self.low.copy_(torch.where(self.seen == 0, low, 0.9 * self.low + 0.1 * low))
            self.high.copy_(torch.where(self.seen == 0, high, 0.9 * self.high + 0.1 * high))
            self.seen += 1
        scale = (self.high - self.low).clamp(min=1e-5) / 255
        zero = (-self.low / scale).round().to(torch.int32).clamp(0, 255)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)

    def forward(self, x: Any) -> Any:
        weight = self.body.weight
        scale = weight.detach().abs().amax(1) / 127
        weight = torch.fake_quantize_per_channel_affine(
            weight, scale, torch.zeros(8, dtype=torch.int32), 0, -128, 127
        )
        x = self.quantised(torch.relu(F.linear(x, weight, self.body.bias)))
        rounded = self.head.weight + (torch.round(self.head.weight * 8) / 8 - self.head.weight).detach()
        return F.linear(x, rounded, self.head.bias)


class Encoded:
    """A plain class: its attributes are the results."""

    def __init__(self, last: Any, hidden: Any) -> None:
        self.last, self.hidden, self.kind = last, hidden, "encoded"


@network(lambda rows: {"x": normal(rows, 6, 8), "mask": None, "scale": 2.0}, name="plain output object")
class PlainOutput(nn.Module):
    """Keyword-only arguments, one None; results in an object of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, *, x: Any, mask: Any = None, scale: float = 1.0) -> Any:
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x if mask is None else x * mask)) * scale
            hidden.append({"state": x, "extra": (x.mean(), None)})
        return Encoded(x, hidden)


@network(sequence, name="functional transforms")
class FunctionalTransforms(nn.Module):
    """Gradients of each example, an inner step of learning, and a Hessian's diagonal, inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.energy = (
            nn.Linear(8, 8),
            nn.Sequential(nn.Linear(8, 4), nn.Softplus(), nn.Linear(4, 1)),
        )

    def inner(self, weight: Any, x: Any) -> Any:
        return (x @ weight.T).square().mean()

    def forward(self, x: Any) -> Any:
        each = torch.func.vmap(torch.func.grad(self.inner), (None, 0))(self.body.weight, x)
        adapted = self.body.weight - 0.1 * each
        y = torch.einsum("bij,btj->bti", adapted, x) + self.body.bias
        force = torch.func.grad(lambda z: self.energy(z).sum())(y)
        return y - 0.1 * force, torch.func.vmap(torch.func.vmap(lambda z: self.energy(z)))(y)


@network(picture, name="fourier operator")
class FourierOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip, self.project = nn.Conv2d(5, 6, 1), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 2, 1)
        self.low = nn.Parameter(0.1 * torch.randn(6, 6, 4, 4, dtype=torch.cfloat))
        self.high = nn.Parameter(0.1 * torch.randn(6, 6, 4, 4, dtype=torch.cfloat))

    def forward(self, x: Any) -> Any:
        b, _, h, w = x.shape
        grid = torch.meshgrid(torch.linspace(0, 1, h), torch.linspace(0, 1, w), indexing="ij")
        x = self.lift(torch.cat([x, torch.stack(grid).expand(b, -1, -1, -1)], 1))
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros(b, 6, h, w // 2 + 1, dtype=torch.cfloat, device=x.device)
        out[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :4, :4], self.low)
        out[:, :, -4:, :4] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -4:, :4], self.high)
        return self.project(F.gelu(torch.fft.irfft2(out, s=(h, w)) + self.skip(x)))


@network(lambda rows: (normal(rows, 2, 4, 8, 8),), name="volumes")
class Volumes(nn.Module):
    """Three-dimensional convolutions, factored ones, pooling, and a transposed one to the size that was."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            nn.Conv3d(2, 4, (1, 3, 3), padding="same"), nn.Conv3d(4, 4, (3, 1, 1), padding=(1, 0, 0))
        )
        self.norm, self.pool = nn.InstanceNorm3d(4, affine=True), nn.MaxPool3d(2, ceil_mode=True)
        self.up, self.leave = nn.ConvTranspose3d(4, 4, 3, 2, 1), nn.Conv3d(8, 2, 1)

    def forward(self, x: Any) -> Any:
        first = F.leaky_relu(self.norm(self.enter(x)), 0.01)
        up = self.up(self.pool(first), output_size=first.shape[2:])
        return self.leave(torch.cat([first, up], 1)), F.adaptive_avg_pool3d(up, (1, 2, 2))


@network(picture, name="deformable attention")
class DeformableAttention(nn.Module):
    """Points are read at offsets that the queries tell, from two scales, by grid_sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList([nn.Conv2d(3, 8, 4, 4), nn.Conv2d(3, 8, 8, 8)])
        self.queries = nn.Parameter(torch.randn(5, 8))
        self.place, self.offsets, self.weights = nn.Linear(8, 2), nn.Linear(8, 12), nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        maps = [scale(x) for scale in self.scales]
        queries = self.queries[None] + maps[0].mean((2, 3))[:, None]
        centre = self.place(queries).sigmoid()[:, :, None, None]
        shape = x.new_tensor([[m.shape[3], m.shape[2]] for m in maps])[None, None, :, None]
        places = centre + self.offsets(queries).unflatten(-1, (2, 3, 2)) / shape
        grids = (2 * places - 1).unbind(2)
        read = [
            F.grid_sample(m, g, padding_mode="zeros", align_corners=False)
            for m, g in zip(maps, grids, strict=True)
        ]
        weights = self.weights(queries).softmax(-1)[:, None]
        return (torch.cat(read, -1) * weights).sum(-1).mT


def _speech_batch(rows: int) -> dict[str, Any]:
    return {
        "sound": normal(rows, 24, 6),
        "lengths": 24 - 4 * (torch.arange(rows) % 3),
        "targets": integers(5, rows, 3, least=1),
        "target_lengths": 1 + torch.arange(rows) % 3,
    }


@network(_speech_batch, name="speech by ctc", input_gradients=False)
class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shorten, self.lstm = (
            nn.Conv1d(6, 8, 3, 2, 1),
            nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, sound: Any, lengths: Any, targets: Any, target_lengths: Any) -> Any:
        x = F.relu(self.shorten(sound.mT)).mT
        lengths = (lengths - 1) // 2 + 1
        there = torch.arange(x.shape[1])[None] < lengths[:, None]
        x, _ = self.lstm(x * there[..., None])
        logp = self.head(x).log_softmax(-1)
        loss = F.ctc_loss(logp.transpose(0, 1), targets, lengths, target_lengths, zero_infinity=True)
        return {"loss": loss, "words": logp.argmax(-1).masked_fill(~there, 0)}


@network(
    lambda rows: (
        normal(rows, 5, 8),
        integers(4, rows, 5),
        torch.arange(5)[None] < 2 + torch.arange(rows)[:, None] % 4,
    ),
    name="conditional random field",
)
class ConditionalRandomField(nn.Module):
    """The partition function by a loop of logsumexp, and the best path by pointers back."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.start, self.moves = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Any, tags: Any, mask: Any) -> Any:
        scores = self.body(x)
        rows = torch.arange(x.shape[0])
        alpha, best = self.start + scores[:, 0], self.start + scores[:, 0]
        path, pointers = self.start[tags[:, 0]] + scores[rows, 0, tags[:, 0]], []
        for step in range(1, x.shape[1]):
            here = mask[:, step, None]
            alpha = torch.where(
                here, torch.logsumexp(alpha[..., None] + self.moves, 1) + scores[:, step], alpha
            )
            reached, before = (best[..., None] + self.moves).max(1)
            best = torch.where(here, reached + scores[:, step], best)
            pointers.append(torch.where(here, before, torch.arange(4)))
            move = self.moves[tags[:, step - 1], tags[:, step]] + scores[rows, step, tags[:, step]]
            path = path + move * mask[:, step]
        tag = best.argmax(-1)
        decoded = [tag]
        for pointer in reversed(pointers):
            tag = pointer.gather(1, tag[:, None])[:, 0]
            decoded.insert(0, tag)
        return {"loss": (alpha.logsumexp(-1) - path).mean(), "tags": torch.stack(decoded, 1)}


@network(vectors, name="teacher and student")
class TeacherAndStudent(nn.Module):
    """The teacher's weights are buffers that follow the student's, inside forward; so is a queue of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, 4)
        self.register_buffer("weight", torch.randn(4, 8))
        self.register_buffer("queue", F.normalize(torch.randn(6, 4), dim=-1))
        self.register_buffer("centre", torch.zeros(1, 4))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.weight.lerp_(self.student.weight, 0.1)
            told = F.linear(x, self.weight)
            target = ((told - self.centre) / 0.5).softmax(-1)
            self.centre = self.centre * 0.9 + told.mean(0, keepdim=True) * 0.1
        logits = F.normalize(self.student(x), dim=-1) @ self.queue.clone().T
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.queue[1:], F.normalize(told.mean(0, keepdim=True), dim=-1)]))
        return (
            F.kl_div(self.student(x).log_softmax(-1), target, reduction="batchmean")
            + logits.logsumexp(-1).mean()
        )
