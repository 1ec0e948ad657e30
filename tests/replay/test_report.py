"""The report page: complete, self-contained, escaped, deterministic, and small."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from agentcache.errors import ConfigError
from agentcache.replay.report import render_report, write_report
from agentcache.replay.results import CallRecord, FileCounts, ReplayResult

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=https://example.org/x.png onerror=alert(1)>',
    "<svg onload=alert(1)><a href='https://example.org'>",
    '--><b id="x">$\\frac{$ </text></svg>',
    "国際化 \x00\x1b[31m \ud800 end",
    "{{ model }} {% if %} url(#x)",
]


def synthetic_run(num_trajectories: int, num_turns: int, **changes: Any) -> ReplayResult:
    """Trajectories that grow by some 600 tokens a turn; turn 7 of each falls back to 1,000."""
    calls: list[CallRecord] = []
    for turn in range(num_turns):
        for idx in range(num_trajectories):
            prompt = 1500 + 640 * turn + 37 * idx
            cached = 0 if turn == 0 else 1000 if turn == 7 else prompt - 600 - 29 * (turn % 5)
            computed = prompt - cached
            calls.append(
                CallRecord(
                    trajectory=f"run-{idx:04d}",
                    call=turn,
                    prompt_tokens=prompt,
                    cached_tokens=cached,
                    computed_tokens=computed,
                    output_tokens=60,
                    ttft_s=computed / 700,
                    total_s=computed / 700 + 1,
                    at_s=2.0 * (len(calls) + 1),
                    bytes_by_kind={"full": 2048 * prompt, "state": 190_000 * (turn + 1)},
                    miss=_miss(turn, cached),
                    verify=EXACT if len(calls) % 10 == 0 else None,
                    cold_ttft_s=prompt / 700 if len(calls) % 9 == 0 else None,
                )
            )
    result = ReplayResult(
        model="tiny-hybrid",
        policy="session-lru",
        budget_bytes=64 << 20,
        need_bytes=80 << 20,
        calls=tuple(calls),
        num_trajectories=num_trajectories,
        ideal_cached_tokens=sum(call.cached_tokens for call in calls),
        flops_computed=10**9,
        flops_total=10**10,
        peak_bytes=48 << 20,
        peak_bytes_by_kind={"full": 40 << 20, "state": 8 << 20},
        files=FileCounts(loaded=num_trajectories),
    )
    return replace(result, **changes)


EXACT = {"positions": 20, "different_ids": 0, "max_logit_error": 2e-6, "max_state_error": 3e-7}


def _miss(turn: int, cached: int) -> dict[str, Any] | None:
    if turn not in (0, 7):
        return None
    return {
        "at_token": cached,
        "message": [turn, "tool"],
        "reason": "no_checkpoint" if turn else "new",
        "vetoed_by": "state" if turn else None,
        "kv_len": 4000,
        "state_len": cached,
        "expected": "exit code 0\n" if turn else "",
        "got": "exit code 1\n",
    }


class Page(HTMLParser):
    """Tags, the addresses they point to, and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.addresses: set[str] = set()
        self.ids: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.addresses.add(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def empty_run(**changes: Any) -> ReplayResult:
    return synthetic_run(
        0, 0, peak_bytes=0, peak_bytes_by_kind={}, flops_computed=0, flops_total=0, **changes
    )


def hostile_run() -> ReplayResult:
    """A run in which every text that comes from outside is markup."""
    base = synthetic_run(len(HOSTILE), 9)
    calls = tuple(
        replace(
            call,
            trajectory=HOSTILE[idx % len(HOSTILE)],
            miss={"at_token": 1, "message": [0, text], "reason": text, "vetoed_by": text}
            | {"kv_len": 2, "state_len": 1, "expected": text, "got": text, "fallback": text},
        )
        for idx, call in enumerate(base.calls)
        for text in [HOSTILE[idx % len(HOSTILE)]]
    )
    return replace(
        base,
        calls=calls,
        model=HOSTILE[0],
        policy=HOSTILE[1],
        stopped_early=HOSTILE[2],
        rejected=tuple(HOSTILE),
        notes=tuple(HOSTILE),
        peak_bytes_by_kind={HOSTILE[1]: 5},
    )


@pytest.fixture(scope="module")
def html() -> str:
    """The page of five trajectories of 30 turns."""
    return render_report(synthetic_run(5, 30))


def test_page_shows_totals_plots_and_tables(html: str) -> None:
    page = Page(html)
    for expected in (
        "Replay on tiny-hybrid",
        "policy session-lru, budget 64.0 MiB, need 80.0 MiB",
        "90.00 %",
        "48.0 MiB",
        "ok: 0 differing ids at 300 positions of 15 calls",
        "run-0002",
        "Tokens per turn",
        "Time to first token",
        "Bytes over time",
        "no_checkpoint",
        "without the cache",
        "5 loaded, 0 partial, 0 skipped, 0 rejected",
    ):
        assert expected in page.text
    assert "svg" in page.tags


def test_misses_are_counted_by_reason_with_at_most_three_examples(html: str) -> None:
    page = Page(html).text
    misses = page[page.index("Misses") :]
    assert misses.index("no_checkpoint") < misses.index("new")  # more tokens computed
    assert misses.count("message 7 (tool)") == 3
    assert misses.count("KV would reach 4,000 tokens, states 1,000") == 3
    assert "run-0000, call 7: at token 1,000" in misses
    assert misses.count('expected "exit code 0\\n"') == 3
    assert misses.count("expected") == 3  # none where nothing was
    assert f"{5 * (1500 + 640 * 7 - 1000) + 37 * 10:,}" in misses


def test_failed_verification_names_the_calls_that_differ() -> None:
    base = synthetic_run(2, 12)
    calls = list(base.calls)
    calls[5] = replace(
        calls[5],
        trajectory="the damaged one",
        verify={**EXACT, "different_ids": 3, "max_state_error": float("nan")},
    )
    html = render_report(replace(base, calls=tuple(calls)))
    shown = Page(html).text
    failures = shown[shown.index("Verification", shown.index("Trajectories")) :]
    assert "FAILED: 3 differing ids" in failures
    assert "the damaged one" in failures[: failures.index("Misses")]
    assert '<div class="value bad">failed</div>' in html


def test_rejected_and_skipped_inputs_are_listed_with_reasons() -> None:
    page = Page(
        render_report(
            synthetic_run(
                1,
                3,
                files=FileCounts(1, 0, 1, 1),
                rejected=("a.json, offset 7: cut off; fetch it again",),
                notes=("b.json: no calls; skipped",),
                stopped_early="interrupted after 3 calls",
            )
        )
    ).text
    assert "a.json, offset 7: cut off; fetch it again" in page
    assert "b.json: no calls; skipped" in page
    assert "interrupted after 3 calls" in page


def test_page_asks_for_nothing_from_outside(html: str) -> None:
    page = Page(html)
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    assert page.tags.isdisjoint({"script", "iframe", "img", "object", "embed", "base", "form"})
    assert all(address.startswith(("#", "data:,")) for address in page.addresses)
    assert "default-src 'none'" in html


def test_ids_of_the_figures_are_unique_and_their_references_resolve(html: str) -> None:
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    local = {address[1:] for address in page.addresses if address.startswith("#")}
    assert local <= set(page.ids)
    assert local


@pytest.mark.filterwarnings("error")
def test_markup_in_the_data_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(hostile_run(), path)
    html = path.read_text("utf-8")
    page = Page(html)
    assert page.tags.isdisjoint({"script", "img", "a", "b"})
    assert not any(name.startswith("on") for name in page.attributes)
    assert all(address.startswith(("#", "data:,")) for address in page.addresses)
    for text in HOSTILE[:4]:
        assert page.text.count(text) >= 3
    assert "国際化" in page.text
    assert "{{ model }} {% if %} url(#x)" in page.text


def test_empty_run_has_a_page_without_plots() -> None:
    page = Page(render_report(empty_run(budget_bytes=None, need_bytes=None)))
    assert "svg" not in page.tags
    assert "No calls were replayed" in page.text
    assert "budget without limit" in page.text
    assert "not run" in page.text


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_one_call_is_enough_for_every_plot(seconds: float) -> None:
    (call,) = synthetic_run(1, 1).calls
    result = synthetic_run(1, 1, calls=(replace(call, ttft_s=seconds, at_s=seconds),))
    assert render_report(result).count("<svg") == 3


def test_calls_without_tokens_or_bytes_can_be_drawn() -> None:
    (call,) = synthetic_run(1, 1).calls
    bare = replace(call, prompt_tokens=0, computed_tokens=0, bytes_by_kind={}, miss=None)
    result = synthetic_run(1, 1, calls=(bare,), peak_bytes=0, peak_bytes_by_kind={})
    assert render_report(result).count("<svg") == 3


def test_two_thousand_calls_are_drawn_as_means_per_turn() -> None:
    page = Page(render_report(synthetic_run(20, 100)))
    assert "mean of 20 trajectories" in page.text
    assert "2,000" in page.text
    assert "run-0019" in page.text


def test_one_trajectory_of_many_turns_is_drawn() -> None:
    assert render_report(synthetic_run(1, 400)).count("<svg") == 3


@pytest.mark.parametrize(("num_trajectories", "num_turns"), [(2, 150), (30, 10), (300, 1)])
def test_three_hundred_calls_take_less_than_a_megabyte_and_a_half(
    tmp_path: Path, num_trajectories: int, num_turns: int
) -> None:
    path = tmp_path / "report.html"
    write_report(synthetic_run(num_trajectories, num_turns), path)
    assert path.stat().st_size < 1_500_000


def test_equal_results_give_equal_pages_whatever_the_readers_plot_settings(html: str) -> None:
    import matplotlib

    with matplotlib.rc_context({"axes.grid": False, "lines.linewidth": 9, "font.size": 20}):
        assert render_report(synthetic_run(5, 30)) == html


def test_a_distant_budget_is_named_instead_of_drawn() -> None:
    near = render_report(synthetic_run(1, 3, budget_bytes=64 << 20))
    far = render_report(synthetic_run(1, 3, budget_bytes=64 << 30))
    assert ">budget</text>" in near
    assert ">budget</text>" not in far
    assert "The budget of 64.0 GiB lies far above the plot." in Page(far).text


def test_a_folder_that_does_not_exist_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the report"):
        write_report(empty_run(), tmp_path / "missing" / "report.html")


def test_importing_the_report_does_not_load_matplotlib() -> None:
    code = "import sys, agentcache.replay.report\nprint('matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
