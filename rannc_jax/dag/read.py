"""The public JSON format of placement graphs: nodes with accelerator times, edges with costs.

    {"maxSizePerFPGA": bytes, "nodes": [{"id", "fpgaLatency", "size", "isBackwardNode", "colorClass"}, ...],
     "edges": [{"sourceId", "destId", "cost"}, ...]}

"FPGA" only means accelerator there. Everything but id, fpgaLatency, sourceId and destId may be left out;
other keys are not read.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rannc_jax.dag.data import CostGraph, GraphEdge, GraphNode
from rannc_jax.errors import CostError, message
from rannc_jax.mistakes import Mistakes, shown


def load_graph(source: str | Path | Mapping[str, Any]) -> CostGraph:
    """Read a graph.

    Args:
        source: path of a JSON file, or what one would hold.

    Raises:
        CostError: there is no such file, it is no JSON, or it has mistakes (all of them are listed).
    """
    name = "the graph" if isinstance(source, Mapping) else str(source)
    top = source if isinstance(source, Mapping) else _parsed(Path(source))
    mistakes = Mistakes(source=name)
    nodes = tuple(
        GraphNode(
            id=_value(mistakes, node, path, "id", (int, str), None),
            seconds=_value(mistakes, node, path, "fpgaLatency", (int, float), None),
            bytes=_value(mistakes, node, path, "size", (int, float), 0.0),
            colocation=_value(mistakes, node, path, "colorClass", (int, str), ...),
            is_backward=bool(_value(mistakes, node, path, "isBackwardNode", (int, bool), False)),
        )
        for path, node in _tables(mistakes, top, "nodes")
    )
    edges = tuple(
        GraphEdge(
            source=_value(mistakes, edge, path, "sourceId", (int, str), None),
            target=_value(mistakes, edge, path, "destId", (int, str), None),
            seconds=_value(mistakes, edge, path, "cost", (int, float), 0.0),
        )
        for path, edge in _tables(mistakes, top, "edges")
    )
    limit = _value(mistakes, top, "", "maxSizePerFPGA", (int, float), ...)
    mistakes.raise_if_any(CostError)
    return CostGraph(nodes=nodes, edges=edges, memory_bytes=limit)


def _parsed(path: Path) -> Any:
    try:
        top = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CostError(message(f"there is no graph file {str(path)!r}.")) from None
    except (OSError, ValueError) as error:
        raise CostError(message(f"{path} is not a JSON file.", str(error))) from error
    if not isinstance(top, Mapping):
        raise CostError(message(f"{path} holds {shown(top)}.", 'expected: {"nodes": [...], "edges": [...]}'))
    return top


def _tables(mistakes: Mistakes, top: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    entries = top.get(key)
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        mistakes.add(key, f"got {shown(entries)}, expected a list of tables")
        return []
    found = []
    for number, entry in enumerate(entries):
        if isinstance(entry, Mapping):
            found.append((f"{key}[{number}]", entry))
        else:
            mistakes.add(f"{key}[{number}]", f"got {shown(entry)}, expected a table")
    return found


def _value(
    mistakes: Mistakes, table: Mapping[str, Any], path: str, key: str, kinds: tuple[type, ...], default: Any
) -> Any:
    """An entry; `default` where it is left out: None if it must be there, `...` if none is a value too."""
    value = table.get(key)
    where = f"{path}.{key}" if path else key
    if value is None:
        if default is None:
            mistakes.add(where, "missing")
            return 0
        return None if default is ... else default
    if not isinstance(value, kinds):
        mistakes.add(where, f"got {shown(value)}, expected {' or '.join(kind.__name__ for kind in kinds)}")
        return 0
    return value
