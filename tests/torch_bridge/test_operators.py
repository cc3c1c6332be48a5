"""Every family of operators against torch: values, dtypes, shapes and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.torch_bridge.oracle import assert_same_functions

Cases = dict[str, Callable[..., Any]]


def seeded(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _of(name: str, argument: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda x: getattr(torch, name)(argument(x))


def test_functions_of_one_number_match_torch() -> None:
    (x,) = seeded((3, 5))
    names = """abs neg sign ceil floor trunc round square exp exp2 expm1 sin cos tan sinh cosh tanh asinh
        atan sigmoid erf erfc isnan isfinite sgn frac relu""".split()
    positive = "log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma".split()
    inside = "asin acos atanh erfinv".split()
    cases: Cases = {name: getattr(torch, name) for name in names}
    cases |= {name: _of(name, lambda x: x.abs() + 0.5) for name in positive}
    cases |= {name: _of(name, lambda x: torch.tanh(x) * 0.9) for name in inside}
    assert_same_functions(cases, [x])


def test_arithmetic_promotes_as_torch_does() -> None:
    x, y = seeded((3, 4), (4,))
    whole = torch.tensor([[3, -2, 5, 1]] * 3)
    assert_same_functions(
        {
            "add": lambda x, y, n: x + y,
            "add alpha": lambda x, y, n: torch.add(x, y, alpha=2),
            "add int": lambda x, y, n: n + 1,
            "int and float": lambda x, y, n: n * x,
            "int and scalar float": lambda x, y, n: n * 1.5,
            "int divided": lambda x, y, n: n / 2,
            "zero-dim float beside int": lambda x, y, n: n + y[0],
            "rsub": lambda x, y, n: 1 - x,
            "sub": lambda x, y, n: x - y,
            "mul": lambda x, y, n: x * y,
            "div": lambda x, y, n: x / y,
            "floor_divide": lambda x, y, n: n // 2,
            "div floor": lambda x, y, n: torch.div(n, 3, rounding_mode="floor"),
            "div trunc": lambda x, y, n: torch.div(n, 3, rounding_mode="trunc"),
            "remainder": lambda x, y, n: n % 3,
            "fmod": lambda x, y, n: torch.fmod(n, 3),
            "pow": lambda x, y, n: x**2,
            "pow 3": lambda x, y, n: x**3.0,
            "pow half": lambda x, y, n: x.abs() ** 0.5,
            "pow tensor": lambda x, y, n: x.abs() ** y,
            "rpow": lambda x, y, n: 2**x,
            "maximum": lambda x, y, n: torch.maximum(x, y),
            "minimum": lambda x, y, n: torch.minimum(x, y),
            "clamp": lambda x, y, n: torch.clamp(x, -0.5, 0.5),
            "clamp min": lambda x, y, n: x.clamp_min(0.1),
            "clamp tensor": lambda x, y, n: torch.clamp(x, max=y),
            "lerp": lambda x, y, n: torch.lerp(x, y, 0.3),
            "addcmul": lambda x, y, n: torch.addcmul(x, x, y, value=0.5),
            "addcdiv": lambda x, y, n: torch.addcdiv(x, x, y, value=0.5),
            "atan2": lambda x, y, n: torch.atan2(x, y),
            "hypot": lambda x, y, n: torch.hypot(x, y),
            "logaddexp": lambda x, y, n: torch.logaddexp(x, y),
            "bf16 and float": lambda x, y, n: x.bfloat16() + y.bfloat16()[0],
            "bool": lambda x, y, n: (x > 0) + (n > 1),
        },
        [x, y, whole],
        tolerance=1e-4,
    )


def test_comparison_logic_and_selection_match_torch() -> None:
    x, y = seeded((3, 4), (3, 4))
    n = torch.arange(12).reshape(3, 4)
    assert_same_functions(
        {
            "eq": lambda x, y, n: n == 3,
            "ne": lambda x, y, n: n != x,
            "lt": lambda x, y, n: x < y,
            "ge": lambda x, y, n: n >= 2.5,
            "and": lambda x, y, n: (x > 0) & (y > 0),
            "or": lambda x, y, n: (x > 0) | (y > 0),
            "xor": lambda x, y, n: n ^ 5,
            "not": lambda x, y, n: ~(x > 0),
            "logical_and": lambda x, y, n: torch.logical_and(n, x > 0),
            "where": lambda x, y, n: torch.where(x > 0, x, y),
            "where scalar": lambda x, y, n: torch.where(x > 0, x, 0.0),
            "masked_fill": lambda x, y, n: x.masked_fill(y > 0, -1e9),
            "tril": lambda x, y, n: x.tril(),
            "triu": lambda x, y, n: x.triu(1),
            "shift": lambda x, y, n: (n << 2) >> 1,
            "any": lambda x, y, n: (n > 5).any(1),
            "all": lambda x, y, n: (n > 5).all(),
        },
        [x, y, n],
    )


def test_activations_match_torch_at_and_away_from_their_kinks() -> None:
    (x,) = seeded((4, 6))
    x[0] = torch.tensor([0.0, 1.0, -1.0, 3.0, -3.0, 6.0])
    cases: Cases = {
        name: getattr(F, name)
        for name in """relu relu6 silu gelu mish softplus softshrink hardshrink elu celu selu leaky_relu
        hardtanh hardsigmoid hardswish logsigmoid tanhshrink softsign""".split()
    }
    cases |= {
        "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
        "threshold": lambda x: F.threshold(x, 0.1, 20.0),
        "glu": lambda x: F.glu(x, 1),
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(0),
        "prelu": lambda x: F.prelu(x, x[0, :1].detach() + 0.25),
        "softmin": lambda x: F.softmin(x, 1),
    }
    assert_same_functions(cases, [x], tolerance=2e-4)


def test_half_precision_matches_torch_within_its_rounding() -> None:
    (x,) = seeded((4, 6))
    assert_same_functions(
        {
            "softmax": lambda x: x.softmax(-1),
            "layer_norm": lambda x: F.layer_norm(x, (6,)),
            "gelu": F.gelu,
            "mean": lambda x: x.mean(),
            "linear": lambda x: F.linear(x, x),
            "float result": lambda x: x.softmax(-1, dtype=torch.float32),
        },
        [x.bfloat16()],
        tolerance=1.6e-2,  # four units in the last place: bf16 has 8 bits
    )


def test_reductions_match_torch() -> None:
    (x,) = seeded((3, 4, 5))
    assert_same_functions(
        {
            "sum": lambda x: x.sum(),
            "sum dims": lambda x: x.sum((0, -1), keepdim=True),
            "sum int": lambda x: (x > 0).sum(1),
            "mean": lambda x: x.mean(1),
            "mean bf16": lambda x: x.bfloat16().mean(),
            "prod": lambda x: x.prod(2),
            "var": lambda x: x.var(1),
            "std biased": lambda x: x.std((0, 2), unbiased=False),
            "var_mean": lambda x: torch.var_mean(x, 1),
            "amax": lambda x: x.amax((1, 2)),
            "max": lambda x: x.max(),
            "max dim": lambda x: x.max(1),
            "min dim": lambda x: x.min(-1, keepdim=True),
            "argmax": lambda x: x.argmax(1),
            "argmin all": lambda x: x.argmin(),
            "logsumexp": lambda x: x.logsumexp(1),
            "norm": lambda x: x.norm(dim=1),
            "norm 1": lambda x: x.norm(1, dim=1),
            "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf"), 1),
            "cumsum": lambda x: x.cumsum(1),
            "cumprod": lambda x: x.cumprod(1),
            "cummax": lambda x: x.cummax(1),
            "logcumsumexp": lambda x: x.logcumsumexp(1),
            "normalize": lambda x: F.normalize(x, dim=1),
            "cosine": lambda x: F.cosine_similarity(x[0], x[1]),
        },
        [x],
    )


def test_rearrangements_match_torch() -> None:
    (x,) = seeded((2, 3, 4))
    assert_same_functions(
        {
            "view": lambda x: x.view(2, -1),
            "reshape": lambda x: x.transpose(1, 2).reshape(-1, 3),
            "permute": lambda x: x.permute(2, 0, 1),
            "expand": lambda x: x[:, :1].expand(-1, 5, -1),
            "unsqueeze": lambda x: x.unsqueeze(-2),
            "squeeze": lambda x: x[:, :1].squeeze(1),
            "flatten": lambda x: x.flatten(1),
            "unflatten": lambda x: x.unflatten(2, (2, 2)),
            "slice": lambda x: x[:, 1:, ::2],
            "slice negative": lambda x: x[..., -2:],
            "select": lambda x: x[:, -1],
            "cat": lambda x: torch.cat([x, x * 2], 1),
            "stack": lambda x: torch.stack([x, x], 2),
            "split": lambda x: x.split(3, 2),
            "split sizes": lambda x: x.split([1, 3], 2),
            "chunk": lambda x: x.chunk(2, 2),
            "unbind": lambda x: x.unbind(1),
            "repeat": lambda x: x.repeat(1, 2, 1),
            "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
            "flip": lambda x: x.flip(1),
            "roll": lambda x: x.roll((1, -1), (1, 2)),
            "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=3.0),
            "pad cut": lambda x: F.pad(x, (-1, 1)),
            "pad reflect": lambda x: F.pad(x, (2, 1), mode="reflect"),
            "pad replicate": lambda x: F.pad(x, (2, 1), mode="replicate"),
            "pad circular": lambda x: F.pad(x, (2, 1), mode="circular"),
            "unfold": lambda x: x.unfold(2, 2, 1),
            "diagonal": lambda x: x.diagonal(0, 1, 2),
            "diag_embed": lambda x: torch.diag_embed(x[0]),
            "movedim": lambda x: x.movedim(0, -1),
            "in place on a view": _write_through_view,
            "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
        },
        [x],
    )


def _write_through_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, 1].mul_(2)
    y[..., 0] = 5.0
    return y


def test_indexing_matches_torch() -> None:
    (x,) = seeded((4, 5, 3))
    index = torch.tensor([[0, 2], [1, 1], [3, 0], [2, 2]])
    assert_same_functions(
        {
            "gather": lambda x, i: x[..., 0].gather(1, i),
            "index": lambda x, i: x[i],
            "index middle": lambda x, i: x[:, i[0]],
            "index pair": lambda x, i: x[i[:, 0], i[:, 1]],
            "index_select": lambda x, i: x.index_select(1, i[0]),
            "embedding": lambda x, i: F.embedding(i, x[:, 0]),
            "embedding padding": lambda x, i: F.embedding(i, x[:, 0], padding_idx=1),
            "take_along_dim": lambda x, i: torch.take_along_dim(x[..., 0], i, 1),
            "scatter": lambda x, i: x[..., 0].scatter(1, i[:, :1], x[:, :1, 1]),
            "scatter value": lambda x, i: torch.zeros(4, 5).scatter(1, i[:, :1], 1.0),
            "scatter_add": lambda x, i: x[..., 0].scatter_add(1, i, x[:, :2, 1]),
            "scatter_reduce": lambda x, i: x[..., 0].scatter_reduce(1, i, x[:, :2, 1], "mean"),
            "index_add": lambda x, i: x.index_add(1, i[0], x[:, :2]),
            "index_copy": lambda x, i: x.index_copy(1, i[0], x[:, 3:]),
            "index_fill": lambda x, i: x.index_fill(1, i[0], 2.0),
            "index_put": lambda x, i: x.index_put((i[:, 0], i[:, 1]), x[0, :4]),
            "index_put add": lambda x, i: x.index_put((i[:, 0],), x[0, :1], accumulate=True),
            "masked write": _masked_write,
            "one_hot": lambda x, i: F.one_hot(i, 5),
            "topk": lambda x, i: x.topk(2, 1),
            "sort": lambda x, i: x.sort(1, descending=True),
            "argsort": lambda x, i: x.argsort(1),
            "median": lambda x, i: x.median(1),
            "searchsorted": lambda x, i: torch.searchsorted(torch.arange(5), i),
            "bucketize": lambda x, i: torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0])),
        },
        [x, index],
    )


def _masked_write(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[y > 0] = 7.0
    return y


def test_products_match_torch() -> None:
    a, b, c = seeded((2, 3, 4), (2, 4, 5), (4, 5))
    assert_same_functions(
        {
            "bmm": lambda a, b, c: torch.bmm(a, b),
            "matmul": lambda a, b, c: a @ c,
            "matmul vector": lambda a, b, c: a @ c[:, 0],
            "mm": lambda a, b, c: a[0] @ c,
            "addmm": lambda a, b, c: torch.addmm(c[0], a[0], c, beta=0.5, alpha=2),
            "baddbmm": lambda a, b, c: torch.baddbmm(b[:, :3], a, b),
            "linear": lambda a, b, c: F.linear(a, c.t(), c[0]),
            "einsum": lambda a, b, c: torch.einsum("b i j, b j k -> b k i", a, b),
            "outer": lambda a, b, c: torch.outer(c[0], c[1]),
            "bilinear": lambda a, b, c: F.bilinear(a[0], c[:3, :4], torch.ones(2, 4, 4)),
            "tensordot": lambda a, b, c: torch.tensordot(a, c, dims=1),
            "cdist": lambda a, b, c: torch.cdist(a, a[:, :1] + 1.0),
            "cdist of equal rows": lambda a, b, c: torch.cdist(a, a, p=1.5),
            "cdist of equal rows, p < 1": lambda a, b, c: torch.cdist(a, a, p=0.5),
        },
        [a, b, c],
    )


def test_convolutions_match_torch() -> None:
    x, w, t = seeded((2, 4, 9, 8), (6, 2, 3, 3), (4, 3, 3, 3))
    assert_same_functions(
        {
            "plain": lambda x, w, t: F.conv2d(x, torch.cat([w, w], 1), padding=1),
            "groups": lambda x, w, t: F.conv2d(x, w, w[:, 0, 0, 0], stride=2, groups=2),
            "dilation": lambda x, w, t: F.conv2d(x, w, dilation=2, groups=2, padding=(2, 1)),
            "same": lambda x, w, t: F.conv2d(x, w[..., :2], groups=2, padding="same"),
            "unbatched": lambda x, w, t: F.conv2d(x[0], w, groups=2),
            "one dim": lambda x, w, t: F.conv1d(x[..., 0], w[..., 0], groups=2, padding=1),
            "transposed": lambda x, w, t: F.conv_transpose2d(x, t, stride=2, padding=1, output_padding=1),
            "transposed groups": lambda x, w, t: F.conv_transpose2d(x, t, groups=2, dilation=2),
        },
        [x, w, t],
        tolerance=3e-4,
    )


def test_pooling_and_resampling_match_torch() -> None:
    (x,) = seeded((2, 3, 7, 8))
    assert_same_functions(
        {
            "max": lambda x: F.max_pool2d(x, 2),
            "max overlapping": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
            "max dilated": lambda x: F.max_pool2d(x, 2, dilation=2),
            "max with indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
            "avg": lambda x: F.avg_pool2d(x, 3, 2, 1),
            "avg ceil": lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False),
            "avg 1d": lambda x: F.avg_pool1d(x[:, :, 0], 2),
            "adaptive": lambda x: F.adaptive_avg_pool2d(x, (1, 1)),
            "adaptive uneven": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
            "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
            "bilinear corners": lambda x: F.interpolate(x, size=(5, 11), mode="bilinear", align_corners=True),
            "nearest": lambda x: F.interpolate(x, size=(14, 5)),
            "linear": lambda x: F.interpolate(x[:, :, 0], scale_factor=1.5, mode="linear"),
        },
        [x],
    )


def test_normalisations_match_torch() -> None:
    (x,) = seeded((4, 6, 5))
    assert_same_functions(
        {
            "layer_norm": lambda x: F.layer_norm(x, (5,), x[0, 0], x[0, 1]),
            "layer_norm two dims": lambda x: F.layer_norm(x, (6, 5)),
            "rms_norm": lambda x: F.rms_norm(x, (5,), x[0, 0]),
            "group_norm": lambda x: F.group_norm(x, 3, x[0, :, 0], x[0, :, 1]),
            "instance_norm": lambda x: F.instance_norm(x),
            "batch_norm": lambda x: F.batch_norm(x, None, None, x[0, :, 0], x[0, :, 1], training=True),
            "batch_norm eval": lambda x: F.batch_norm(x, torch.zeros(6), torch.ones(6), x[0, :, 0]),
            "local_response": lambda x: F.local_response_norm(x, 3),
        },
        [x],
        tolerance=2e-4,
    )


LOSSES: Cases = {
    "cross_entropy": lambda x, y, t: F.cross_entropy(x, t),
    "ignored": lambda x, y, t: F.cross_entropy(x, t, ignore_index=2),
    "weights": lambda x, y, t: F.cross_entropy(x, t, weight=y[0].abs().detach(), ignore_index=1),
    "smoothing": lambda x, y, t: F.cross_entropy(x, t, label_smoothing=0.2, ignore_index=0),
    "smoothing weights": lambda x, y, t: F.cross_entropy(x, t, y[0].abs().detach(), label_smoothing=0.1),
    "probabilities": lambda x, y, t: F.cross_entropy(x, y.softmax(1)),
    "sum": lambda x, y, t: F.cross_entropy(x, t, reduction="sum"),
    "none": lambda x, y, t: F.cross_entropy(x, t, reduction="none"),
    "space": lambda x, y, t: F.cross_entropy(x.t()[None], t.repeat(2)[: x.shape[0]][None] % 3),
    "nll": lambda x, y, t: F.nll_loss(x.log_softmax(1), t, ignore_index=1),
    "mse": lambda x, y, t: F.mse_loss(x, y),
    "l1": lambda x, y, t: F.l1_loss(x, y, reduction="sum"),
    "smooth_l1": lambda x, y, t: F.smooth_l1_loss(x, y, beta=0.5),
    "huber": lambda x, y, t: F.huber_loss(x, y, delta=0.5),
    "bce": lambda x, y, t: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "bce logits": lambda x, y, t: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), pos_weight=y[0].abs().detach()
    ),
    "kl_div": lambda x, y, t: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "kl_div log": lambda x, y, t: F.kl_div(x.log_softmax(1), y.log_softmax(1), log_target=True),
    "poisson": lambda x, y, t: F.poisson_nll_loss(x, y.abs()),
    "hinge": lambda x, y, t: F.hinge_embedding_loss(x, (y > 0) * 2 - 1),
    "cosine": lambda x, y, t: F.cosine_embedding_loss(x, y, torch.ones(6)),
    "margin ranking": lambda x, y, t: F.margin_ranking_loss(x[:, 0], y[:, 0], torch.ones(6)),
    "triplet": lambda x, y, t: F.triplet_margin_loss(x, y, x.flip(0)),
    "soft margin": lambda x, y, t: F.soft_margin_loss(x, (y > 0) * 2 - 1),
    "multi margin": lambda x, y, t: F.multi_margin_loss(x, t),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_losses_match_torch() -> None:
    x, y = seeded((6, 4), (6, 4))
    assert_same_functions(LOSSES, [x, y, torch.tensor([0, 1, 2, 3, 2, 1])])
