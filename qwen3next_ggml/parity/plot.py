"""Draw how far every node is off, in the order of the graph, as SVG (level 11)."""

from __future__ import annotations

from html import escape
from math import log10

from .compare import Comparison, Joined

# exponents of ten from the bottom to the top of the plot; what is equal lies below, what is no number above
LOW, HIGH, STEP = -16, 0, 4
LEFT, TOP, WIDTH, HEIGHT, BOTTOM = 48, 46, 880, 200, 42
FINE, OFF, BAND = "#3f6fb0", "#c8321e", "#eef1f5"


def plot(found: Comparison) -> str:
    """Return a drawing: a dot per node over its NMSE on a logarithmic scale, layers as bands, the first difference by name."""
    step = WIDTH / len(found.nodes)
    width, height = LEFT + WIDTH + 16, TOP + HEIGHT + BOTTOM
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#1c2733">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="16">{escape(found.title)}</text><text x="12" y="31">against {escape(found.reference)}</text>',
        *_bands(found, step), *_scale(found.tolerance),
        *(_dot(node, found.tolerance, LEFT + (i + 0.5) * step) for i, node in enumerate(found.nodes)),
        *_first(found, step), "</svg>", "",
    ])  # fmt: skip


def _bands(found: Comparison, step: float) -> list[str]:
    """Shade every other stretch of nodes of one layer; the number stands under it."""
    out, start = [], 0
    nodes = found.nodes
    for i in range(1, len(nodes) + 1):
        if i < len(nodes) and nodes[i].layer == nodes[start].layer:
            continue
        layer, x, wide = nodes[start].layer, LEFT + start * step, (i - start) * step
        if layer is not None:
            shade = BAND if layer % 2 else "#fff"
            out.append(f'<rect x="{x:.1f}" y="{TOP}" width="{wide:.1f}" height="{HEIGHT}" fill="{shade}"/>')
            out.append(f'<text x="{x + wide / 2:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{layer}</text>')
        start = i
    return [*out, f'<text x="{LEFT}" y="{TOP + HEIGHT + 32}">layer; nodes in the order they are computed in</text>']


def _scale(tolerance: float) -> list[str]:
    marks = [f'<text x="{LEFT - 6}" y="{_height(10.0**e) + 4:.1f}" text-anchor="end">1e{e}</text>' for e in range(LOW, HIGH + 1, STEP)]
    y = _height(tolerance)
    line = f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{OFF}" stroke-dasharray="4 3"/>'
    return [*marks, line, f'<text x="{LEFT + 4}" y="{y - 4:.1f}" fill="{OFF}">tolerance {tolerance:.0e}</text>']


def _dot(node: Joined, tolerance: float, x: float) -> str:
    colour = FINE if node.nmse <= tolerance else OFF
    tip = escape(f"{node.value.name} #{node.value.occurrence}: {node.why or f'{node.nmse:.2e}'}")
    return f'<circle cx="{x:.1f}" cy="{_height(node.nmse):.1f}" r="2" fill="{colour}"><title>{tip}</title></circle>'


def _first(found: Comparison, step: float) -> list[str]:
    if found.first is None:
        return []
    at = found.nodes.index(found.first)
    x, y = LEFT + (at + 0.5) * step, _height(found.first.nmse)
    # what comes before is less off, so there is room on the left
    end = "end" if x > LEFT + 150 else "start"
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="{OFF}"/>',
            f'<text x="{x + (9 if end == "start" else -9):.1f}" y="{y + 4:.1f}" text-anchor="{end}" font-weight="bold">'
            f"{escape(found.first.value.name)}</text>"]  # fmt: skip


def _height(nmse: float) -> float:
    """Return where on the page a value lies; 0 is at the bottom, infinity at the top."""
    exponent = HIGH if nmse > 10.0**HIGH else LOW if nmse < 10.0**LOW else log10(nmse)
    return TOP + HEIGHT * (HIGH - exponent) / (HIGH - LOW)
