"""A drawing of a graph, complete in itself (level 7)."""

from __future__ import annotations

from xml.sax.saxutils import escape

from .boxes import LINE, PAD, Box, drawn, path
from .palette import FILL
from .records import GraphView

MARGIN, HEADER = 20.0, 46.0
STYLE = """
text{font:10px ui-monospace,"DejaVu Sans Mono",monospace;fill:#1c2430}.t{font-weight:bold}.h{font:bold 15px sans-serif}.k{font:11px sans-serif}
rect{stroke:#5b6675;stroke-width:.8}.e{fill:none;stroke:#5b6675;stroke-width:1}
""".strip()


def drawing(view: GraphView) -> str:
    """Return an SVG document: kernels in the colour of their scope, weights and states named inside, hover for figures."""
    found = drawn(view)
    width = max(found.placed.width, 900.0) + 2 * MARGIN
    height = found.placed.height + HEADER + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">',
        f"<title>{escape(view.title)}</title><style>{STYLE}</style>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#5b6675"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" style="fill:#fff;stroke:none"/>',
        f'<text class="h" x="{MARGIN:g}" y="{MARGIN + 8:g}">{escape(view.title)}</text>',
        *_key(view),
        f'<g transform="translate({MARGIN + (width - 2 * MARGIN - found.placed.width) / 2:g} {MARGIN + HEADER:g})">',
    ]
    out += [f'<path class="e" marker-end="url(#a)" d="{path(points)}"/>' for _, _, points in found.placed.edges]
    out += [_box(box, *corner) for box, corner in zip(found.boxes, found.placed.corners)]
    return "\n".join([*out, "</g></svg>"]) + "\n"


def _key(view: GraphView) -> list[str]:
    out, x = [], MARGIN
    for scope in (scope for scope in FILL if any(node.scope == scope for node in view.nodes)):
        out.append(f'<rect x="{x:g}" y="{MARGIN + 19:g}" width="12" height="12" fill="{FILL[scope]}"/>')
        out.append(f'<text class="k" x="{x + 17:g}" y="{MARGIN + 29:g}">{scope}</text>')
        x += 32 + 7 * len(scope)
    legend = "× weight   ↺ state   ◦ input   ← another layer; views are left out"
    return [*out, f'<text class="k" x="{x + 14:g}" y="{MARGIN + 29:g}">{legend}</text>']


def _box(box: Box, x: float, y: float) -> str:
    node, (width, height) = box.node, box.size
    figures = f"#{node.id} {node.op}, {node.scope}, {node.device}; reads {node.bytes_read:,} B, writes {node.bytes_written:,} B, {node.flops:,} FLOPs"
    made = "\n" + "\n".join(node.lines) if node.lines else ""
    lines = [
        f'<text x="{x + PAD:g}" y="{y + PAD + LINE * (i + 0.5):g}"{" class=" + chr(34) + "t" + chr(34) if i == 0 else ""}>{escape(line)}</text>'
        for i, line in enumerate(box.text)
    ]
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{FILL[node.scope]}"/>'
    return f'<g id="n{node.id}"><title>{escape(figures + made)}</title>{rect}{"".join(lines)}</g>'
