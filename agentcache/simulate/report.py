"""The report of a simulation: one HTML page that needs nothing but itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from agentcache.errors import ConfigError
from agentcache.replay._format import bytes_text, count_text, noun_text, percent_text
from agentcache.simulate import _plots
from agentcache.simulate._page import TEMPLATE
from agentcache.simulate.table import budget_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.simulate.results import SimResult

__all__ = ["render_report", "write_report"]


def write_report(
    results: Sequence[SimResult], path: str | Path, *, shape: str, notes: Sequence[str] = ()
) -> None:
    """Write the report of some runs to `path`, replacing what is there.

    shape: how it was named. notes: rows of traces that could not be used. Equal runs give equal
    bytes, but for times. Raises ConfigError if the file cannot be written.
    """
    page = render_report(results, shape=shape, notes=notes)
    try:
        Path(path).write_bytes(page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"cannot write the report to {path}: {error.strerror}; name a file in a folder that "
            "exists and can be written to"
        ) from error


def render_report(results: Sequence[SimResult], *, shape: str, notes: Sequence[str] = ()) -> str:
    """The report as HTML text."""
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(TEMPLATE)
    traces = list(dict.fromkeys(result.trace for result in results))
    return page.render(
        title=_title(traces),
        subtitle=f"shape {shape}; {noun_text(len(results), 'run', 'runs')}",
        traces=[_trace(name, [r for r in results if r.trace == name]) for name in traces],
        notes=list(notes),
    )


def _title(traces: Sequence[str]) -> str:
    shown = ", ".join(traces[:3])
    return shown if len(traces) <= 3 else f"{shown} and {len(traces) - 3} more"


def _trace(name: str, results: Sequence[SimResult]) -> dict[str, Any]:
    first = results[0]
    figures = [
        _figure(
            "Hit rate against budget",
            "Reused over prompt tokens. The dashed lines know the future; no policy can pass the "
            "dotted one.",
            _plots.budget_figure(results),
        )
    ]
    for title, caption, draw in (
        ("Admission", "The same policies, other rules for taking checkpoints.", _plots.admissions),
        ("Hints", "With what session handles tell, and without.", _plots.hints),
    ):
        svg = draw(results)
        if svg is not None:
            figures.append(_figure(title, caption, svg))
    return {
        "name": name,
        "facts": f"{noun_text(first.num_requests, 'request', 'requests')}, "
        f"{count_text(first.prompt_tokens)} prompt tokens",
        "figures": figures,
        "rows": [_row(result) for result in results],
    }


def _figure(title: str, caption: str, svg: str) -> dict[str, str]:
    return {"title": title, "caption": caption, "svg": Markup(svg)}


def _row(result: SimResult) -> dict[str, Any]:
    setup, row = result.setup, result.to_json()
    is_run = result.most_tokens is None
    return {
        "policy": setup.policy,
        "admission": setup.admission,
        "hints": "yes" if setup.hints else "no",
        "cells": [
            budget_text(setup),
            ("" if is_run else "≤ ") + percent_text(result.hit_rate),
            *(
                [
                    percent_text(result.flops_saved),
                    count_text(row["computed_p50"] or 0),
                    count_text(row["computed_p95"] or 0),
                    bytes_text(result.peak_bytes),
                    count_text(row["evictions"]),
                    percent_text(row["state_reuse"]),
                    percent_text(row["kv_reuse"]),
                    f"{row['cpu_us_per_request']:.0f} µs",
                ]
                if is_run
                else [""] * 8
            ),
        ],
    }
