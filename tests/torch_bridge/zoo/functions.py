"""Functions of torch as users string them together: indexing, sorting, scans, resampling, transforms."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.torch_bridge.zoo.specimen import Specimen, add, integers, normal


class Function(nn.Module):
    """A function of what a linear layer makes of the first input, so that gradients have somewhere to go."""

    def __init__(self, function: Any, width: int) -> None:
        super().__init__()
        self.body, self.function = nn.Linear(width, width), function

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        return self.function(self.body(x), *more)


def function(
    name: str, *more: Any, shape: tuple[int, ...] = (8,), listed: bool = True, **options: Any
) -> Any:
    """Register a function of `[rows, *shape]` and of what `more` make at a number of rows."""

    def register(fn: Any) -> Any:
        def batch(rows: int) -> tuple[Any, ...]:
            return (normal(rows, *shape), *(make(rows) for make in more))

        add(
            Specimen(
                name=name,
                group="functions",
                make=lambda _: Function(fn, shape[-1]),
                batch=batch,
                listed=listed,
                drops=False,
                **options,
            )
        )
        return fn

    return register


def index(rows: int) -> torch.Tensor:
    return integers(8, rows, 5)


@function("index_put", index)
def _index_put(x: Any, at: Any) -> Any:
    row = torch.arange(x.shape[0])[:, None]
    y = x.clone()
    y[row, at] = 2.0
    z = x.clone()
    z[:, 1:3] = x[:, 4:6] * 2
    z[x > 1] = 0.5
    z[..., -1] += 1
    return (
        y,
        z,
        x.index_put((row, at), x[:, :5], accumulate=True),
        x[row, at],
        x[:, [0, 3, 3]],
        x[:, None, ::2],
    )


@function("scatter", index)
def _scatter(x: Any, at: Any) -> Any:
    source, zero = x[:, :5], torch.zeros_like(x)
    reduced = [
        zero.scatter_reduce(1, at, source, r, include_self=s)
        for r in ("sum", "mean", "amax", "amin", "prod")
        for s in (True, False)
    ]
    return [
        zero.scatter_add(1, at, source),
        x.scatter(1, at[:, :1], 3.0),
        x.scatter(1, at[:, :1], source[:, :1]),
        x.gather(1, at),
        torch.take_along_dim(x, at, 1),
        *reduced,
    ]


@function("index variants")
def _index(x: Any) -> Any:
    at = torch.tensor([0, 2, 5, 2])
    return (
        x.index_select(1, at),
        x.index_add(1, at, x[:, :4], alpha=0.5),
        x.index_copy(1, at[:3], x[:, :3]),
        x.index_fill(1, at, 1.0),
        x.masked_fill(x > 0, -1.0),
        x.masked_scatter(x > 9, x),
        torch.where(x > 0, x, 0.0),
        F.one_hot(x.argmax(-1), 8),
    )


@function("sort and topk")
def _sort(x: Any) -> Any:
    return (
        x.sort(-1),
        x.sort(stable=True, dim=-1, descending=True),
        x.topk(3),
        x.topk(3, largest=False, sorted=True),
        x.argsort(-1),
        x.kthvalue(2, -1),
        x.median(-1),
        x.max(-1),
        x.min(-1),
        x.mode(-1),
        torch.searchsorted(x.sort(-1).values.detach(), x.detach()),
        torch.bucketize(x.detach(), torch.linspace(-1, 1, 5)),
        x.nanmedian(-1),
        x.msort()[:1],
    )


@function("quantile", listed=False)
def _quantile(x: Any) -> Any:
    return x.quantile(0.3, -1), x.nanquantile(0.5, -1)


@function("combinations", shape=(6, 8), listed=False)
def _combinations(x: Any) -> Any:
    return torch.combinations(x[0, 0])


@function("counts", lambda rows: integers(50, rows, 8), listed=False)
def _counts(x: Any, n: Any) -> Any:
    return x, n.flatten().bincount(minlength=50)


@function("cumulative")
def _cumulative(x: Any) -> Any:
    return (
        x.cumsum(-1),
        x.cumprod(-1),
        x.cummax(-1),
        x.cummin(-1),
        x.logcumsumexp(-1),
        x.diff(dim=-1),
        x.cumsum(0),
        torch.cumulative_trapezoid(x, dim=-1),
    )


for _mode, _shape in (
    ("nearest", (3, 6, 8)),
    ("nearest-exact", (3, 6, 8)),
    ("bilinear", (3, 6, 8)),
    ("bicubic", (3, 6, 8)),
    ("area", (3, 6, 8)),
    ("linear", (3, 8)),
    ("trilinear", (2, 4, 4, 8)),
):

    @function(f"interpolate {_mode}", shape=_shape)
    def _interpolate(x: Any, mode: str = _mode) -> Any:
        corners = (
            [{"align_corners": c} for c in (True, False)] if "linear" in mode or mode == "bicubic" else [{}]
        )
        smooth = [{"antialias": True}] if mode in ("bilinear", "bicubic") else []
        results = [F.interpolate(x, scale_factor=s, mode=mode, **c) for s in (2, 1.5, 0.5) for c in corners]
        return [
            *results,
            F.interpolate(x, size=5, mode=mode),
            *(F.interpolate(x, size=3, mode=mode, **s) for s in smooth),
        ]


@function("grid_sample", lambda rows: normal(rows, 5, 5, 2) * 0.8, shape=(3, 6, 8))
def _grid_sample(x: Any, grid: Any) -> Any:
    theta = torch.eye(2, 3).expand(x.shape[0], 2, 3) * 0.9
    sampled = [
        F.grid_sample(x, grid, mode=m, padding_mode=p, align_corners=c)
        for m in ("bilinear", "nearest", "bicubic")
        for p in ("zeros", "border", "reflection")
        for c in (True, False)
    ]
    return [
        *sampled,
        F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False),
    ]


@function("pixel_shuffle", shape=(4, 6, 8))
def _pixels(x: Any) -> Any:
    return (
        F.pixel_shuffle(x, 2),
        F.pixel_unshuffle(x, 2),
        F.channel_shuffle(x, 2),
        F.unfold(x, 3),
        F.fold(F.unfold(x, 2, stride=2), (6, 8), 2, stride=2),
    )


@function("in-place views")
def _in_place(x: Any) -> Any:
    y = x.clone()
    y[:, ::2].mul_(2)
    y.view(-1, 2, 4)[:, 1].add_(1.0)
    y.t()[0].copy_(x[:, 3])
    part = y.narrow(1, 2, 3)
    part.add_(x[:, :3]).neg_()
    y.unsqueeze(1).squeeze_(1).sub_(0.5)
    y[:, :4].add_(y[:, 4:])
    y[:, 4:].neg_()
    z = torch.zeros_like(y)
    z.diagonal().fill_(3.0)
    z.as_strided((2,), (1,)).add_(1)
    y.clamp_(-2, 2)
    z.unfold(1, 2, 2)[..., 0].add_(y.unfold(1, 2, 2)[..., 1])
    out = torch.empty_like(y)
    torch.add(y.detach(), z.detach(), out=out)
    y.fill_diagonal_(0.1)
    return y, z, out, part


@function("fft", shape=(6, 8))
def _fft(x: Any) -> Any:
    spectrum = torch.fft.rfft(x)
    return (
        spectrum,
        torch.fft.irfft(spectrum * 0.5, n=8),
        torch.fft.fft2(x).abs(),
        torch.fft.fftshift(torch.fft.fft(x)).real,
        torch.fft.ifft(x).imag,
        torch.fft.rfft2(x, norm="ortho"),
        torch.view_as_real(torch.fft.fftn(x, dim=(1, 2))),
        torch.fft.hfft(spectrum),
        torch.angle(spectrum),
    )


@function("stft", shape=(64,))
def _stft(x: Any) -> Any:
    window = torch.hann_window(16)
    spectrum = torch.stft(x, 16, 8, window=window, return_complex=True)
    return spectrum.abs() ** 2, torch.istft(spectrum, 16, 8, window=window, length=64)


@function("linear algebra", shape=(4, 4), listed=False)
def _linalg(x: Any) -> Any:
    positive = x @ x.mT + 2 * torch.eye(4)
    lower = torch.linalg.cholesky(positive)
    return (
        torch.linalg.inv(positive),
        torch.linalg.det(x),
        torch.linalg.slogdet(positive),
        torch.linalg.solve(positive, x),
        lower,
        torch.linalg.eigvalsh(positive),
        torch.linalg.matrix_norm(x),
        torch.linalg.vector_norm(x, 3, dim=-1),
        torch.cholesky_solve(x, lower),
        torch.linalg.matrix_exp(x * 0.1),
        torch.linalg.matrix_power(x, 3),
        torch.linalg.svdvals(x),
        torch.linalg.pinv(positive),
        x.trace() if x.ndim == 2 else torch.einsum("bii->b", x),
    )


@function("einsum", lambda rows: normal(rows, 8, 5), shape=(6, 8), listed=False)
def _einsum(x: Any, y: Any) -> Any:
    return (
        torch.einsum("btc,bcd->btd", x, y),
        torch.einsum("btc,bsc->bts", x, x),
        torch.einsum("...c,...c->...", x, x),
        torch.einsum("bii->bi", x[:, :, :6]),
        torch.tensordot(x, y[0], dims=1),
        torch.bmm(x, y),
        torch.baddbmm(x[..., :5], x, y),
        torch.kron(x[0], y[0]),
        torch.cdist(x, y.mT),
        torch.outer(x[0, 0], y[0, :, 0]),
        torch.linalg.multi_dot([x[0], y[0], y[0].mT]),
    )


@function("reductions", shape=(6, 8), listed=False)
def _reductions(x: Any) -> Any:
    return (
        x.mean((1, 2)),
        x.var(-1),
        x.std(-1, unbiased=False),
        x.prod(-1),
        x.logsumexp((1, 2)),
        x.norm(dim=-1),
        x.norm(p=1, dim=1),
        x.amax((1, 2)),
        torch.var_mean(x, -1),
        (x > 0).any(-1),
        (x > 0).all(),
        x.argmax(-1),
        x.count_nonzero(-1),
        x.nansum(-1),
        x.median(),
        torch.std_mean(x),
        x.softmax(1),
        x.sum(dtype=torch.float32),
        (x > 0).sum(-1),
    )


@function("shapes of tensors", shape=(6, 8), listed=False)
def _shapes(x: Any) -> Any:
    return (
        x.transpose(1, 2),
        x.permute(2, 0, 1),
        x.reshape(x.shape[0], -1),
        x.flatten(),
        x.unflatten(-1, (2, 4)),
        x.unfold(-1, 3, 2),
        x.repeat(1, 2, 1),
        x.repeat_interleave(2, 1),
        x.expand(2, *x.shape),
        x.tile((2,)),
        x.movedim(0, -1),
        x.split([2, 4], 1),
        x.chunk(3, -1),
        torch.stack([x, x], 1),
        torch.hstack([x, x]),
        x.tril(),
        x.triu(1),
        x.diagonal(dim1=1, dim2=2),
        x.rot90(1, (1, 2)),
        x.roll((1, 2), (1, 2)),
        x.flip(1),
        torch.block_diag(x[0], x[1] if x.shape[0] > 1 else x[0]),
        torch.meshgrid(x[0, 0], x[0, 1], indexing="ij"),
        x.swapaxes(1, 2),
        x.tensor_split(3, 1),
        torch.cartesian_prod(x[0, 0, :2], x[0, 1, :2]),
        F.pad(x, (1, 2), mode="constant", value=1.0),
    )


@function("arithmetic", shape=(6, 8), listed=False)
def _arithmetic(x: Any) -> Any:
    a = x.abs() + 0.1
    return [
        a.sqrt(),
        a.rsqrt(),
        a.log(),
        a.log1p(),
        x.exp(),
        x.expm1(),
        x.sin(),
        x.atan2(a),
        x.erf(),
        a.lgamma(),
        a.digamma(),
        x.sigmoid().logit(),
        torch.lerp(x, a, 0.3),
        torch.addcmul(x, a, a, value=0.5),
        torch.addcdiv(x, x, a),
        x.clamp(-0.5, 0.5),
        x.clamp_min(0),
        torch.fmod(x, 0.7),
        torch.remainder(x, 0.7),
        x.floor_divide(0.5),
        x.round(decimals=1),
        x.frac(),
        x.sign(),
        torch.hypot(x, a),
        torch.logaddexp(x, a),
        torch.xlogy(x, a),
        x.nan_to_num(),
        a.pow(x),
        2.0**x,
        x**2,
        x.square(),
        x.reciprocal(),
        torch.heaviside(x, torch.tensor(0.5)),
        x.tan(),
        torch.special.i0(x),
        torch.special.erfcx(x),
        torch.special.ndtri(x.sigmoid()),
        torch.sinc(x),
        torch.copysign(a, x),
        torch.maximum(x, a),
        torch.polygamma(1, a),
        torch.ldexp(x, torch.tensor(2)),
    ]


@function("bits and integers", lambda rows: integers(50, rows, 8), listed=False)
def _integers(x: Any, n: Any) -> Any:
    return (
        x,
        n // 3,
        n % 7,
        n & 6,
        n | 1,
        n ^ 5,
        n << 2,
        n >> 1,
        -n // 4,
        n.float() / 3,
        n * 1.5,
        n.bool(),
        ~n,
        n.to(torch.int8),
        torch.gcd(n, n + 6),
        n.sort(-1).values,
        torch.histc(x.detach(), 5, -2, 2),
        torch.isin(n, torch.tensor([1, 2, 3])),
        n.clamp(3, 9),
        torch.div(n, 4, rounding_mode="floor"),
        torch.true_divide(n, 2),
        n.argmin(-1),
        n.sum(),
        n.float().mean(),
    )


@function("distributions", listed=False)
def _distributions(x: Any) -> Any:
    from torch import distributions as D

    scale = F.softplus(x) + 0.1
    normal_, other = D.Normal(x, scale), D.Normal(torch.zeros_like(x), torch.ones_like(x))
    categorical = D.Categorical(logits=x)
    return (
        normal_.log_prob(x.detach() * 0.5),
        normal_.entropy(),
        D.kl_divergence(normal_, other),
        categorical.log_prob(x.argmax(-1)),
        categorical.entropy(),
        D.Bernoulli(logits=x).log_prob((x > 0).float()),
        D.Gamma(scale, scale).log_prob(scale.detach()),
        D.Beta(scale, scale).log_prob(x.sigmoid().detach()),
        D.Laplace(x, scale).log_prob(x * 2),
        normal_.cdf(x + 1),
        D.Independent(normal_, 1).log_prob(x.detach()),
    )


@function("masked_select", listed=False)
def _masked_select(x: Any) -> Any:
    return x.masked_select(x > 0).sum(), x[x > 0].mean(), (x > 0).nonzero().float().mean()


@function("functional calls", shape=(6, 8), listed=False)
def _transforms(x: Any) -> Any:
    per_row = torch.vmap(lambda row: (row * row.sum()).cumsum(-1))(x)
    return (
        per_row,
        F.normalize(x, dim=-1),
        F.cosine_similarity(x, x + 1, dim=-1),
        F.scaled_dot_product_attention(x, x, x, is_causal=True),
        x.softmax(-1).sum(-1),
        F.layer_norm(x, (8,)),
        F.group_norm(x, 3),
        F.rms_norm(x, (8,)),
        F.glu(x),
        F.local_response_norm(x, 2),
        F.dropout(x, 0.0),
        F.softmin(x, -1),
        F.pairwise_distance(x, x * 2),
        F.pdist(x[0]) if x.shape[0] else x,
    )
