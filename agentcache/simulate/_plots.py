"""The report's figures, as SVG text to put into a page. Imports matplotlib when called."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from agentcache.replay.drawing import LINES, figure, legend_above, page_svg
from agentcache.simulate.bounds import BOUNDS
from agentcache.simulate.table import budget_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agentcache.simulate.results import Setup, SimResult

__all__ = ["admissions", "budget_figure", "hints"]

_LINES = (*LINES, "#5f3dc4", "#66a80f", "#d6336c", "#495057")


def budget_figure(results: Sequence[SimResult]) -> str:
    """One line per policy over the budgets, and the bounds."""
    main = results[0].setup.admission
    own = [each for each in results if each.setup.admission == main and each.setup.hints]
    known = [each for each in results if each.setup.policy in BOUNDS]
    lines = _lines([*(each for each in own if each.setup.policy not in BOUNDS), *known])
    with figure(10, 3.6) as (drawn, out):
        ax = drawn.subplots()
        budgets = _budgets(results)
        places = {label: at for at, label in enumerate(budgets)}
        color = iter(_LINES * (1 + len(lines) // len(_LINES)))
        for name, points in lines.items():
            style = _BOUND_STYLES.get(name, "o-")
            ink = _BOUND_INKS.get(name) or next(color)
            if name == "unlimited":
                ax.axhline(100 * max(points.values()), color=ink, ls="-", lw=0.8, label=name)
                continue
            at = [places[label] for label in points]
            ax.plot(at, [100 * rate for rate in points.values()], style, color=ink, label=name)
        for line in ax.get_lines():
            line.set(markersize=3, linewidth=1.2)
        ax.set_xticks(range(len(budgets)), budgets)
        ax.set_xlim(-0.4, len(budgets) - 0.6)
        ax.set_xlabel("budget")
        ax.set_ylabel("hit rate in %")
        legend_above(drawn, ax)
    return _svg(out, results, "budget", "Hit rate against budget")


def admissions(results: Sequence[SimResult]) -> str | None:
    """Each policy with each admission; None where there is one only."""
    return _bars(results, lambda setup: setup.admission, lambda setup: setup.hints, "admission")


def hints(results: Sequence[SimResult]) -> str | None:
    """Each policy with hints and without; None where all runs had the same."""
    main = results[0].setup.admission
    return _bars(
        results,
        lambda setup: "with hints" if setup.hints else "without hints",
        lambda setup: setup.admission == main,
        "hints",
    )


_BOUND_STYLES = {"clairvoyant": "o--", "clairvoyant-evict": "s--", "bound": "o:"}
_BOUND_INKS = {
    "clairvoyant": "#343a40",
    "clairvoyant-evict": "#868e96",
    "bound": "#adb5bd",
    "unlimited": "#ced4da",
}


def _budgets(results: Sequence[SimResult]) -> list[str]:
    """Budgets that runs had, smallest first."""
    sizes = {
        budget_text(each.setup): each.setup.budget_bytes
        for each in results
        if each.setup.budget_bytes is not None
    }
    return sorted(sizes, key=lambda label: sizes[label] or 0) or ["no limit"]


def _lines(results: Sequence[SimResult]) -> dict[str, dict[str, float]]:
    """Hit rates by policy and budget, smallest budget first."""
    lines: dict[str, dict[str, float]] = {}
    for each in sorted(results, key=lambda each: each.setup.budget_bytes or 0):
        lines.setdefault(each.setup.policy, {})[budget_text(each.setup)] = each.hit_rate
    return lines


def _bars(
    results: Sequence[SimResult],
    variant: Callable[[Setup], str],
    is_wanted: Callable[[Setup], bool],
    name: str,
) -> str | None:
    """A group of bars per budget and policy, one per variant."""
    runs = [
        each
        for each in results
        if each.setup.policy not in BOUNDS and is_wanted(each.setup) and each.setup.budget_bytes
    ]
    variants = list(dict.fromkeys(variant(each.setup) for each in runs))
    if len(variants) < 2:
        return None
    groups: dict[str, Mapping[str, float]] = {}
    for budget in _budgets(runs):
        here = [each for each in runs if budget_text(each.setup) == budget]
        for policy in dict.fromkeys(each.setup.policy for each in here):
            rates = {
                variant(each.setup): 100 * each.hit_rate
                for each in here
                if each.setup.policy == policy
            }
            groups[f"{policy}\n{budget}"] = rates
    with figure(10, 3.2) as (drawn, out):
        ax = drawn.subplots()
        width = 0.8 / len(variants)
        for number, (each, ink) in enumerate(zip(variants, _LINES * 4, strict=False)):
            at = [place + (number + 0.5) * width - 0.4 for place in range(len(groups))]
            ax.bar(at, [g.get(each, 0.0) for g in groups.values()], width, color=ink, label=each)
        ax.set_xticks(range(len(groups)), list(groups))
        ax.set_ylabel("hit rate in %")
        legend_above(drawn, ax)
    return _svg(out, results, name, f"Hit rate by {name}")


def _svg(out: object, results: Sequence[SimResult], name: str, label: str) -> str:
    """Ids are of one page, on which several traces have figures of the same kind."""
    own = hashlib.sha256(results[0].trace.encode("utf-8", "replace")).hexdigest()[:8]
    return page_svg(out, f"{name}-{own}", label)  # type: ignore[arg-type]
