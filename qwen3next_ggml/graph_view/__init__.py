"""A built graph as plain data, and ways to write it down (level 7).

Knows names, shapes, costs and scopes of nodes; computes nothing and reads no weights.
"""

from .build import list_graph, outline
from .records import GraphView, Node

__all__ = ["GraphView", "Node", "list_graph", "outline"]
