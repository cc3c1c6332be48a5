"""Tensors whose sizes depend on values (`x[mask]`, nonzero), in room for the most rows there can be.

XLA fixes all shapes when it compiles. Such a tensor is therefore as long as the mask has elements: its
rows first, in torch's order, then rows that repeat the first. How many count is a value of its own, and
whatever looks along the rows looks at those alone: a mean divides by their number, a loss or a scatter
leaves the others out. The rules say how each operator keeps to that; an operator without a rule, and a
module that returns such a tensor, are refused.

This happens to the graph of torch.export before anything is decomposed, where sums, losses and layers
are still whole.

    rewriting   the pass over a graph, and what rules work with
    registry    which rule an operator has
    places      operators that leave rows apart: pointwise ones, views, layers of each row
    sources     masks and nonzero, where such tensors come from
    rows        operators that look along the rows: reductions, products, losses
    indices     reading and writing by index
    parts       cutting at sizes that are values, and joining again
    counts      bincount and repeat_interleave, whose lengths are values
    limits      what integers are below, as far as the graph tells
    constants   values that depend on nothing that is passed in: their sizes are known
"""

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torch_bridge.bounded import counts as counts
from torch_bridge.bounded import indices as indices
from torch_bridge.bounded import parts as parts
from torch_bridge.bounded import places as places
from torch_bridge.bounded import rows as rows
from torch_bridge.bounded import sources as sources
from torch_bridge.bounded.constants import Constants
from torch_bridge.bounded.inline import inline_regions
from torch_bridge.bounded.rewriting import SYMBOLIC, Bounded, shapes, sized_by_values


def bound_shapes(program: torch.export.ExportedProgram) -> None:
    """Rewrite the graph so that every shape in it is fixed.

    Raises:
        BridgeError: for the first operator that has no rule, with the user's source line.
    """
    module = program.graph_module
    for graph in (m.graph for m in module.modules() if isinstance(m, torch.fx.GraphModule)):
        for node in reversed(graph.nodes):  # comparisons of sizes that nobody asks for
            if isinstance(node.meta.get("val"), SYMBOLIC) and not node.users:
                graph.erase_node(node)
    if any(_is_concerned(node) for node in module.graph.nodes):
        inline_regions(module)
        Bounded(module.graph, Constants(_lifted(program))).run()
        module.recompile()


def _is_concerned(node: torch.fx.Node) -> bool:
    return bool(free_unbacked_symbols(shapes(node.meta.get("val")))) or sized_by_values(node)


def _lifted(program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    names = program.graph_signature.inputs_to_lifted_tensor_constants
    return {place: program.constants[name] for place, name in names.items()}  # type: ignore[misc]
