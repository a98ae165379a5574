"""Tensors of a model: declare → check → place → upload (level 4)."""

from .table import Block, Checked, Choice, Decl, TensorTable, stacked
from .validate import warnings
from .weights import Weights, load_weights

__all__ = ["Block", "Checked", "Choice", "Decl", "TensorTable", "Weights", "load_weights", "stacked", "warnings"]
