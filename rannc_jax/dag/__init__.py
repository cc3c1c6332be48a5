"""Any cost-annotated DAG, cut into device sets: the graph door.

No JAX program is needed here: nodes carry seconds and bytes, edges the seconds of sending a value. What
is solved, and when an answer is proved, is in docs/explain/graph-door.md.
"""

from rannc_jax.dag.data import CostGraph as CostGraph
from rannc_jax.dag.data import GraphEdge as GraphEdge
from rannc_jax.dag.data import GraphNode as GraphNode
from rannc_jax.dag.data import GraphPlan as GraphPlan
from rannc_jax.dag.data import Objective as Objective
from rannc_jax.dag.read import load_graph as load_graph
from rannc_jax.dag.solve import solve_graph as solve_graph
