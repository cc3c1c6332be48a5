"""A program from a tape: each repeated block exported once and stamped wherever it is called.

The run outside the blocks is exported as one piece, in which a block is one call of an operator that
nobody opens; every distinct block is a piece of its own (`pieces`). Then they are put together (`assembly`).
torch.export sees functions that repeat calls from the tape, so gradient barriers, in-place writes, views and
decompositions are treated as in a module that is exported whole.
"""

import itertools
from collections.abc import Hashable, Sequence

import torch

from torch_bridge.assembly import Assembly, Parts
from torch_bridge.errors import BridgeError
from torch_bridge.export import Exportable, exporting
from torch_bridge.fake import Pairs, lent
from torch_bridge.initialise import concrete
from torch_bridge.pieces import ExportedPiece, OpaqueBlocks, Piece, Stamp, export_piece, inputs_of
from torch_bridge.repeated import Block, find_blocks
from torch_bridge.signature import PREFIX, Names
from torch_bridge.tape import Call, NotTaped, Tape, Value, WritesNoted, record


def from_repeats(
    wrapper: Exportable,
    names: Names,
    tensors: Sequence[torch.Tensor],
) -> tuple[int, Parts] | None:
    """Export a module by its repeated blocks: (number of copies, program).

    None where nothing repeats that is worth it, or where the run cannot be taped; whatever the user's
    code raises is left to the export of the whole module, which explains it.

    Args:
        wrapper: the module.
        names: its own tensors.
        tensors: example arguments.
    """
    if any(isinstance(inner, torch.jit.ScriptModule) for inner in wrapper.modules()):
        return None  # their tensors cannot be lent
    mode = WritesNoted()
    with lent(wrapper, mode, concrete) as pairs, wrapper.precision.region():
        tape = _taped(wrapper, names, tensors, pairs, mode)
        blocks = () if tape is None else find_blocks(tape)
        if tape is None or not blocks:
            return None
        try:
            parts = stamped(tape, blocks)
        except (NotTaped, BridgeError):
            return None
    return len(blocks) - len({block.key for block in blocks}), parts


def _taped(
    wrapper: Exportable, names: Names, tensors: Sequence[torch.Tensor], pairs: Pairs, mode: WritesNoted
) -> Tape | None:
    own = {id(tensor): name for name, tensor in {**names.params, **names.frozen, **names.buffers}.items()}
    # What only the loss holds is no parameter of the module: it has no name.
    homes = [(twin, tensor, own.get(id(tensor))) for tensor, twin in pairs]
    paths = {
        id(inner): (name + ".").removeprefix(PREFIX).rstrip(".").replace(".", "/")
        for name, inner in wrapper.named_modules()
    }
    try:
        with exporting():
            twins = [mode.twin(t.detach()).requires_grad_(t.requires_grad) for t in tensors]
            return record(wrapper, paths, twins, homes, mode)
    except Exception:
        return None


def stamped(tape: Tape, blocks: Sequence[Block]) -> Parts:
    """The whole run as one functional graph, with its signature and the shapes of its inputs.

    Args:
        tape: the run.
        blocks: repeated blocks, in order.

    Raises:
        NotTaped: a piece writes what it may not, or torch.export sees another program in it.
    """
    skeleton, stamps = _skeleton(tape, blocks)
    with OpaqueBlocks(tape, stamps) as opaque:
        whole = export_piece(tape, skeleton, opaque)
        bodies: dict[Hashable, tuple[int, ExportedPiece]] = {}
        for block in blocks:
            if block.key not in bodies:
                bodies[block.key] = block.start, export_piece(tape, _piece(tape, block), opaque)
    if any(body.writes for _, body in bodies.values()):
        raise NotTaped("a block writes one of its inputs")
    return Assembly(tape, whole, stamps, bodies).finish()


def _piece(tape: Tape, block: Block) -> Piece:
    steps = tuple(enumerate(tape.calls[block.start : block.end], block.start))
    return Piece(inputs=block.inputs, steps=steps, outputs=block.outputs)


def _skeleton(tape: Tape, blocks: Sequence[Block]) -> tuple[Piece, tuple[Stamp, ...]]:
    """The tape with a stamp in the place of every block."""
    written = frozenset().union(*(call.written for call in tape.calls))
    steps: list[tuple[int, Call | Stamp]] = []
    stamps: list[Stamp] = []
    position = 0
    for block in blocks:
        steps += enumerate(tape.calls[position : block.start], position)
        taken = tuple(n for n in block.inputs if not _at_home(tape.values[n], written))
        stamps.append(Stamp(number=len(stamps), block=block, inputs=taken))
        steps.append((block.start, stamps[-1]))
        position = block.end
    steps += enumerate(tape.calls[position:], position)
    used = dict.fromkeys(itertools.chain.from_iterable(inputs_of(step) for _, step in steps))
    used.update(dict.fromkeys(ref.index for ref in tape.results))
    inputs = tuple(number for number in used if tape.values[number].home is not None)
    outputs = tuple(ref.index for ref in tape.results)
    return Piece(inputs=inputs, steps=tuple(steps), outputs=outputs), tuple(stamps)


def _at_home(value: Value, written: frozenset[int]) -> bool:
    """Whether it has the same value wherever it is read: the graph's own input, never written."""
    return value.home is not None and value.storage not in written
