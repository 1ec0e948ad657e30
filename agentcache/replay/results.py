"""What a replay run measured: one record per call, totals, their JSON form and closing tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentcache.replay._format import (
    bytes_text,
    count_text,
    flops_text,
    noun_text,
    percent_text,
    seconds_text,
)

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "CallRecord",
    "FileCounts",
    "ReplayResult",
    "TokenTotals",
    "VerifyTotals",
    "percentile",
    "summary_table",
    "trajectory_table",
    "verify_text",
]

MAX_TRAJECTORY_ROWS = 20
"""Most trajectories the terminal lists one by one; the report and the JSON hold all."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One model call of a replayed trajectory.

    trajectory, call: which trajectory, and which of its calls, counted from 0.
    prompt_tokens == cached_tokens + computed_tokens; output_tokens is the length of the answer.
    ttft_s, total_s: seconds from submission to the first token and to the end.
    at_s: seconds from the start of the run to the end of the call.
    bytes_by_kind: bytes held by kind right after the call.
    miss: why less was reused than was possible (`MissReport.to_json()`), or None.
    verify: the comparison with a cold run, or None where the call was not verified; keys
        `positions`, `different_ids`, `max_logit_error`, `max_state_error`, others may follow.
    cold_ttft_s: time to first token of the same call without a cache, where it was measured.
    """

    trajectory: str
    call: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    ttft_s: float
    total_s: float
    at_s: float
    bytes_by_kind: Mapping[str, int]
    miss: Mapping[str, Any] | None = None
    verify: Mapping[str, Any] | None = None
    cold_ttft_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The call as plain JSON values."""
        return {
            "trajectory": self.trajectory,
            "call": self.call,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
            "output_tokens": self.output_tokens,
            "ttft_s": self.ttft_s,
            "total_s": self.total_s,
            "cold_ttft_s": self.cold_ttft_s,
            "at_s": self.at_s,
            "bytes": dict(self.bytes_by_kind),
            "miss": _plain(self.miss),
            "verify": _plain(self.verify),
        }


@dataclass(frozen=True, slots=True)
class FileCounts:
    """How many input files were read whole, in part, found empty, or refused."""

    loaded: int = 0
    partial: int = 0
    skipped: int = 0
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Calls and prompt tokens of one trajectory or of a whole run."""

    name: str
    calls: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int

    @classmethod
    def of(cls, name: str, calls: Iterable[CallRecord]) -> TokenTotals:
        """The sums over `calls`."""
        records = tuple(calls)
        return cls(
            name=name,
            calls=len(records),
            prompt_tokens=sum(record.prompt_tokens for record in records),
            cached_tokens=sum(record.cached_tokens for record in records),
            computed_tokens=sum(record.computed_tokens for record in records),
        )

    @property
    def hit_rate(self) -> float:
        """Cached over prompt tokens; 0 without prompts."""
        return _ratio(self.cached_tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class VerifyTotals:
    """All verified calls together; errors are the worst seen (NaN if any was)."""

    calls: int
    positions: int
    different_ids: int
    max_logit_error: float
    max_state_error: float

    @classmethod
    def of(cls, reports: Iterable[Mapping[str, Any]]) -> VerifyTotals:
        """The sums and maxima over the `verify` reports of calls."""
        found = tuple(reports)
        return cls(
            calls=len(found),
            positions=sum(report["positions"] for report in found),
            different_ids=sum(report["different_ids"] for report in found),
            max_logit_error=_worst(report["max_logit_error"] for report in found),
            max_state_error=_worst(report["max_state_error"] for report in found),
        )

    def passed(self, tolerance: float) -> bool:
        """Whether no id differs and no error exceeds `tolerance`; a NaN never passes."""
        errors = (self.max_logit_error, self.max_state_error)
        return self.different_ids == 0 and all(error <= tolerance for error in errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """A finished replay run.

    budget_bytes: the cache's limit, None for none; need_bytes: what an unlimited cache that keeps
        every useful checkpoint would hold at most, None where it was not computed.
    calls: in the order in which they ended.
    ideal_cached_tokens: tokens an unlimited, exact-prefix cache would have reused.
    flops_computed, flops_total: prefill FLOPs that were run, and that would be without a cache.
    peak_bytes, peak_bytes_by_kind: most bytes held at one moment, in all and of each kind. Kinds
        peak at different moments, so they may add up to more.
    rejected: one message per refused input; notes: one per input skipped or read in part.
    stopped_early: why the run ended before its input did, None if it did not.
    verify_tolerance: largest error of logits and states that counts as equal.
    """

    model: str
    policy: str
    budget_bytes: int | None
    need_bytes: int | None
    calls: tuple[CallRecord, ...]
    num_trajectories: int
    ideal_cached_tokens: int
    flops_computed: int
    flops_total: int
    peak_bytes: int
    peak_bytes_by_kind: Mapping[str, int]
    files: FileCounts
    rejected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stopped_early: str | None = None
    verify_tolerance: float = 1e-4

    @property
    def tokens(self) -> TokenTotals:
        """Sums over all calls."""
        return TokenTotals.of("", self.calls)

    @property
    def ideal_hit_rate(self) -> float:
        """Reusable over prompt tokens; 0 without prompts."""
        return _ratio(self.ideal_cached_tokens, self.tokens.prompt_tokens)

    @property
    def flops_saved(self) -> float:
        """Share of the prefill FLOPs that the cache made unnecessary; 0 without prompts."""
        return _ratio(self.flops_total - self.flops_computed, self.flops_total)

    @property
    def verify(self) -> VerifyTotals:
        """Totals of the verified calls; `calls` is 0 where none was."""
        return VerifyTotals.of(call.verify for call in self.calls if call.verify is not None)

    def verified(self) -> tuple[tuple[CallRecord, VerifyTotals], ...]:
        """Each verified call with its own outcome."""
        return tuple(
            (call, VerifyTotals.of([call.verify])) for call in self.calls if call.verify is not None
        )

    @property
    def verify_failed(self) -> bool:
        """Whether some verified call gave another answer than without a cache."""
        totals = self.verify
        return totals.calls > 0 and not totals.passed(self.verify_tolerance)

    @property
    def ttft_s(self) -> tuple[float, ...]:
        """Time to first token of every call."""
        return tuple(call.ttft_s for call in self.calls)

    @property
    def cold_pairs_s(self) -> tuple[tuple[float, float], ...]:
        """(with cache, without) time to first token of the calls that were timed both ways."""
        return tuple(
            (call.ttft_s, call.cold_ttft_s) for call in self.calls if call.cold_ttft_s is not None
        )

    def by_trajectory(self) -> tuple[TokenTotals, ...]:
        """Sums per trajectory, in order of first appearance."""
        groups: dict[str, list[CallRecord]] = {}
        for call in self.calls:
            groups.setdefault(call.trajectory, []).append(call)
        return tuple(TokenTotals.of(name, calls) for name, calls in groups.items())

    def to_json(self) -> dict[str, Any]:
        """The run as plain JSON values.

        Rates, `flops_saved` among them, are fractions; a percentile without samples is null, and
        so is an error that is not a finite number (`verify.passed` is false then).
        """
        return {
            "model": self.model,
            "policy": self.policy,
            "totals": self._totals_json(),
            "verify": self._verify_json(),
            "files": {
                "loaded": self.files.loaded,
                "partial": self.files.partial,
                "skipped": self.files.skipped,
                "rejected": self.files.rejected,
            },
            "rejected": list(self.rejected),
            "notes": list(self.notes),
            "stopped_early": self.stopped_early,
            "calls": [call.to_json() for call in self.calls],
        }

    def _totals_json(self) -> dict[str, Any]:
        tokens = self.tokens
        cold = [without for _, without in self.cold_pairs_s]
        return {
            "calls": tokens.calls,
            "trajectories": self.num_trajectories,
            "prompt_tokens": tokens.prompt_tokens,
            "cached_tokens": tokens.cached_tokens,
            "computed_tokens": tokens.computed_tokens,
            "output_tokens": sum(call.output_tokens for call in self.calls),
            "hit_rate": tokens.hit_rate,
            "ideal_hit_rate": self.ideal_hit_rate,
            "flops_saved": self.flops_saved,
            "flops_computed": self.flops_computed,
            "flops_total": self.flops_total,
            "ttft_p50_s": percentile(self.ttft_s, 50),
            "ttft_p95_s": percentile(self.ttft_s, 95),
            "cold_ttft_p50_s": percentile(cold, 50),
            "cold_ttft_p95_s": percentile(cold, 95),
            "cold_calls": len(cold),
            "peak_bytes": self.peak_bytes,
            "peak_bytes_by_kind": dict(self.peak_bytes_by_kind),
            "budget_bytes": self.budget_bytes,
            "need_bytes": self.need_bytes,
        }

    def _verify_json(self) -> dict[str, Any]:
        totals = self.verify
        return {
            "calls": totals.calls,
            "positions": totals.positions,
            "different_ids": totals.different_ids,
            "max_logit_error": _plain(totals.max_logit_error),
            "max_state_error": _plain(totals.max_state_error),
            "tolerance": self.verify_tolerance,
            "passed": None if totals.calls == 0 else not self.verify_failed,
        }


def percentile(values: Iterable[float], percent: int) -> float | None:
    """The nearest-rank percentile: the smallest value with `percent` % of all at or below it.

    Always a value that was measured; None without values.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 50)
    2.0
    """
    assert 0 < percent <= 100
    ordered = sorted(values)
    if not ordered:
        return None
    rank = -(-percent * len(ordered) // 100)
    return ordered[rank - 1]


def summary_table(result: ReplayResult) -> Table:
    """The closing table of a run, readable from 80 columns on."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(f"Replay on {result.model}, policy {result.policy}"),
        box=box.SIMPLE_HEAD,
        show_header=False,
        title_justify="left",
    )
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    sections = (
        _token_rows(result),
        _ttft_rows(result),
        _byte_rows(result),
        _outcome_rows(result),
    )
    for rows in sections:
        for label, value in rows:
            table.add_row(Text(label, style="bold"), value)
        table.add_section()
    return table


def trajectory_table(result: ReplayResult) -> Table | None:
    """One row per trajectory; None for an empty run and for more rows than a screen holds."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = result.by_trajectory()
    if not 0 < len(rows) <= MAX_TRAJECTORY_ROWS:
        return None
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("trajectory", overflow="fold")
    for heading in ("calls", "prompt tokens", "hit rate", "computed/call"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row.name),
            count_text(row.calls),
            count_text(row.prompt_tokens),
            percent_text(row.hit_rate),
            count_text(round(_ratio(row.computed_tokens, row.calls))),
        )
    return table


def verify_text(result: ReplayResult) -> str:
    """One line that says whether the answers were the same with the cache as without."""
    totals = result.verify
    if totals.calls == 0:
        return "not run"
    verdict = "FAILED" if result.verify_failed else "ok"
    ids = noun_text(totals.different_ids, "differing id", "differing ids")
    positions = noun_text(totals.positions, "position", "positions")
    return (
        f"{verdict}: {ids} at {positions} of {noun_text(totals.calls, 'call', 'calls')}; worst "
        f"error: logits {totals.max_logit_error:.1e}, states {totals.max_state_error:.1e}"
    )


def _token_rows(result: ReplayResult) -> list[tuple[str, str]]:
    tokens = result.tokens
    trajectories = noun_text(result.num_trajectories, "trajectory", "trajectories")
    ideal = percent_text(result.ideal_hit_rate)
    if result.ideal_cached_tokens > 0:
        reached = tokens.cached_tokens / result.ideal_cached_tokens
        ideal += f" ({percent_text(reached)} of it reached)"
    saved = result.flops_total - result.flops_computed
    return [
        ("calls", f"{count_text(tokens.calls)} in {trajectories}"),
        ("prompt tokens", count_text(tokens.prompt_tokens)),
        ("cached tokens", count_text(tokens.cached_tokens)),
        ("computed tokens", count_text(tokens.computed_tokens)),
        ("hit rate", percent_text(tokens.hit_rate)),
        ("ideal hit rate", ideal),
        (
            "prefill FLOPs saved",
            f"{percent_text(result.flops_saved)} ({flops_text(saved)} of "
            f"{flops_text(result.flops_total)})",
        ),
    ]


def _ttft_rows(result: ReplayResult) -> list[tuple[str, str]]:
    """With the cache over all calls; without it over the calls timed cold, beside their own."""
    rows = [("TTFT p50 / p95, cached", _p50_p95(result.ttft_s))]
    pairs = result.cold_pairs_s
    if not pairs:
        return [*rows, ("  no cache", "not measured")]
    warm, cold = zip(*pairs, strict=True)
    return [
        *rows,
        (f"  of {noun_text(len(pairs), 'call', 'calls')}", _p50_p95(warm)),
        ("  of the same, no cache", _p50_p95(cold)),
    ]


def _byte_rows(result: ReplayResult) -> list[tuple[str, str]]:
    budget = "no limit" if result.budget_bytes is None else bytes_text(result.budget_bytes)
    rows = [("peak bytes", f"{bytes_text(result.peak_bytes)} (budget: {budget})")]
    rows += [
        (f"  {kind}", bytes_text(peak)) for kind, peak in sorted(result.peak_bytes_by_kind.items())
    ]
    if result.need_bytes is not None:
        rows.append(("need, unlimited", bytes_text(result.need_bytes)))
    return rows


def _outcome_rows(result: ReplayResult) -> list[tuple[str, str | Text]]:
    from rich.text import Text

    files = result.files
    style = "red" if result.verify_failed else "green" if result.verify.calls else "yellow"
    rows: list[tuple[str, str | Text]] = [
        (
            "files",
            f"{files.loaded} loaded, {files.partial} partial, {files.skipped} skipped, "
            f"{files.rejected} rejected",
        ),
        ("verification", Text(verify_text(result), style=style)),
    ]
    if result.stopped_early is not None:
        rows.append(("stopped early", Text(result.stopped_early, style="yellow")))
    return rows


def _p50_p95(values: Iterable[float]) -> str:
    samples = tuple(values)
    return f"{seconds_text(percentile(samples, 50))} / {seconds_text(percentile(samples, 95))}"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _worst(errors: Iterable[float]) -> float:
    """The largest error, 0 without any; NaN if one is, which `max` alone would hide."""
    found = tuple(errors)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _plain(value: Any) -> Any:
    """A copy of JSON-like data in strict JSON values: numbers that JSON lacks become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
