"""The report of a replay run: one HTML page that needs nothing but itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from agentcache.errors import ConfigError
from agentcache.replay import _plots
from agentcache.replay._format import (
    bytes_text,
    count_text,
    flops_text,
    noun_text,
    percent_text,
    seconds_text,
)
from agentcache.replay._page import TEMPLATE
from agentcache.replay.results import percentile, verify_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.replay.results import CallRecord, ReplayResult

__all__ = ["render_report", "write_report"]

_EXAMPLES_PER_REASON = 3
_EXCERPT_CHARS = 160


def write_report(result: ReplayResult, path: str | Path) -> None:
    """Write the report of `result` to `path`, replacing what is there.

    Equal results give equal bytes. Raises ConfigError if the file cannot be written.
    """
    page = render_report(result)
    try:
        # file names may hold surrogates, which UTF-8 has no bytes for
        Path(path).write_bytes(page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"cannot write the report to {path}: {error.strerror}; name a file in a folder that "
            "exists and can be written to"
        ) from error


def render_report(result: ReplayResult) -> str:
    """The report of `result` as HTML text."""
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(TEMPLATE)
    return page.render(
        model=result.model,
        subtitle=_subtitle(result),
        stopped_early=result.stopped_early,
        cards=_cards(result),
        figures=_figures(result) if result.calls else [],
        trajectories=_trajectories(result),
        verify=verify_text(result),
        verify_tone=_verify_tone(result),
        tolerance=f"{result.verify_tolerance:.0e}",
        failures=_failures(result),
        misses=_misses(result),
        files=_files(result),
        rejected=result.rejected,
        notes=result.notes,
    )


def _subtitle(result: ReplayResult) -> str:
    need = "" if result.need_bytes is None else f", need {bytes_text(result.need_bytes)}"
    return f"policy {result.policy}, budget {_budget(result)}{need}"


def _budget(result: ReplayResult) -> str:
    return "without limit" if result.budget_bytes is None else bytes_text(result.budget_bytes)


def _cards(result: ReplayResult) -> list[dict[str, str]]:
    tokens = result.tokens
    saved = result.flops_total - result.flops_computed
    cold = [without for _, without in result.cold_pairs_s]
    timed = (
        f"p95 {seconds_text(percentile(result.ttft_s, 95))}; no cache: not measured"
        if not cold
        else f"p95 {seconds_text(percentile(result.ttft_s, 95))}; no cache "
        f"{seconds_text(percentile(cold, 50))}, p95 {seconds_text(percentile(cold, 95))} "
        f"({noun_text(len(cold), 'call', 'calls')})"
    )
    return [
        _card(
            "Calls",
            count_text(tokens.calls),
            noun_text(result.num_trajectories, "trajectory", "trajectories"),
        ),
        _card(
            "Hit rate",
            percent_text(tokens.hit_rate),
            f"{percent_text(result.ideal_hit_rate)} would be ideal",
        ),
        _card(
            "Prompt tokens",
            count_text(tokens.prompt_tokens),
            f"{count_text(tokens.cached_tokens)} cached, "
            f"{count_text(tokens.computed_tokens)} computed",
        ),
        _card(
            "Prefill FLOPs saved",
            percent_text(result.flops_saved),
            f"{flops_text(saved)} of {flops_text(result.flops_total)}",
        ),
        _card("Time to first token, p50", seconds_text(percentile(result.ttft_s, 50)), timed),
        _card("Peak bytes", bytes_text(result.peak_bytes), _peaks(result)),
        _verify_card(result),
        _card("Input files loaded", count_text(result.files.loaded), _files(result)),
    ]


def _card(label: str, value: str, more: str, tone: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "more": more, "tone": tone}


def _peaks(result: ReplayResult) -> str:
    kinds = sorted(result.peak_bytes_by_kind.items())
    return ", ".join(f"{kind} {bytes_text(peak)}" for kind, peak in kinds)


def _verify_card(result: ReplayResult) -> dict[str, str]:
    totals = result.verify
    if totals.calls == 0:
        return _card("Verification", "not run", "no call was computed again without the cache")
    value = "failed" if result.verify_failed else "same answers"
    ids = noun_text(totals.different_ids, "differing id", "differing ids")
    positions = noun_text(totals.positions, "position", "positions")
    more = f"{ids} in {noun_text(totals.calls, 'call', 'calls')}, {positions}"
    return _card("Verification", value, more, _verify_tone(result))


def _verify_tone(result: ReplayResult) -> str:
    if result.verify.calls == 0:
        return "soft"
    return "bad" if result.verify_failed else "good"


def _files(result: ReplayResult) -> str:
    files = result.files
    return (
        f"{count_text(files.loaded)} loaded, {count_text(files.partial)} partial, "
        f"{count_text(files.skipped)} skipped, {count_text(files.rejected)} rejected"
    )


def _figures(result: ReplayResult) -> list[dict[str, str]]:
    together = len(result.by_trajectory()) > _plots.MAX_PANELS
    tokens = "Prompt tokens of each turn: taken from the cache, and computed. Below, the computed "
    tokens += "ones again on their own scale."
    if together:
        tokens += " Means over the trajectories that reach the turn."
    ttft = "Logarithmic scale."
    if result.cold_pairs_s:
        ttft += " Diamonds: the same call timed without the cache."
    held = "By kind, as measured at the end of each call. The dotted line is the highest moment."
    if result.budget_bytes is not None and not _plots.budget_in_view(result):
        held += f" The budget of {bytes_text(result.budget_bytes)} lies far above the plot."
    return [
        _figure("Tokens per turn", tokens, _plots.tokens_figure(result)),
        _figure("Time to first token", ttft, _plots.ttft_figure(result)),
        _figure("Bytes over time", held, _plots.bytes_figure(result)),
    ]


def _figure(title: str, caption: str, svg: str) -> dict[str, str]:
    return {"title": title, "caption": caption, "svg": Markup(svg)}


def _trajectories(result: ReplayResult) -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "cells": (
                count_text(row.calls),
                count_text(row.prompt_tokens),
                count_text(row.cached_tokens),
                count_text(row.computed_tokens),
                count_text(round(row.computed_tokens / row.calls)),
                percent_text(row.hit_rate),
            ),
        }
        for row in result.by_trajectory()
    ]


def _failures(result: ReplayResult) -> list[dict[str, Any]]:
    """The verified calls whose answer was another one."""
    return [
        {
            "name": call.trajectory,
            "cells": (
                count_text(call.call),
                count_text(totals.positions),
                count_text(totals.different_ids),
                f"{totals.max_logit_error:.1e}",
                f"{totals.max_state_error:.1e}",
            ),
        }
        for call, totals in result.verified()
        if not totals.passed(result.verify_tolerance)
    ]


def _misses(result: ReplayResult) -> list[dict[str, Any]]:
    """Misses by reason, those that made most work first, with a few examples each."""
    groups: dict[str, list[tuple[CallRecord, Mapping[str, Any]]]] = {}
    for call in result.calls:
        if call.miss is not None:
            groups.setdefault(str(call.miss["reason"]), []).append((call, call.miss))
    tokens = {
        reason: sum(call.computed_tokens for call, _ in found) for reason, found in groups.items()
    }
    return [
        {
            "reason": reason,
            "calls": count_text(len(groups[reason])),
            "tokens": count_text(tokens[reason]),
            "examples": [_example(*found) for found in groups[reason][:_EXAMPLES_PER_REASON]],
        }
        for reason in sorted(groups, key=lambda reason: (-tokens[reason], reason))
    ]


def _example(call: CallRecord, miss: Mapping[str, Any]) -> dict[str, str | None]:
    where = f"{call.trajectory}, call {call.call}: at token {count_text(miss['at_token'])}"
    if miss["message"] is not None:
        index, role = miss["message"]
        where += f", message {index} ({role})"
    where += f"; {count_text(call.computed_tokens)} of {count_text(call.prompt_tokens)} computed"
    if miss["vetoed_by"] is not None:
        where += f"; KV would reach {count_text(miss['kv_len'])} tokens, "
        where += f"states {count_text(miss['state_len'])}"
    if miss.get("fallback") is not None:
        where += f"; {miss['fallback']}"
    return {
        "where": where,
        "expected": _excerpt(miss["expected"]),
        "got": _excerpt(miss["got"]),
    }


def _excerpt(text: str) -> str | None:
    """The text in quotes, with line ends and blanks that can be told apart; None for no text."""
    if not text:
        return None
    cut = "" if len(text) <= _EXCERPT_CHARS else "…"
    return json.dumps(text[:_EXCERPT_CHARS], ensure_ascii=False) + cut
