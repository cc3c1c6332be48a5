"""Mixed precision as torch.autocast defines it on GPUs: `convert(module, ..., precision="bf16")`.

Parameters and buffers stay float32; products, convolutions and attention run in half precision, norms,
softmax, losses and sums in float32, and what mixes both in the wider one. It is torch's own autocast that
decides, while the module is exported, so Python code that looks at dtypes sees what it would see on a GPU.
The example lies on the host, where autocast has other lists: for the time of an export, operators on the
host follow the GPU's. Which operators have a rule is asked of torch's dispatcher; the lists:
https://pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior
"""

import contextlib
import enum
import functools
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from torch_bridge.errors import BridgeError, message


class Rule(enum.Enum):
    """The dtype in which autocast runs an operator."""

    LOWER = "lower"  # half precision
    FLOAT32 = "float32"
    WIDEST = "widest"  # the widest dtype among its operands
    ALONE = "alone"  # the host has a rule, GPUs have none


_LOWER = frozenset(
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d "
    "convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv "
    "linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention "
    "_scaled_dot_product_flash_attention".split()
)
_WIDEST = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
)
# Made of operators that have a rule; exported graphs keep them whole. cuDNN runs recurrent layers in half.
_WHOLE = {
    **dict.fromkeys(("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"), Rule.LOWER),
    **dict.fromkeys(("square", "nll_loss_nd"), Rule.FLOAT32),
    **dict.fromkeys(
        "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d.vec "
        "upsample_bilinear2d.vec upsample_bicubic2d.vec upsample_trilinear3d.vec".split(),
        Rule.FLOAT32,
    ),
}
# Of the host's own float32 list, those that GPUs run in half precision; the others have no such kernel.
_ALONE = frozenset(
    "adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d fractional_max_pool2d fractional_max_pool3d "
    "grid_sampler_2d grid_sampler_3d max_pool3d max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d "
    "replication_pad1d replication_pad2d replication_pad3d".split()
)
_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPrecision:
    """The module computes in its own dtypes."""

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Holds while a module is exported and its graph made functional."""
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """The module computes as under `torch.autocast("cuda", dtype)`.

    Args:
        dtype: torch.bfloat16 or torch.float16 (whose gradients need a loss scale).
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise BridgeError(
                message(
                    f"autocast computes in half precision, not in {self.dtype}.",
                    hint='precision="bf16" or "fp16", or None for the dtypes of the module',
                )
            )

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """An autocast region with the rules of GPUs; the module's own regions for them nest in it."""
        with gpu_rules(), _accelerator_regions_on_host(), torch.autocast("cpu", dtype=self.dtype):
            yield


Precision = FullPrecision | Autocast
_NAMES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def precision_of(given: Any) -> Precision:
    """The strategy a user means by None, a name such as "bf16", a torch dtype, or a strategy.

    Raises:
        BridgeError: for anything else.
    """
    if given is None or given in ("fp32", "float32", torch.float32):
        return FullPrecision()
    if isinstance(given, FullPrecision | Autocast):
        return given
    if isinstance(given, torch.dtype):
        return Autocast(dtype=given)
    if given not in _NAMES:
        raise BridgeError(
            message(f"precision {given!r} is not known.", f"known: None, {', '.join(map(repr, _NAMES))}")
        )
    return Autocast(dtype=_NAMES[given])


_active: ContextVar[bool] = ContextVar("gpu_rules", default=False)


def follows_gpus() -> bool:
    """Whether autocast on the host follows the lists of GPUs just now."""
    return _active.get()


@contextlib.contextmanager
def gpu_rules() -> Iterator[None]:
    """Let autocast on the host follow the lists of GPUs, for a while and for the whole process."""
    if _active.get():
        yield
        return
    token = _active.set(True)
    try:
        with torch.library._scoped_library("aten", "IMPL") as library:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch tells of every kernel that is replaced
                for operator, rule in rules().items():
                    library.impl(operator, _kernel(operator, rule), "AutocastCPU")
            yield
    finally:
        _active.reset(token)


@functools.cache
def rules() -> dict[Any, Rule]:
    """Every operator that autocast on GPUs treats otherwise than leaving it alone, or the host does."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    found: dict[Any, Rule] = {}
    for name in filter(_is_torchs, registered("AutocastCUDA")):
        base = name.removeprefix("aten::").split(".")[0]
        found[_overload(name)] = rule_of_name(base)
    for name in filter(_is_torchs, registered("AutocastCPU")):
        if name.removeprefix("aten::").split(".")[0] in _ALONE:
            found[_overload(name)] = Rule.ALONE
    found |= {_overload(name): rule for name, rule in _WHOLE.items()}
    return found


def rule_of_name(base: str) -> Rule:
    """The rule of an operator that has one on GPUs, by its name without namespace and overload."""
    return Rule.LOWER if base in _LOWER else Rule.WIDEST if base in _WIDEST else Rule.FLOAT32


def _is_torchs(name: str) -> bool:
    """Other libraries (torchvision) register operators of their own, with rules of their own."""
    return name.startswith("aten::")


def _overload(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(operator: Any, rule: Rule) -> Callable[..., Any]:
    """What the dispatcher runs for an operator inside an autocast region."""
    names = [argument.name for argument in operator._schema.arguments]
    sets_dtype = rule is Rule.FLOAT32 and "dtype" in names

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_HOST):
            if sets_dtype:
                given = kwargs.get("dtype", dict(zip(names, args, strict=False)).get("dtype"))
                if given is None and _is_cast(args[0]):
                    kwargs, args = {**kwargs, "dtype": torch.float32}, args[: names.index("dtype")]
            elif rule is not Rule.ALONE:
                args, kwargs = cast(rule, torch.get_autocast_dtype("cpu"), args, kwargs)
            return operator(*args, **kwargs)

    return kernel


def cast(rule: Rule, lower: torch.dtype, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an operator in the dtype that its rule gives, `lower` being the region's."""
    dtype = lower if rule is Rule.LOWER else torch.float32
    if rule is Rule.WIDEST:
        leaves = torch_pytree.tree_leaves((args, kwargs))
        wide = any(leaf.dtype != lower for leaf in leaves if _is_cast(leaf))
        dtype = torch.float32 if wide else lower
    return torch_pytree.tree_map(
        lambda x: x.to(dtype) if _is_cast(x) and x.dtype != dtype else x, (args, kwargs)
    )


def _is_cast(leaf: Any) -> bool:
    """float64 stays as it is, as do integers."""
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64


@contextlib.contextmanager
def _accelerator_regions_on_host() -> Iterator[None]:
    """Read `torch.autocast("cuda", ...)` as a region for the host, where the example's tensors are."""
    original = torch.autocast.__init__

    def on_host(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        original(self, "cpu", dtype, *args, **kwargs)

    torch.autocast.__init__ = on_host
    try:
        yield
    finally:
        torch.autocast.__init__ = original
