"""Networks to plan: from shapes alone, in the sizes that people train.

Parameters and optimizer state (AdamW) are float32; products run in `dtype` (bfloat16, or float16 where a
card has no bfloat16 units).
"""

from collections.abc import Callable

from benchmarks.models import bert, gpt, moe, resnet, scanned, t5, unet
from benchmarks.models.bert import Bert
from benchmarks.models.case import Case
from benchmarks.models.gpt import Gpt
from benchmarks.models.moe import Moe
from benchmarks.models.resnet import ResNet
from benchmarks.models.scanned import Scanned
from benchmarks.models.t5 import T5
from benchmarks.models.unet import UNet

__all__ = ["CASES", "Case", "make_case"]


def _bert(layers: int, length: int) -> Callable[[str, str], Case]:
    rows = 16 if length == 128 else 4
    return lambda name, dtype: bert.case(name, Bert(layers=layers, length=length, dtype=dtype), rows)


CASES: dict[str, Callable[[str, str], Case]] = {
    "bert-24-128": _bert(24, 128),
    "bert-24-512": _bert(24, 512),
    "bert-96-128": _bert(96, 128),
    "bert-96-512": _bert(96, 512),
    "bert-256-128": _bert(256, 128),
    "bert-256-512": _bert(256, 512),
    "resnet152x8": lambda name, dtype: resnet.case(name, ResNet(dtype=dtype), 16),
    "gpt-1.3b": lambda name, dtype: gpt.case(name, Gpt(dtype=dtype), 4),
    "t5-3b": lambda name, dtype: t5.case(name, T5(dtype=dtype), 4),
    "unet-1b": lambda name, dtype: unet.case(name, UNet(dtype=dtype), 8),
    "moe-7b": lambda name, dtype: moe.case(name, Moe(dtype=dtype), 4),
    "scan-96": lambda name, dtype: scanned.case(name, Scanned(dtype=dtype), 4),
}
"""Name -> maker, from the name and the dtype of products."""


def make_case(name: str, dtype: str = "bfloat16") -> Case:
    """One of `CASES`, its products in `dtype`."""
    return CASES[name](name, dtype)
