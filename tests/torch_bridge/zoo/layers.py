"""Layers of torch.nn, one small network a family."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.torch_bridge.zoo.specimen import Specimen, add, integers, network, normal


def vectors(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 12),)


def sequence(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 10, 12),)


def signal(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 4, 16),)


def image(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 4, 12, 12),)


def volume(rows: int) -> tuple[torch.Tensor]:
    return (normal(rows, 4, 6, 6, 6),)


def ids(rows: int) -> tuple[torch.Tensor]:
    return (integers(20, rows, 6),)


class Each(nn.Module):
    """Several layers on the same input; all results are returned."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: torch.Tensor) -> list[Any]:
        return [layer(*inputs) for layer in self.layers]


def each(name: str, batch: Any, *makers: Any, **options: Any) -> None:
    """Register several layers as one specimen; makers are called when it is built."""
    add(
        Specimen(
            name=name,
            group="layers",
            make=lambda _: Each(*(make() for make in makers)),
            batch=batch,
            **{"drops": False, **options},
        )
    )


for _name in ("RNN", "LSTM", "GRU"):
    _cls = getattr(nn, _name)
    each(_name.lower(), sequence, partial(_cls, 12, 8, batch_first=True), listed=True)
    each(
        f"bi{_name.lower()}",
        sequence,
        partial(_cls, 12, 8, num_layers=2, bidirectional=True, batch_first=True),
        listed=True,
    )
each(
    "recurrent variants",
    sequence,
    partial(nn.RNN, 12, 8, nonlinearity="relu", batch_first=True),
    partial(nn.LSTM, 12, 8, proj_size=4, batch_first=True),
    partial(nn.LSTM, 12, 8, bias=False, batch_first=True),
    partial(nn.GRU, 12, 8, 3, batch_first=True),
)
add(
    Specimen(
        name="lstm dropout",
        group="layers",
        make=lambda p: nn.LSTM(12, 8, num_layers=2, dropout=p, batch_first=True),
        batch=sequence,
        listed=True,
    )
)


@network(lambda rows: (normal(10, rows, 12), normal(2, rows, 8), normal(2, rows, 8, seed=1)))
class LstmSequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 8, num_layers=2)

    def forward(self, x: Any, h: Any, c: Any) -> Any:
        return self.lstm(x, (h, c))


@network(vectors)
class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.lstm, self.gru = nn.RNNCell(12, 6), nn.LSTMCell(12, 6), nn.GRUCell(12, 6)

    def forward(self, x: Any) -> Any:
        h = self.rnn(x)
        state = None
        for _ in range(3):
            state = self.lstm(x, state)
            h = self.gru(x, h)
        return h, state


def _attention_batch(rows: int) -> dict[str, Any]:
    padding = torch.zeros(rows, 10, dtype=torch.bool)
    padding[0, 7:] = True
    x = normal(rows, 10, 12)
    return {"query": x[:, :6], "key": x, "value": x + 1, "key_padding_mask": padding}


add(
    Specimen(
        name="multihead attention",
        group="layers",
        make=lambda p: nn.MultiheadAttention(12, 3, dropout=p, batch_first=True),
        batch=_attention_batch,
        listed=True,
    )
)
add(
    Specimen(
        name="multihead attention variants",
        group="layers",
        make=lambda p: nn.MultiheadAttention(
            12, 3, add_bias_kv=True, add_zero_attn=True, kdim=12, vdim=12, bias=False, batch_first=True
        ),
        batch=_attention_batch,
        listed=True,
        drops=False,
    )
)


def _encoder(p: float, norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=p, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


add(
    Specimen(
        name="transformer encoder",
        group="layers",
        make=_encoder,
        batch=lambda rows: {
            "src": normal(rows, 10, 12),
            "src_key_padding_mask": _attention_batch(rows)["key_padding_mask"],
        },
        listed=True,
    )
)
add(
    Specimen(
        name="transformer encoder norm first",
        group="layers",
        make=partial(_encoder, norm_first=True),
        batch=lambda rows: {
            "src": normal(rows, 10, 12),
            "mask": nn.Transformer.generate_square_subsequent_mask(10),
            "is_causal": True,
        },
        listed=True,
    )
)
add(
    Specimen(
        name="transformer",
        group="layers",
        make=lambda p: nn.Transformer(12, 3, 2, 2, 24, dropout=p, batch_first=True),
        batch=lambda rows: {
            "src": normal(rows, 10, 12),
            "tgt": normal(rows, 6, 12),
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(6),
            "tgt_is_causal": True,
        },
        listed=True,
    )
)
add(
    Specimen(
        name="transformer unhinted",
        group="layers",
        make=lambda p: nn.Transformer(12, 3, 1, 1, 24, dropout=p, batch_first=True),
        batch=lambda rows: {
            "src": normal(rows, 10, 12),
            "tgt": normal(rows, 6, 12),
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(6),
        },
        listed=True,
    )
)
add(
    Specimen(
        name="transformer sequence first",
        group="layers",
        make=lambda p: nn.Transformer(12, 3, 1, 1, 24, dropout=p),
        batch=lambda rows: (normal(10, rows, 12), normal(6, rows, 12)),
        listed=True,
    )
)

for _n, _batch in ((1, signal), (2, image), (3, volume)):
    _conv, _up = getattr(nn, f"Conv{_n}d"), getattr(nn, f"ConvTranspose{_n}d")
    each(
        f"conv{_n}d",
        _batch,
        partial(_conv, 4, 6, 3),
        partial(_conv, 4, 6, 3, stride=2, padding=1, bias=False),
        partial(_conv, 4, 8, 3, padding="same", dilation=2, groups=2),
        partial(_conv, 4, 4, 3, groups=4, padding="valid"),
        *(partial(_conv, 4, 6, 3, padding=1, padding_mode=m) for m in ("reflect", "replicate", "circular")),
    )
    each(
        f"conv transpose{_n}d",
        _batch,
        partial(_up, 4, 6, 3),
        partial(_up, 4, 6, 3, stride=2, padding=1, output_padding=1),
        partial(_up, 4, 6, 3, stride=2, groups=2, bias=False),
        partial(_up, 4, 6, 3, dilation=2),
    )
    each(
        f"pools{_n}d",
        _batch,
        *(
            partial(getattr(nn, f"{kind}{_n}d"), *args)
            for kind, args in (
                ("MaxPool", (3, 2, 1)),
                ("AvgPool", (2,)),
                ("AvgPool", (3, 2, 1, True)),
                ("AdaptiveAvgPool", (3,)),
                ("AdaptiveMaxPool", (3,)),
                ("AdaptiveAvgPool", (5,)),
                ("AdaptiveAvgPool", (1,)),
                ("LPPool", (2, 2)),
            )
        ),
        lambda n=_n: getattr(nn, f"MaxPool{n}d")(2, ceil_mode=True, return_indices=True),
        lambda n=_n: getattr(nn, f"AvgPool{n}d")(3, 2, 1, count_include_pad=False),
    )
    each(
        f"paddings{_n}d",
        _batch,
        *(
            partial(getattr(nn, f"{kind}Pad{_n}d"), *args)
            for kind, args in (
                ("Constant", (2, 0.5)),
                ("Zero", (1,)),
                ("Reflection", (2,)),
                ("Replication", (2,)),
                ("Circular", (2,)),
            )
        ),
        lambda n=_n: getattr(nn, f"ConstantPad{n}d")((-1, 2) * n, 1.0),
    )
    _norm = getattr(nn, f"BatchNorm{_n}d")
    each(
        f"batch norm{_n}d",
        _batch,
        partial(_norm, 4),
        partial(_norm, 4, affine=False),
        partial(_norm, 4, track_running_stats=False),
        partial(_norm, 4, eps=0.1, momentum=0.5),
        listed=True,
    )
    _norm = getattr(nn, f"InstanceNorm{_n}d")
    each(
        f"instance norm{_n}d",
        _batch,
        partial(_norm, 4),
        partial(_norm, 4, affine=True),
        partial(_norm, 4, affine=True, track_running_stats=True),
        listed=True,
    )
    each(
        f"dropouts{_n}d",
        _batch,
        partial(getattr(nn, f"Dropout{_n}d"), 0.0),
        partial(nn.Dropout, 0.0),
        partial(nn.AlphaDropout, 0.0),
        partial(nn.FeatureAlphaDropout, 0.0),
    )
    add(
        Specimen(
            name=f"dropout layer{_n}d",
            group="layers",
            make=lambda p, n=_n: nn.Sequential(
                nn.Conv1d(4, 4, 1) if n == 1 else nn.Flatten(2),
                nn.Dropout1d(p),
                nn.AlphaDropout(p),
                nn.FeatureAlphaDropout(p),
                nn.Dropout(p),
            ),
            batch=_batch,
        )
    )

each(
    "norms",
    image,
    partial(nn.GroupNorm, 2, 4),
    partial(nn.GroupNorm, 4, 4, affine=False),
    partial(nn.LayerNorm, 12),
    partial(nn.LayerNorm, (12, 12), bias=False),
    partial(nn.LayerNorm, (4, 12, 12), elementwise_affine=False, eps=0.1),
    partial(nn.RMSNorm, 12),
    partial(nn.RMSNorm, (12, 12), eps=1e-3),
    partial(nn.LocalResponseNorm, 2),
    partial(nn.LocalResponseNorm, 3, 0.1, 0.5, 2.0),
    listed=True,
)
each(
    "batch norm of vectors",
    vectors,
    partial(nn.BatchNorm1d, 12),
    partial(nn.BatchNorm1d, 12, momentum=0.9),
    listed=True,
)
ACTIVATIONS = """ELU Hardshrink Hardsigmoid Hardtanh Hardswish LeakyReLU LogSigmoid PReLU ReLU ReLU6 SELU CELU
    GELU Sigmoid SiLU Mish Softplus Softshrink Softsign Tanh Tanhshrink Identity""".split()
each(
    "activations",
    vectors,
    *(getattr(nn, a) for a in ACTIVATIONS),
    partial(nn.GELU, "tanh"),
    partial(nn.Threshold, 0.1, 20),
    nn.GLU,
    partial(nn.Softmin, 1),
    partial(nn.Softmax, -1),
    partial(nn.LogSoftmax, 1),
    partial(nn.PReLU, 12),
    partial(nn.Softplus, 2.0, 1.0),
    partial(nn.ELU, 0.5),
    lambda: nn.RReLU(0.2, 0.2),
)
each("softmax2d", image, nn.Softmax2d)
each("batch norm without momentum", image, partial(nn.BatchNorm2d, 4, momentum=None))
each("elu in place", vectors, lambda: nn.Sequential(nn.Linear(12, 12), nn.ELU(0.5, True)))
each("rrelu", vectors, nn.RReLU, random=True)
each(
    "shapes",
    image,
    partial(nn.PixelShuffle, 2),
    partial(nn.PixelUnshuffle, 2),
    partial(nn.ChannelShuffle, 2),
    partial(nn.Flatten, 1),
    partial(nn.Flatten, 2, 3),
    partial(nn.Unflatten, 1, (2, 2)),
    partial(nn.Unfold, 3, 2, 1, 2),
    partial(nn.ZeroPad2d, (1, 2, 0, 3)),
    listed=True,
)
each(
    "fold",
    lambda rows: (normal(rows, 16, 9),),
    partial(nn.Fold, (8, 8), 4, padding=0, stride=2),
)
for _mode, _batch in (
    ("nearest", image),
    ("nearest-exact", image),
    ("bilinear", image),
    ("bicubic", image),
    ("area", image),
    ("linear", signal),
    ("trilinear", volume),
):
    _corners = {"align_corners": True} if _mode in ("bilinear", "bicubic", "linear", "trilinear") else {}
    each(
        f"upsample {_mode}",
        _batch,
        partial(nn.Upsample, scale_factor=2, mode=_mode),
        partial(nn.Upsample, scale_factor=1.7, mode=_mode),
        partial(nn.Upsample, scale_factor=0.6, mode=_mode, recompute_scale_factor=True),
        partial(nn.Upsample, scale_factor=2, mode=_mode, **_corners),
        partial(nn.Upsample, size=7, mode=_mode),
        listed=True,
    )


@network(image)
class Unpooling(nn.Module):
    def forward(self, x: Any) -> Any:
        y, where = F.max_pool2d(x, 2, return_indices=True)
        z, at = F.max_pool1d(x.flatten(2), 2, return_indices=True)
        return F.max_unpool2d(y * 2, where, 2), F.max_unpool1d(z, at, 2, output_size=[144])


each(
    "embeddings",
    ids,
    partial(nn.Embedding, 20, 6),
    partial(nn.Embedding, 20, 6, padding_idx=3),
    partial(nn.Embedding, 20, 6, padding_idx=-1),
    partial(nn.Embedding, 20, 6, scale_grad_by_freq=True),
    partial(nn.Embedding, 20, 6, sparse=True),
)
each("embedding max norm", ids, partial(nn.Embedding, 20, 6, max_norm=0.5))
each(
    "embedding bags",
    ids,
    partial(nn.EmbeddingBag, 20, 6, mode="sum"),
    partial(nn.EmbeddingBag, 20, 6, mode="mean"),
    partial(nn.EmbeddingBag, 20, 6, mode="max"),
    partial(nn.EmbeddingBag, 20, 6, mode="sum", padding_idx=2),
    listed=True,
)
add(
    Specimen(
        name="embedding bag offsets",
        group="layers",
        make=lambda _: nn.EmbeddingBag(20, 6, mode="mean"),
        batch=lambda rows: (integers(20, rows * 3), torch.arange(rows) * 3),
        drops=False,
        listed=True,
    )
)
add(
    Specimen(
        name="embedding bag weights",
        group="layers",
        make=lambda _: nn.EmbeddingBag(20, 6, mode="sum"),
        batch=lambda rows: {"input": integers(20, rows, 3), "per_sample_weights": normal(rows, 3)},
        drops=False,
        listed=True,
    )
)
each(
    "two inputs",
    lambda rows: (normal(rows, 12), normal(rows, 12, seed=1)),
    partial(nn.Bilinear, 12, 12, 5),
    nn.CosineSimilarity,
    nn.PairwiseDistance,
    partial(nn.PairwiseDistance, 1.0, 1e-3, True),
    partial(nn.CosineSimilarity, 1, 1e-3),
)
each(
    "linears",
    vectors,
    partial(nn.Linear, 12, 4),
    partial(nn.Linear, 12, 4, bias=False),
    partial(nn.LazyLinear, 4),
    nn.Identity,
)
each(
    "lazy layers",
    image,
    partial(nn.LazyConv2d, 5, 3),
    nn.LazyBatchNorm2d,
    nn.LazyInstanceNorm2d,
    partial(nn.LazyConvTranspose2d, 5, 3),
)


def _parametrised(kind: str) -> nn.Module:
    from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

    linear, conv = nn.Linear(12, 6), nn.Conv1d(12, 4, 3)
    if kind == "old weight norm":
        return nn.Sequential(weight_norm(linear))
    if kind == "old spectral norm":
        return nn.Sequential(spectral_norm(linear))
    if kind == "parametrize":

        class Symmetric(nn.Module):
            def forward(self, x: Any) -> Any:
                return x.triu() + x.triu(1).transpose(-1, -2)

        square = nn.Linear(12, 12)
        parametrize.register_parametrization(square, "weight", Symmetric())
        return square
    function = getattr(parametrizations, kind)
    return nn.Sequential(
        function(linear),
        nn.Unflatten(1, (6, 1)),
        nn.Flatten(),
        nn.Linear(6, 12),
        nn.Unflatten(1, (12, 1)),
        nn.ConstantPad1d(2, 1.0),
        function(conv),
    )


for _kind in ("weight_norm", "spectral_norm", "old weight norm", "old spectral norm"):
    add(
        Specimen(
            name=_kind,
            group="layers",
            make=lambda _, kind=_kind: _parametrised(kind),
            batch=vectors,
            drops=False,
            listed=True,
        )
    )
for _kind in ("orthogonal", "parametrize"):
    add(
        Specimen(
            name=_kind,
            group="layers",
            make=lambda _, kind=_kind: (
                _parametrised(kind)
                if kind == "parametrize"
                else torch.nn.utils.parametrizations.orthogonal(nn.Linear(12, 6))
            ),
            batch=vectors,
            drops=False,
        )
    )
