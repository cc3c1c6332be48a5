"""Names and roles: which value of the exported graph is which parameter, buffer, constant or argument.

The kinds are read from torch's graph_signature, never from positions. Tied names (several names of one
tensor) are one value under its first name; `aliases` maps the others to it.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from torch_bridge.errors import BridgeError, message
from torch_bridge.offsets import OFFSET
from torch_bridge.program import Graph, Node, Ref

PREFIX = "module."
# Checks of values and of symbolic sizes: they compute nothing.
IGNORED = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._linalg_check_errors.default,
    torch.ops.aten._assert_async.default,
    torch.ops.aten._functional_assert_scalar.default,
    torch.ops.aten._functional_assert_async.msg,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}
# Where frames are not the user's: torch, this package, code that torch generates.
OUTSIDE_USER_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The tensors of a module under torch's names, tied ones once.

    Args:
        params: owner name -> tensor that wants a gradient.
        frozen: owner name -> parameter with requires_grad=False.
        buffers: owner name -> buffer.
        aliases: every other name of a tied tensor -> its owner.
        saved: names in state_dict order (buffers registered as not persistent are not among them).
    """

    params: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]
    saved: tuple[str, ...]

    def owner(self, name: str) -> str:
        return self.aliases.get(name, name)


def names_of(module: torch.nn.Module) -> Names:
    """Read a module's parameters, buffers and ties."""
    owners: dict[int, str] = {}
    aliases: dict[str, str] = {}
    kept: dict[str, dict[str, torch.Tensor]] = {"params": {}, "frozen": {}, "buffers": {}}

    def add(named: Iterable[tuple[str, torch.Tensor]], is_buffer: bool) -> None:
        for name, tensor in named:
            if id(tensor) in owners:
                aliases[name] = owners[id(tensor)]
                continue
            owners[id(tensor)] = name
            role = "buffers" if is_buffer else "params" if tensor.requires_grad else "frozen"
            kept[role][name] = tensor

    add(module.named_parameters(remove_duplicate=False), False)
    add(module.named_buffers(remove_duplicate=False), True)
    return Names(**kept, aliases=aliases, saved=tuple(module.state_dict(keep_vars=True)))


class Source(enum.Enum):
    """Where an input of the graph comes from."""

    TENSOR = "tensor"  # parameter or buffer, by owner name
    LITERAL = "literal"  # a tensor made in forward or held as a plain attribute
    ARGUMENT = "argument"  # by slot
    TOKEN = "token"  # order of side effects: no value


class Destination(enum.Enum):
    """Where an output of the graph goes."""

    BUFFER = "buffer"  # or a frozen parameter
    PARAMETER = "parameter"  # a trainable one
    ARGUMENT = "argument"  # new value of an argument that forward writes: not returned
    RESULT = "result"
    TOKEN = "token"  # order of side effects: no value


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """`inputs` are (source, name or slot), one an input; `outputs` (destination, name or None)."""

    inputs: tuple[tuple[Source, Any], ...]
    outputs: tuple[tuple[Destination, str | None], ...]
    literals: dict[str, torch.Tensor]

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the state that the module writes: buffers, frozen parameters, offsets of parameters."""
        suffixes = {Destination.BUFFER: "", Destination.PARAMETER: OFFSET}
        return tuple(f"{name}{suffixes[where]}" for where, name in self.outputs if where in suffixes)


def read_signature(program: torch.export.ExportedProgram, names: Names) -> Signature:
    """The roles of an exported program's inputs and outputs."""
    inputs: list[tuple[Source, Any]] = []
    literals: dict[str, torch.Tensor] = {}
    slot = 0
    for spec in program.graph_signature.input_specs:
        target = spec.target or ""
        if spec.kind is InputKind.USER_INPUT:
            inputs.append((Source.ARGUMENT, slot))
            slot += 1
        elif spec.kind is InputKind.TOKEN:
            inputs.append((Source.TOKEN, None))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and target.startswith(PREFIX):
            inputs.append((Source.TENSOR, names.owner(target.removeprefix(PREFIX))))
        elif spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.PARAMETER, InputKind.BUFFER):
            inputs.append((Source.LITERAL, target))
            value = program.state_dict.get(target)
            literals[target] = program.constants[target] if value is None else value  # type: ignore[assignment]
        else:
            raise BridgeError(
                message(f"the exported program takes a {spec.kind.name.lower()}.", str(spec.target))
            )
    return Signature(
        inputs=tuple(inputs),
        outputs=tuple(_destination(spec, names) for spec in program.graph_signature.output_specs),
        literals=literals,
    )


def _destination(spec: Any, names: Names) -> tuple[Destination, str | None]:
    if spec.kind is OutputKind.USER_OUTPUT:
        return Destination.RESULT, None
    if spec.kind is OutputKind.TOKEN:
        return Destination.TOKEN, None
    if spec.kind is OutputKind.USER_INPUT_MUTATION:
        return Destination.ARGUMENT, None
    name = names.owner(spec.target.removeprefix(PREFIX))
    if spec.kind is OutputKind.PARAMETER_MUTATION and name in names.params:
        return Destination.PARAMETER, name
    assert spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION), "exports train nothing"
    return Destination.BUFFER, name


def read_graph(fx_graph: torch.fx.Graph, owner: torch.nn.Module) -> Graph:
    """An fx graph as plain data."""
    values: dict[torch.fx.Node, Any] = {}
    nodes: list[Node] = []
    num_inputs = 0
    outputs: tuple[Any, ...] = ()

    def plain(tree: Any) -> Any:
        if isinstance(tree, torch.fx.Node):
            return values[tree]
        if isinstance(tree, tuple | list):
            return tuple(plain(item) for item in tree)
        if isinstance(tree, dict):
            return {key: plain(item) for key, item in tree.items()}
        return tree

    for node in fx_graph.nodes:
        if node.op == "placeholder":
            values[node] = Ref(num_inputs)
            num_inputs += 1
        elif node.op == "get_attr":
            body = owner.get_submodule(node.target)
            assert isinstance(body, torch.fx.GraphModule), "export lifts every attribute that is no graph"
            values[node] = read_graph(body.graph, body)
        elif node.op == "output":
            result = plain(node.args[0])
            outputs = result if isinstance(result, tuple) else (result,)
        elif node.target not in IGNORED:
            values[node] = Ref(num_inputs + len(nodes))
            nodes.append(_read_node(node, plain(node.args), plain(node.kwargs)))
    return Graph(num_inputs=num_inputs, nodes=tuple(nodes), outputs=outputs)


def _read_node(node: torch.fx.Node, args: Any, kwargs: Any) -> Node:
    value = node.meta.get("val")
    many = isinstance(value, tuple | list)
    if node.target is torch.ops.higher_order.flex_attention:
        # Blocks only say where a mask is false: without them, nothing computes them.
        args = (*args[:4], (*(None for _ in args[4][:-1]), args[4][-1]), *args[5:])
    return Node(
        operator=node.target,
        args=args,
        kwargs=kwargs,
        path=module_path(node),
        source=source_line(node.meta.get("stack_trace")),
        dtypes=tuple(getattr(item, "dtype", None) for item in (value if many else [value])),
        shape=_fixed_shape(value),
    )


def _fixed_shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor whose sizes are all known when it is exported."""
    if not isinstance(value, torch.Tensor) or any(isinstance(size, torch.SymInt) for size in value.shape):
        return None
    return tuple(value.shape)


def module_path(node: torch.fx.Node) -> str:
    """Where in the module tree, slash-separated; "" for the root."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    name = list(stack.values())[-1][0]
    return (name + ".").removeprefix(PREFIX).split("@")[0].rstrip(".").replace(".", "/")


def source_line(trace: str | None) -> str:
    """`file:line: code` of the innermost frame outside torch."""
    lines = (trace or "").splitlines()
    found = ""
    for index, line in enumerate(lines):
        text = line.strip()
        if not text.startswith('File "'):
            continue
        file, number = text.split('"')[1], text.split(" line ")[1].split(",")[0]
        if not file.startswith(OUTSIDE_USER_CODE):
            code = lines[index + 1].strip() if index + 1 < len(lines) else ""
            found = f"{file}:{number}: {code}"
    return found
