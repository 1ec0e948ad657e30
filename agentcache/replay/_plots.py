"""The report's figures, as SVG text to put into a page. Imports matplotlib when called."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING

from agentcache.replay.drawing import INK, LINES, figure, legend_above, page_svg

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from agentcache.replay.results import CallRecord, ReplayResult

__all__ = ["MAX_PANELS", "budget_in_view", "bytes_figure", "tokens_figure", "ttft_figure"]

MAX_PANELS = 6
"""Most trajectories drawn one by one; more are drawn together."""

_CACHED, _COMPUTED, _COLD = "#a9c7e8", "#d9590b", "#495057"
_KINDS = ("#74a9d8", "#f2a65a", "#8ccf9b", "#b79ad6", "#e08fa9", "#8fd0d6")


def tokens_figure(result: ReplayResult) -> str:
    """Cached and computed tokens of each turn, and the computed ones again on their own scale.

    One panel per trajectory, or the mean per turn where there are more than MAX_PANELS.
    """
    panels = _token_panels(result)
    num_cols = min(3, len(panels))
    num_blocks = -(-len(panels) // num_cols)
    with figure(10, 2.9 * num_blocks + 0.3) as (drawn, out):
        axes = drawn.subplots(
            2 * num_blocks, num_cols, squeeze=False, height_ratios=[2.2, 1] * num_blocks
        )
        top = max(
            max(c + n for c, n in zip(cached, new, strict=True)) for _, _, cached, new in panels
        )
        most = max(max(new) for _, _, _, new in panels)
        for idx in range(num_blocks * num_cols):
            upper, lower = (axes[2 * (idx // num_cols) + row][idx % num_cols] for row in (0, 1))
            if idx >= len(panels):
                upper.set_axis_off()
                lower.set_axis_off()
                continue
            title, turns, cached, new = panels[idx]
            _bars(upper, turns, [0.0] * len(turns), cached, _CACHED, "cached")
            _bars(upper, turns, cached, new, _COMPUTED, "computed")
            _bars(lower, turns, [0.0] * len(turns), new, _COMPUTED, None)
            upper.set_title(_label(title))
            lower.set_xlabel("turn")
            for ax, height in ((upper, top), (lower, most)):
                ax.set_ylim(0, 1.05 * height or 1)
                ax.set_xlim(min(turns) - 0.8, max(max(turns), min(turns) + 9) + 0.8)
                _whole_numbers(ax)
            if idx % num_cols == 0:
                upper.set_ylabel("prompt tokens")
                lower.set_ylabel("computed")
        legend_above(drawn, axes[0][0])
    return page_svg(out, "tokens", "Cached and computed prompt tokens of each turn")


def ttft_figure(result: ReplayResult) -> str:
    """Seconds to the first token of each turn, on a logarithmic scale; cold times as diamonds."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    groups = _groups(result)
    with figure(10, 3.1) as (drawn, out):
        ax = drawn.subplots()
        if len(groups) <= MAX_PANELS:
            for (name, calls), color in zip(groups.items(), LINES, strict=False):
                turns, times = _ttft_points(calls)
                label = _label(name)
                ax.plot(turns, times, "o-", markersize=2.2, lw=1, color=color, label=label)
        else:
            by_turn = _by_turn(result.calls)
            medians = [median(_ttft_points(calls)[1]) for calls in by_turn.values()]
            turns, times = _ttft_points(result.calls)
            ax.plot(turns, times, "o", markersize=1.8, color=_CACHED, label="each call")
            ax.plot(list(by_turn), medians, color=LINES[0], label="median")
        cold = [(c.call, c.cold_ttft_s) for c in result.calls if c.cold_ttft_s is not None]
        if cold:
            turns, times = [turn for turn, _ in cold], [time for _, time in cold]
            (points,) = ax.plot(turns, times, "D", markersize=4, color=_COLD)
            points.set(markerfacecolor="white", label="without the cache")
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick_s(value)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        ax.set_xlabel("turn")
        ax.set_ylabel("time to first token")
        legend_above(drawn, ax)
    return page_svg(out, "ttft", "Time to first token of each turn")


def bytes_figure(result: ReplayResult) -> str:
    """Bytes held by the end of each call, stacked by kind, against the budget and the peak.

    The level at a call's end is drawn back to the end of the call before it.
    """
    from matplotlib.ticker import StrMethodFormatter

    calls = sorted(result.calls, key=lambda call: call.at_s)
    kinds = sorted({kind for call in calls for kind in call.bytes_by_kind})
    unit, name = _byte_unit(result.peak_bytes)
    times = [0.0, *(call.at_s for call in calls)]
    with figure(10, 2.8) as (drawn, out):
        ax = drawn.subplots()
        below = [0.0] * len(times)
        for idx, kind in enumerate(kinds):
            held = [0.0, *(call.bytes_by_kind.get(kind, 0) / unit for call in calls)]
            above = [low + more for low, more in zip(below, held, strict=True)]
            color = _KINDS[idx % len(_KINDS)]
            ax.fill_between(times, below, above, step="pre", color=color, lw=0, label=kind)
            below = above
        top = max([*below, result.peak_bytes / unit])
        ax.axhline(result.peak_bytes / unit, color=INK, lw=0.9, ls=":", label="peak")
        if budget_in_view(result) and result.budget_bytes is not None:
            top = max(top, result.budget_bytes / unit)
            ax.axhline(result.budget_bytes / unit, color="#c92a2a", lw=1.1, ls="--", label="budget")
        ax.set_ylim(0, 1.08 * top or 1)
        ax.set_xlim(0, max(times) or 1)
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        ax.set_xlabel("seconds since the start")
        ax.set_ylabel(name)
        legend_above(drawn, ax)
    return page_svg(out, "bytes", "Bytes held over time by kind")


def budget_in_view(result: ReplayResult) -> bool:
    """Whether the budget is near enough to what was held to be drawn beside it."""
    return result.budget_bytes is not None and result.budget_bytes <= 4 * result.peak_bytes


def _token_panels(
    result: ReplayResult,
) -> list[tuple[str, list[int], list[float], list[float]]]:
    """(title, turns, cached, computed) of each panel."""
    groups = _groups(result)
    if len(groups) <= MAX_PANELS:
        return [
            (
                name,
                [call.call for call in calls],
                [float(call.cached_tokens) for call in calls],
                [float(call.computed_tokens) for call in calls],
            )
            for name, calls in groups.items()
        ]
    by_turn = _by_turn(result.calls)
    return [
        (
            f"mean of {len(groups)} trajectories",
            list(by_turn),
            [fmean(call.cached_tokens for call in calls) for calls in by_turn.values()],
            [fmean(call.computed_tokens for call in calls) for calls in by_turn.values()],
        )
    ]


def _groups(result: ReplayResult) -> dict[str, list[CallRecord]]:
    """Calls by trajectory, each in the order of its turns."""
    groups: dict[str, list[CallRecord]] = {}
    for call in result.calls:
        groups.setdefault(call.trajectory, []).append(call)
    return {name: sorted(calls, key=lambda call: call.call) for name, calls in groups.items()}


def _ttft_points(calls: Sequence[CallRecord]) -> tuple[list[int], list[float]]:
    """Turns and times to first token."""
    return [call.call for call in calls], [call.ttft_s for call in calls]


def _by_turn(calls: Sequence[CallRecord]) -> dict[int, list[CallRecord]]:
    """Calls of all trajectories by turn, ascending."""
    turns: dict[int, list[CallRecord]] = {}
    for call in sorted(calls, key=lambda call: call.call):
        turns.setdefault(call.call, []).append(call)
    return turns


def _bars(
    ax: Axes,
    turns: Sequence[int],
    bottoms: Sequence[float],
    heights: Sequence[float],
    color: str,
    label: str | None,
) -> None:
    """Bars as one path, a tenth of the bytes that one element per bar takes."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    half = 0.4 if len(turns) <= 60 else 0.5
    outlines = [
        [
            (turn - half, low),
            (turn - half, low + height),
            (turn + half, low + height),
            (turn + half, low),
            (turn - half, low),
        ]
        for turn, low, height in zip(turns, bottoms, heights, strict=True)
    ]
    path = Path.make_compound_path(*(Path(outline, closed=True) for outline in outlines))
    ax.add_patch(PathPatch(path, facecolor=color, linewidth=0, label=label))


def _whole_numbers(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=8))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=5))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _label(name: str) -> str:
    """A trajectory's name in at most 34 characters; ids differ at their ends more than in front."""
    shown = "".join(char if char.isprintable() else " " for char in name)
    return shown if len(shown) <= 34 else "…" + shown[-33:]


def _tick_s(seconds: float) -> str:
    """A round time on an axis: "200 ms", "5 s"."""
    return f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"


def _byte_unit(num_bytes: int) -> tuple[int, str]:
    """The unit for an axis that reaches up to `num_bytes`."""
    for exponent, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 2 * 1024**exponent:
            return 1024**exponent, name
    return 1, "bytes"
