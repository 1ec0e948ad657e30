"""The closing table of a simulation, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.replay._format import bytes_text, count_text
from agentcache.simulate.results import ANY_ADMISSION
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from agentcache.simulate.results import Setup, SimResult

__all__ = ["budget_text", "policy_text", "result_tables"]


def budget_text(setup: Setup) -> str:
    """A budget as it was given: "10 %" of the need, or bytes."""
    if setup.budget_share is not None:
        return f"{100 * setup.budget_share:g} %"
    return "no limit" if setup.budget_bytes is None else bytes_text(setup.budget_bytes)


def policy_text(setup: Setup, with_admission: bool) -> str:
    """What is different about a run: policy, admission if several were tried, no hints."""
    text = setup.policy
    if with_admission and setup.admission != ANY_ADMISSION:
        text += f", {setup.admission}"
    return text


def result_tables(results: Sequence[SimResult], width: int) -> list[Table]:
    """One table per trace, one row per run, for a terminal of so many columns.

    p50 and p95 are of the tokens that a request leaves to compute; of states and KV, it is the
    share of what was filed that was used again; CPU is the policy's, per request.
    """
    traces = dict.fromkeys(result.trace for result in results)
    return [_table([each for each in results if each.trace == name], width) for name in traces]


def _table(results: Sequence[SimResult], width: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    first = results[0]
    title = f"{first.trace}: {first.num_requests:,} requests, {first.prompt_tokens:,} prompt tokens"
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left")
    table.add_column("budget", no_wrap=True)
    table.add_column("policy", overflow="fold", min_width=_POLICY_WIDTH)
    columns = [column for column in _COLUMNS if width >= _WIDE or column not in _WIDE_ONLY]
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    with_admission = len({each.setup.admission for each in results} - {ANY_ADMISSION}) > 1
    before = ""
    for result in results:
        budget = budget_text(result.setup)
        if before not in ("", budget):
            table.add_section()
        shown = "" if before == budget else budget
        before = budget
        cells = _cells(result)
        table.add_row(
            Text(shown),
            Text(policy_text(result.setup, with_admission)),
            *(cells[column] for column in columns),
        )
    return table


_COLUMNS = (
    *("hit rate", "FLOPs saved", "p50", "p95", "peak", "evictions"),
    *("states used", "KV used", "CPU"),
)
_WIDE_ONLY = ("FLOPs saved", "peak", "evictions", "KV used")
_WIDE = 120
_POLICY_WIDTH = 17


def _cells(result: SimResult) -> dict[str, str]:
    if result.most_tokens is not None:
        return dict.fromkeys(_COLUMNS, "") | {"hit rate": f"≤ {_percent(result.hit_rate)}"}
    row = result.to_json()
    return {
        "hit rate": _percent(result.hit_rate),
        "FLOPs saved": _percent(result.flops_saved),
        "p50": count_text(row["computed_p50"] or 0),
        "p95": count_text(row["computed_p95"] or 0),
        "peak": bytes_text(result.peak_bytes),
        "evictions": count_text(row["evictions"]),
        "states used": _percent(result.reuse(Kind.STATE)),
        "KV used": _percent(result.reuse(Kind.FULL)),
        "CPU": f"{row['cpu_us_per_request']:.0f} µs",
    }


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
