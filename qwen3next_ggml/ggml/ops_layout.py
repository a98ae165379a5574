"""Ops that move or view data and compute nothing: copies, shapes, joins (level 1)."""

from __future__ import annotations

from .op import op, unary
from .tensor import Tensor
from .types import GgmlType


class Layout:
    """Part of `Ops`."""

    __slots__ = ()

    dup = unary("dup", "Copy a.")
    cont = unary("cont", "Copy a into adjacent memory.")
    transpose = unary("transpose", "View with dimensions 0 and 1 swapped.")

    @op
    def cpy(self, a: Tensor, b: Tensor) -> Tensor:
        """Copy a into b, converting to the type of b -> view of b."""

    @op
    def cast(self, a: Tensor, type: GgmlType) -> Tensor:
        """Convert a to another type."""

    @op
    def cont_1d(self, a: Tensor, ne0: int) -> Tensor:
        """Copy a into adjacent memory of another shape."""

    @op
    def cont_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """Copy a into adjacent memory of another shape."""

    @op
    def cont_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
        """Copy a into adjacent memory of another shape."""

    @op
    def cont_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Copy a into adjacent memory of another shape."""

    @op
    def reshape(self, a: Tensor, b: Tensor) -> Tensor:
        """View contiguous a in the shape of b."""

    @op
    def reshape_1d(self, a: Tensor, ne0: int) -> Tensor:
        """View contiguous a in another shape."""

    @op
    def reshape_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """View contiguous a in another shape."""

    @op
    def reshape_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
        """View contiguous a in another shape."""

    @op
    def reshape_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """View contiguous a in another shape."""

    @op
    def view_1d(self, a: Tensor, ne0: int, offset: int) -> Tensor:
        """View ne0 elements from a byte offset."""

    @op
    def view_2d(self, a: Tensor, ne0: int, ne1: int, nb1: int, offset: int) -> Tensor:
        """View rows nb1 bytes apart from a byte offset."""

    @op
    def view_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int) -> Tensor:
        """View with byte strides nb1, nb2 from a byte offset."""

    @op
    def view_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """View with byte strides nb1, nb2, nb3 from a byte offset."""

    @op
    def permute(self, a: Tensor, axis0: int, axis1: int, axis2: int, axis3: int) -> Tensor:
        """View with dimension i of a moved to axis_i."""

    @op
    def repeat(self, a: Tensor, b: Tensor) -> Tensor:
        """Repeat a to the shape of b."""

    @op
    def repeat_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Repeat a to a shape whose dimensions are multiples of its own."""

    @op
    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        """Join a and b along one dimension."""

    @op
    def pad(self, a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
        """Append zeros to each dimension."""

    @op
    def pad_ext(self, a: Tensor, lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int) -> Tensor:
        """Put zeros before and after each dimension."""

    @op
    def roll(self, a: Tensor, shift0: int, shift1: int, shift2: int, shift3: int) -> Tensor:
        """Shift elements along each dimension, around the end."""

    @op
    def set(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """Copy a and write b over the part that a view with these strides and byte offset would show."""

    @op
    def set_inplace(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """Like set, writing into a -> view of a."""

    @op
    def acc(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """Like set, adding b instead of writing it."""
