"""How much a piece of a program costs: seconds and bytes, without a device.

`open_graph` measures a graph's two traces once; `node_seconds` weighs its nodes; `price` makes the
table of blocks that the search reads. Presets name devices and links. `calibrate` and `measured` touch
the devices that are here; they are imported when they are asked for.
"""

from rannc_jax.cost.presets import PRESET_KINDS, PRESET_LINKS, device_preset, kind_of, link_preset
from rannc_jax.cost.pricing import GraphTable, OpenedGraph, node_seconds, open_graph, price
from rannc_jax.cost.table import CostTable

__all__ = [
    "PRESET_KINDS",
    "PRESET_LINKS",
    "CostTable",
    "GraphTable",
    "OpenedGraph",
    "device_preset",
    "kind_of",
    "link_preset",
    "node_seconds",
    "open_graph",
    "price",
]
