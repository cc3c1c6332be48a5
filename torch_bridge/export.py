"""torch.export of a module at one batch size: a functional graph that keeps the high-level operators.

`run_decompositions({})` makes the graph functional without opening linear, attention, norms or losses.
Gradient barriers survive (`regions`); what a graph cannot hold is turned into something that it can, or
refused (`capture`).
"""

import enum
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_bridge.attributes import recomputes_attributes, watched_attributes
from torch_bridge.capture import WatchedForward, capturing, refuse_gradient_hooks
from torch_bridge.decompose import open_unlowered
from torch_bridge.errors import BridgeError
from torch_bridge.explain import explained, refuse_values
from torch_bridge.inputs import Inputs
from torch_bridge.regions import make_regions_explicit
from torch_bridge.structures import Structure, share_with_jax, take_apart

_CONSTANTS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, enum.Enum)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTree:
    """What the module returned, taken apart by torch's own pytrees.

    Args:
        structure: how its leaves are put together.
        leaves: a fixed value, or `...` where a tensor stands.
        dropped: paths and classes of leaves that neither torch nor JAX can take apart (left out: None).
        loss: position of the scalar loss among the tensors that were returned, if there is one.
    """

    structure: Structure
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
        try:
            outputs, loss = self._run(tensors)
        except BridgeError:
            raise
        except Exception as error:
            raise explained(error) from error
        share_with_jax(outputs)
        leaves, structure = take_apart(outputs)
        flat = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        position = next((i for i, leaf in enumerate(flat) if leaf is loss), None)
        if loss is not None and position is None:
            position = len(flat)
            flat.append(loss)
        self.record.returned = OutputTree(
            structure=structure,
            leaves=tuple(_leaf_record(leaf) for leaf in leaves),
            dropped=tuple(
                type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_CONSTANTS))
            ),
            loss=position,
        )
        return tuple(flat)

    def _run(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor | None]:
        with WatchedForward(), watched_attributes(self):
            args, kwargs = self.inputs.call(tensors, for_loss=False)
            outputs = self.module(*args, **kwargs)
            if self.loss is None:
                return outputs, _loss_in(outputs)
            args, kwargs = self.inputs.call(tensors, for_loss=True)
            return outputs, self.loss(outputs, *args, **kwargs)


def _leaf_record(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return ...
    return leaf if isinstance(leaf, _CONSTANTS) else None


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
    refuse_gradient_hooks(wrapper)
    with capturing(), torch.enable_grad(), warnings.catch_warnings():
        # torch.export deprecates parts of itself while it runs; nothing a user could change.
        warnings.simplefilter("ignore", FutureWarning)
        # Recurrent layers list their own parameters a second time, which torch puts back itself.
        warnings.filterwarnings("ignore", message=r"The tensor attributes? .*_flat_weights\[")
        if recomputes_attributes(wrapper):
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .*assigned during export")
        try:
            program = torch.export.export(wrapper, tuple(tensors), strict=False)
            refuse_values(program.graph_module)
            make_regions_explicit(program.graph_module)
            return open_unlowered(program.run_decompositions({}))
        except BridgeError:
            raise
        except Exception as error:
            raise explained(error) from error
