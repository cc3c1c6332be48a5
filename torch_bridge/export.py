"""torch.export of a module at one batch size: a functional graph that keeps the high-level operators.

`run_decompositions({})` makes the graph functional without opening linear, attention, norms or losses.
Gradient barriers survive (`regions`); what a graph cannot hold is turned into something that it can, or
refused (`capture`).
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_bridge.attributes import recomputes_attributes, unchanged, watched_attributes
from torch_bridge.bounded import bound_shapes
from torch_bridge.capture import WatchedForward, capturing, refuse_gradient_hooks
from torch_bridge.decompose import drop_checks, open_unlowered
from torch_bridge.errors import BridgeError, message
from torch_bridge.explain import explained
from torch_bridge.inputs import Inputs
from torch_bridge.layer_drop import LayerDropOff
from torch_bridge.precision import FullPrecision, Precision
from torch_bridge.regions import make_regions_explicit
from torch_bridge.structures import CONSTANTS, Structure, share_with_jax, take_apart

_FULL = FullPrecision()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTree:
    """What the module returned, taken apart by torch's own pytrees.

    Args:
        structure: how its leaves are put together.
        leaves: a fixed value, or `...` where a tensor stands.
        loss: position of the scalar loss among the tensors that were returned, if there is one.
    """

    structure: Structure
    leaves: tuple[Any, ...]
    loss: int | None


class _Record:
    """Holds what forward returned: torch.export puts a module's own attributes back after tracing."""

    returned: OutputTree | None = None


class Exportable(torch.nn.Module):
    """The module as a function of flat tensors that returns flat tensors, with its loss if one is given."""

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Inputs,
        loss: Callable[..., Any] | None,
        precision: Precision,
    ) -> None:
        super().__init__()
        self.precision = precision
        self.module = module
        self.loss = loss  # registers a loss that is a module, so that its buffers are found
        self.inputs = inputs
        self.record = _Record()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        try:
            outputs, loss = self._run(tensors)
        except BridgeError:
            raise
        except Exception as error:
            raise explained(error) from error
        leaves, structure = take_apart(outputs)
        leaves = [_number_as_tensor(leaf) for leaf in leaves]
        _refuse_unknown(leaves)
        share_with_jax(outputs, any_class=True)
        flat = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        position = next((i for i, leaf in enumerate(flat) if leaf is loss), None)
        if loss is not None and position is None:
            position = len(flat)
            flat.append(loss)
        self.record.returned = OutputTree(
            structure=structure,
            leaves=tuple(_leaf_record(leaf) for leaf in leaves),
            loss=position,
        )
        return tuple(flat)

    def _run(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor | None]:
        with unchanged(self), WatchedForward(), LayerDropOff(), watched_attributes(self):
            args, kwargs = self.inputs.call(tensors, for_loss=False)
            outputs = self.module(*args, **kwargs)
            if self.loss is None:
                return outputs, _loss_in(outputs)
            args, kwargs = self.inputs.call(tensors, for_loss=True)
            return outputs, self.loss(outputs, *args, **kwargs)


def _number_as_tensor(leaf: Any) -> Any:
    """A number that depends on data (`x.sum().item()`) leaves as a tensor without dims."""
    dtypes = {torch.SymInt: torch.int64, torch.SymBool: torch.bool, torch.SymFloat: None}
    return torch.scalar_tensor(leaf, dtype=dtypes[type(leaf)]) if type(leaf) in dtypes else leaf


def _leaf_record(leaf: Any) -> Any:
    return ... if isinstance(leaf, torch.Tensor) else leaf


def _refuse_unknown(leaves: Sequence[Any]) -> None:
    """See that what forward returns can be returned from a program.

    Raises:
        BridgeError: for the first object that can be neither taken apart nor kept as it is.
    """
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *CONSTANTS)):
            raise BridgeError(
                message(
                    f"forward returns a {type(leaf).__qualname__}, which is no result of a pure function.",
                    hint="return tensors, or a class of them (dict, dataclass, NamedTuple, attributes)",
                )
            )


def _loss_in(outputs: Any) -> torch.Tensor | None:
    """The scalar output, `.loss`, or `["loss"]`."""
    if isinstance(outputs, torch.Tensor):
        loss = outputs
    else:
        loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    scalar = isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point()
    return loss if scalar else None


def export(
    module: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    dynamic_shapes: Any = None,
    precision: Precision = _FULL,
) -> torch.export.ExportedProgram:
    """Export at the shapes of `tensors`; every operator left has a lowering, or none can be had.

    Args:
        module: of flat tensors, that returns flat tensors.
        tensors: the tensors of the call.
        dynamic_shapes: which of their dims get symbolic sizes, as torch.export takes it.
        precision: the dtypes it computes in.

    Raises:
        BridgeError: what torch.export cannot follow, with the user's source line and the way out.
    """
    refuse_gradient_hooks(module)
    with exporting():
        if recomputes_attributes(module):
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .*assigned during export")
        try:
            with precision.region():
                program = torch.export.export(
                    module, tuple(tensors), strict=False, dynamic_shapes=dynamic_shapes
                )
                make_regions_explicit(program.graph_module)
                drop_checks(program.graph_module)
                bound_shapes(program)
                # Checks of the example's memory layout, which torch cannot run where an input is a view.
                conditions, program._guards_code = getattr(program, "_guards_code", []), []
                program = program.run_decompositions({})
            opened = open_unlowered(program)
        except BridgeError:
            raise
        except Exception as error:
            raise explained(error) from error
        opened._guards_code = conditions
        return opened


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """What holds while a module is followed: gradients on, forward watched, torch's news muted."""
    with capturing(), torch.enable_grad(), _unvalidated(), _levels_closed(), warnings.catch_warnings():
        # torch.export deprecates parts of itself while it runs; nothing a user could change.
        warnings.simplefilter("ignore", FutureWarning)
        # Recurrent layers list their own parameters a second time, which torch puts back itself.
        warnings.filterwarnings("ignore", message=r"The tensor attributes? .*_flat_weights\[")
        yield


@contextlib.contextmanager
def _unvalidated() -> Iterator[None]:
    """Distributions check the values of their arguments by default, which no graph can hold."""
    distribution = torch.distributions.Distribution
    found = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(found)


@contextlib.contextmanager
def _levels_closed() -> Iterator[None]:
    """torch.vmap opens and closes its levels by operators of the graph: a failed export leaves some open."""
    functorch = torch._C._functorch
    depth = len(functorch.get_interpreter_stack() or ())
    try:
        yield
    finally:
        while len(functorch.get_interpreter_stack() or ()) > depth:
            functorch.pop_dynamic_layer_stack()
