"""How reports look: figures as SVG text, the style of a page. Imports matplotlib when called."""

from __future__ import annotations

import io
import re
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["INK", "LINES", "figure", "legend_above", "page_head", "page_svg"]

LINES = ("#1c6fb8", "#2f9e44", "#9c36b5", "#e8890c", "#0c8599", "#c2255c")
_GRID, INK = "#e5e8eb", "#343a40"

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's own font
    "svg.hashsalt": "agentcache",  # equal input, equal ids
    "svg.id": None,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.family": ["DejaVu Sans"],
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#adb5bd",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 2.5,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


@contextmanager
def figure(width: float, height: float) -> Iterator[tuple[Figure, io.StringIO]]:
    """A figure of so many inches in the report's style; its SVG is in the buffer afterwards."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # a reader's own settings would change the figures; the backend is not used
    settings: dict[Any, Any] = {**matplotlib.rcParamsDefault, **_STYLE}
    del settings["backend"]
    out = io.StringIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # the reader's browser has the glyphs that the font for measuring lacks
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(width, height))
        FigureCanvasSVG(figure)
        yield figure, out
        unstamped = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=unstamped)


def legend_above(figure: Figure, ax: Axes) -> None:
    """Put the legend of `ax` over the whole figure, in as many columns as its labels allow."""
    handles, labels = ax.get_legend_handles_labels()
    num_cols = 160 // (10 + max(map(len, labels)))
    figure.legend(handles, labels, loc="outside upper left", ncols=num_cols)


def page_svg(out: io.StringIO, name: str, label: str) -> str:
    """The figure's <svg> element alone, its ids made unique among the figures of a page.

    Only tags are touched: what stands between them is text from the data.
    """

    def adapt(tag: re.Match[str]) -> str:
        adapted = re.sub(r' xmlns(:xlink)?="[^"]*"', "", tag[0])
        adapted = re.sub(r' id="', f' id="{name}-', adapted)
        return re.sub(r'(href="|url\()#', rf"\1#{name}-", adapted)

    drawing = out.getvalue()
    drawing = re.sub(r"<[^>]*>", adapt, drawing[drawing.index("<svg") :])
    return drawing.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


_PAGE_STYLE = """\
<style>
:root { color-scheme: light; --ink: #212529; --soft: #5c6670; --line: #e3e7eb; --good: #2b8a3e;
 --bad: #c92a2a; --accent: #1c6fb8; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink);
 font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 0 0 10px; }
.soft { color: var(--soft); }
.good { color: var(--good); }
.bad { color: var(--bad); }
.note { border-left: 3px solid var(--bad); padding: 2px 0 2px 12px; margin: 14px 0 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(225px, 1fr)); gap: 12px;
 margin: 22px 0 12px; }
.card, section { background: #fff; border: 1px solid var(--line); border-radius: 8px; }
.card { padding: 13px 16px; }
.card .label { color: var(--soft); font-size: 13px; }
.card .value { font-size: 25px; font-weight: 600; line-height: 1.3; }
.card .more { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
section { padding: 18px 20px; margin-top: 12px; }
figure { margin: 10px 0 0; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 640px; height: auto; }
figure svg text { font-family: system-ui, "Segoe UI", Roboto, Helvetica, Arial,
 sans-serif !important; }
.scroll { overflow: auto; max-height: 560px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 0 5px 18px; border-bottom: 1px solid var(--line);
 vertical-align: top; white-space: nowrap; }
th { font-weight: 600; font-size: 13px; color: var(--soft); position: sticky; top: 0;
 background: #fff; }
th.text, td.text { text-align: left; padding-left: 0; min-width: 170px;
 white-space: normal; overflow-wrap: anywhere; }
td.text + td.text, th.text + th.text { padding-left: 18px; }
tr:last-child td { border-bottom: 0; }
ul { margin: 6px 0 0; padding-left: 20px; }
li { margin: 2px 0; overflow-wrap: anywhere; }
h3 { font-size: 15px; margin: 16px 0 0; }
code { font: 12.5px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, monospace; background: #f1f3f5;
 padding: 1px 4px; border-radius: 3px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { body { background: #fff; } section, .card { break-inside: avoid; }
 .scroll { max-height: none; } }
</style>
"""


def page_head(title: str) -> str:
    """A page's beginning, up to its first heading; it may load nothing and run no script.

    title: may hold template expressions.
    """
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
{_PAGE_STYLE}</head>
<body>
<main>
<h1>{title}</h1>
"""
