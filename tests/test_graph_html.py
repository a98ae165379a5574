"""The page of a whole graph, used in headless Chromium: a script does what a hand would and notes what the page then shows."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

import qwen3next_ggml
from qwen3next_ggml.geometry import model_of
from qwen3next_ggml.graph.options import LEAN, PLAIN
from qwen3next_ggml.graph_view import outline

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1600,1000", "--virtual-time-budget=5000")
HAND = """
<script>
const noted = {errors: window.noted_errors};
const about_text = () => document.getElementById("about").innerText;
const box_of = name => document.querySelector(`.b[data-node="${nodes.findIndex(n => n[0] === name)}"]`);
const scale_of = () => +/scale\\(([-\\d.e]+)\\)/.exec(world.getAttribute("transform"))[1];
function type(text) {
  const field = document.getElementById("search");
  field.value = text;
  field.dispatchEvent(new Event("input"));
}
noted.start = {about: about_text(), scale: scale_of(), boxes: document.querySelectorAll(".b").length, far: svg.classList.contains("far")};
noted.inside = [...document.querySelectorAll(".frame")].every(f => {
  const r = f.getBoundingClientRect(), s = svg.getBoundingClientRect();
  return r.left >= s.left - 1 && r.right <= s.right + 1 && r.top >= s.top - 1 && r.bottom <= s.bottom + 1;
});
const first = box_of("NAME").getBoundingClientRect(), frame_at = svg.getBoundingClientRect();
// events carry whole pixels
const point = {clientX: Math.round(first.left), clientY: Math.round(first.top)};
const under = () => [(point.clientX - frame_at.left - at.x) / at.scale, (point.clientY - frame_at.top - at.y) / at.scale];
const before = under();
svg.dispatchEvent(new WheelEvent("wheel", {deltaY: -1200, cancelable: true, ...point}));
noted.zoomed = {scale: scale_of(), still: Math.hypot(under()[0] - before[0], under()[1] - before[1])};
const near = box_of("NAME").getBoundingClientRect();
const moved_from = near.left;
svg.dispatchEvent(new PointerEvent("pointerdown", {clientX: 400, clientY: 400}));
window.dispatchEvent(new PointerEvent("pointermove", {clientX: 460, clientY: 400}));
window.dispatchEvent(new PointerEvent("pointerup", {}));
noted.dragged = box_of("NAME").getBoundingClientRect().left - moved_from;
svg.dispatchEvent(new PointerEvent("pointerdown", {clientX: 400, clientY: 400}));
window.dispatchEvent(new PointerEvent("pointerup", {}));
box_of("NAME").querySelector("rect").dispatchEvent(new MouseEvent("click", {bubbles: true}));
noted.clicked = {about: about_text(), chosen: document.querySelectorAll(".b.chosen").length, edges: document.querySelectorAll(".on").length};
const source = [...document.querySelectorAll("#about a")].find(a => a.textContent.startsWith("SOURCE"));
source.click();
const chosen = document.querySelector(".b.chosen").getBoundingClientRect(), frame = svg.getBoundingClientRect();
noted.followed = {about: about_text(), hash: location.hash,
  centred: Math.hypot((chosen.left + chosen.right - frame.left - frame.right) / 2, (chosen.top + chosen.bottom - frame.top - frame.bottom) / 2)};
type("MUL_MAT attn_output");
noted.searched = {about: about_text(), found: document.querySelectorAll(".b.found").length};
type("graph/norm.py");
noted.by_line = document.getElementById("hits").textContent;
type("attn_output.weight");
document.querySelector("#about a").click();
noted.leaf = about_text();
type("no such thing");
noted.nothing = document.getElementById("hits").textContent;
type("");
document.getElementById("whole").click();
noted.end = {about: about_text(), scale: scale_of()};
document.body.insertAdjacentHTML("beforeend", "<pre id=noted></pre>");
document.getElementById("noted").textContent = JSON.stringify(noted);
</script>
"""
WATCH = "<script>window.noted_errors = []; addEventListener('error', e => noted_errors.push(e.message));</script>"


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, "these tests need a Chromium: apt-get install --no-install-recommends chromium"
    return found


def run_browser(browser, folder, *args):
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def used(browser, folder, page, *, name, source):
    """Return what the page showed when it was used by HAND."""
    path = folder / "page.html"
    hand = HAND.replace("NAME", name).replace("SOURCE", source)
    path.write_text(page.replace("<head>", "<head>" + WATCH, 1).replace("</body>", hand + "</body>"), encoding="utf-8")
    dom = run_browser(browser, folder, "--dump-dom", path.as_uri())
    [noted] = re.findall(r'<pre id="noted">(.*?)</pre>', dom, re.DOTALL)
    return json.loads(unescape(noted))


@pytest.fixture(scope="module")
def noted(browser, toys, tmp_path_factory):
    with qwen3next_ggml.load(toys.t0, weights=False) as model:
        view = outline(model, LEAN, lines=True)
    return view, used(browser, tmp_path_factory.mktemp("html"), view.to_html(), name="attn_output-3", source="attn_gated-3")


def test_the_whole_graph_is_drawn_at_first(noted):
    view, shown = noted
    assert shown["errors"] == []
    assert shown["start"]["boxes"] == sum(n.kind == "kernel" for n in view.nodes)
    assert shown["inside"] and shown["start"]["about"].startswith("the whole graph")
    stats = view.stats()
    assert re.search(rf"all\s+{stats['nodes']}\s+{stats['kernels']}\s+{stats['barriers']}\s", shown["start"]["about"])
    assert shown["end"] == {"about": shown["start"]["about"], "scale": shown["start"]["scale"]}


def test_wheel_and_drag_move_the_drawing(noted):
    _, shown = noted
    # e^1.8 at most, and what is under the pointer stays there
    assert 4 < shown["zoomed"]["scale"] / shown["start"]["scale"] < 7 and shown["zoomed"]["still"] < 1
    assert shown["dragged"] == pytest.approx(60, abs=1)


def test_a_click_tells_about_a_node(noted):
    view, shown = noted
    [node] = [n for n in view.nodes if n.name == "attn_output-3"]
    about = shown["clicked"]["about"]
    assert about.startswith("attn_output-3\n") and shown["clicked"]["chosen"] == 1 and shown["clicked"]["edges"] == 2
    for words in ("MUL_MAT", "f32 [64]", "attn", f"{node.flops:,}", f"{node.bytes_read:,}", "blk.3.attn_output.weight", "attn_gated-3", "attn_residual-3"):
        assert words in about, words
    for line in node.lines:
        assert line in about
    assert "return _scaled(g, g.mul_mat(_form(g, w, x), x), w)" in about and 'return g.name(linear(g, wb.attn_output, out), "attn_output", il)' in about


def test_a_source_is_followed(noted):
    view, shown = noted
    [gated] = [n.id for n in view.nodes if n.name == "attn_gated-3"]
    assert shown["followed"]["about"].startswith("attn_gated-3\n") and shown["followed"]["hash"] == f"#{gated}"
    assert shown["followed"]["centred"] < 2


def test_search_finds_names_ops_lines_and_weights(noted):
    view, shown = noted
    assert shown["searched"]["about"].startswith("1 match\n") and "attn_output-3" in shown["searched"]["about"] and shown["searched"]["found"] == 1
    assert shown["by_line"] == f"{sum(any('graph/norm.py' in line for line in n.lines) for n in view.nodes)} matches"
    assert shown["leaf"].startswith("blk.3.attn_output.weight\n") and "none: weight" in shown["leaf"] and "attn_output-3" in shown["leaf"]
    assert shown["nothing"] == "0 matches"


@pytest.mark.parametrize("options, n_tokens", [(PLAIN, 1), (LEAN.but(delta_net="chunked"), 512)], ids=["decode", "chunked"])
def test_the_published_model_fits_into_one_page(browser, tmp_path, options, n_tokens):
    with model_of("qwen3-next-80b", type="q4_k") as model:
        view = outline(model, options, n_tokens=n_tokens, lines=True)
    page = view.to_html()
    assert len(page.encode()) < 5e6
    assert not re.search(r"(?:src|href|import|url)\s*[=(]\s*[\"']?(?:https?:)?//", page.replace("http://www.w3.org/2000/svg", ""))
    shown = used(browser, tmp_path, page, name="attn_output-47", source="attn_gated-47")
    assert shown["errors"] == [] and shown["inside"] and shown["start"]["far"]
    assert shown["start"]["boxes"] == sum(n.kind == "kernel" for n in view.nodes) > 2000
    assert shown["clicked"]["about"].startswith("attn_output-47\n") and "models/qwen3next.py:" in shown["clicked"]["about"]


def test_names_cannot_break_out_of_the_page(browser, toys, tmp_path):
    with qwen3next_ggml.load(toys.t0, weights=False) as model:
        view = outline(model, LEAN).of_layer(3)
    evil = "</script><script>noted_errors.push('ran')</script>"
    nodes = tuple(type(n)(**{f: getattr(n, f) for f in n.__slots__} | {"name": evil}) if n.name == "l_out-3" else n for n in view.nodes)
    page = type(view)(evil, nodes, view.leaves, 3).to_html()
    shown = used(browser, tmp_path, page, name="attn_output-3", source="attn_gated-3")
    assert shown["errors"] == []


def test_a_layer_renders_to_pixels(browser, toys, tmp_path):
    """The SVG is not only well formed: Chromium draws it, in the colours of its scopes."""
    with qwen3next_ggml.load(toys.t0, weights=False) as model:
        (tmp_path / "layer.svg").write_text(outline(model, LEAN).of_layer(0).to_svg())
    run_browser(browser, tmp_path, f"--screenshot={tmp_path / 'layer.png'}", (tmp_path / "layer.svg").as_uri())
    data = (tmp_path / "layer.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 50_000
