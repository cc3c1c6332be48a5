"""torch.export of a module at one batch size: a functional graph that keeps the high-level operators.

`run_decompositions({})` makes the graph functional without opening linear, attention, norms or losses.
Gradient barriers survive: `detach` stays, results of `no_grad` regions get a `detach`, `.data` becomes
one. A custom autograd.Function is refused, since its backward cannot be recovered from a graph.
"""

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree

from torch_bridge.decompose import drop_checks, open_unlowered
from torch_bridge.errors import BridgeError, message
from torch_bridge.inputs import Inputs
from torch_bridge.rewrites import rewritten
from torch_bridge.signature import OUTSIDE_USER_CODE

_aten = torch.ops.aten
_SCALARS = (int, float, bool, complex, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTree:
    """What the module returned, taken apart by torch's own pytrees.

    Args:
        spec: torch's structure.
        leaves: a fixed value, or `...` where a tensor stands.
        dropped: paths and classes of leaves that neither torch nor JAX can take apart (left out: None).
        loss: position of the scalar loss among the tensors that were returned, if there is one.
    """

    spec: Any
    leaves: tuple[Any, ...]
    dropped: tuple[str, ...]
    loss: int | None


class _Record:
    """Holds what forward returned: torch.export puts a module's own attributes back after tracing."""

    returned: OutputTree | None = None


class Exportable(torch.nn.Module):
    """The module as a function of flat tensors that returns flat tensors, with its loss if one is given."""

    def __init__(self, module: torch.nn.Module, inputs: Inputs, loss: Callable[..., Any] | None) -> None:
        super().__init__()
        self.module = module
        self.loss = loss  # registers a loss that is a module, so that its buffers are found
        self.inputs = inputs
        self.record = _Record()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _Followable():
            args, kwargs = self.inputs.call(tensors, for_loss=False)
            outputs = self.module(*args, **kwargs)
            loss = _loss_in(outputs)
            if self.loss is not None:
                args, kwargs = self.inputs.call(tensors, for_loss=True)
                loss = self.loss(outputs, *args, **kwargs)
        leaves, spec = torch_pytree.tree_flatten(outputs)
        leaves = [_number_as_tensor(leaf) for leaf in leaves]
        flat = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        position = next((i for i, leaf in enumerate(flat) if leaf is loss), None)
        if loss is not None and position is None:
            position = len(flat)
            flat.append(loss)
        self.record.returned = OutputTree(
            spec=spec,
            leaves=tuple(_leaf_record(leaf) for leaf in leaves),
            dropped=tuple(
                type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_SCALARS))
            ),
            loss=position,
        )
        return tuple(flat)


def _number_as_tensor(leaf: Any) -> Any:
    """A number that depends on data (`x.sum().item()`) leaves as a tensor without dims."""
    dtypes = {torch.SymInt: torch.int64, torch.SymBool: torch.bool, torch.SymFloat: None}
    return torch.scalar_tensor(leaf, dtype=dtypes[type(leaf)]) if type(leaf) in dtypes else leaf


def _leaf_record(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return ...
    return leaf if isinstance(leaf, _SCALARS) else None


def _loss_in(outputs: Any) -> torch.Tensor | None:
    """The scalar output, `.loss`, or `["loss"]`."""
    if isinstance(outputs, torch.Tensor):
        loss = outputs
    else:
        loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    scalar = isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point()
    return loss if scalar else None


def export(wrapper: Exportable, tensors: Sequence[torch.Tensor]) -> torch.export.ExportedProgram:
    """Export at the shapes of `tensors`; every operator left has a lowering, or none can be had.

    Raises:
        BridgeError: what torch.export cannot follow, with the user's source line and the way out.
    """
    with torch.enable_grad(), _no_custom_autograd(), warnings.catch_warnings():
        # torch.export deprecates parts of itself while it runs; nothing a user could change.
        warnings.simplefilter("ignore", FutureWarning)
        # Recurrent layers list their own parameters a second time, which torch puts back itself.
        warnings.filterwarnings("ignore", message=r"The tensor attributes? .*_flat_weights\[")
        try:
            program = torch.export.export(wrapper, tuple(tensors), strict=False)
        except BridgeError:
            raise
        except Exception as error:
            raise _explained(error) from error
        _detach_no_grad_regions(program.graph_module)
        drop_checks(program.graph_module)
        return open_unlowered(program.run_decompositions({}))


class _Followable(TorchFunctionMode):
    """Reads `tensor.data` as `tensor.detach()`, and what else torch.export cannot follow as it can."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        return (rewritten(func) or func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def _no_custom_autograd() -> Iterator[None]:
    """Refuse `Function.apply` of user classes while exporting; open reentrant checkpoints."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            run_function, _preserve_rng_state, *rest = args
            return run_function(*rest)
        if cls.__module__.split(".")[0] == "torch":
            return original.__get__(None, cls)(*args, **kwargs)
        raise BridgeError(
            message(
                f"{cls.__module__}.{cls.__qualname__} is a custom autograd.Function.",
                "its backward is Python code that no exported graph holds",
                f"called at: {_user_line(traceback.extract_stack())}",
                hint="wrap its forward in a torch.library.custom_op and register a jax.custom_vjp for that "
                "operator with torch_bridge.register_lowering; or write it with ordinary operators",
            )
        )

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[assignment]


def _detach_no_grad_regions(graph_module: torch.fx.GraphModule) -> None:
    """Put `detach` on what `no_grad` regions compute; decomposition inlines them without a trace."""
    region = torch.ops.higher_order.wrap_with_set_grad_enabled
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target is region:
            enabled, body = node.args[:2]
            inner = graph_module.get_submodule(body.target)
            assert isinstance(inner, torch.fx.GraphModule), "a region's body is a graph"
            if not enabled:
                _detach_outputs(inner)
            _detach_no_grad_regions(inner)


def _detach_outputs(body: torch.fx.GraphModule) -> None:
    (output,) = [node for node in body.graph.nodes if node.op == "output"]

    def barrier(value: torch.fx.Node) -> torch.fx.Node:
        if value.op != "call_function" or not isinstance(value.meta.get("val"), torch.Tensor):
            return value
        with body.graph.inserting_before(output):
            detached = body.graph.call_function(_aten.detach.default, (value,))
        detached.meta = dict(value.meta)
        return detached

    output.args = torch.fx.map_arg(output.args, barrier)
    body.recompile()


_HINTS = (
    (
        "data-dependent",
        "make the branch tensor arithmetic (torch.where), or take the value as a Python argument",
    ),
    (".item()", "keep the value a tensor, or take it as a Python argument"),
    ("masked_select", "use torch.where with a fill value, which keeps the shape fixed"),
    ("nonzero", "use a boolean mask with torch.where, which keeps the shape fixed"),
)


def _explained(error: Exception) -> BridgeError:
    text = str(error)
    hints = [hint for word, hint in _HINTS if word.lower() in text.lower()]
    if type(error).__name__.startswith("GuardOnDataDependent"):
        hints.insert(0, _HINTS[0][1])
    what = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return BridgeError(
        message(
            "torch.export cannot follow this module.",
            f"{type(error).__name__}: {what[:300]}",
            f"at: {_user_line(traceback.extract_tb(error.__traceback__))}",
            hint=hints[0]
            if hints
            else "run torch.export.export(module, args, strict=False) and follow what it says",
        )
    )


def _user_line(frames: Any) -> str:
    """The innermost frame that is neither torch's nor ours."""
    for frame in reversed(list(frames)):
        if not frame.filename.startswith(OUTSIDE_USER_CODE) and "contextlib" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return "(unknown)"
