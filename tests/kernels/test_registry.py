"""Every kernel has its tests and its benchmark, and no speed is reported for a wrong one."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench" / "kernels"
ON_A_GPU = {"cuda_graph"}  # tests/engine/native/test_on_a_gpu.py
OPS = sorted(
    path.stem
    for path in (ROOT / "kernels").glob("*.py")
    if not path.stem.startswith("_") and path.stem not in ON_A_GPU
)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark script, loaded as a module; its folders leave the import path afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("kernel_bench", BENCH / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    before = set(sys.modules)
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)
    for name in set(sys.modules) - before:
        if name == "registry" or name.startswith("benchkit"):
            del sys.modules[name]


def test_there_are_kernels() -> None:
    assert "ssd_scan" in OPS


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_has_a_test_file(op: str) -> None:
    assert (Path(__file__).parent / f"test_{op}.py").is_file()


def test_every_kernel_has_a_benchmark(runner: ModuleType) -> None:
    assert sorted(runner.REGISTRY) == OPS


@pytest.mark.parametrize("op", OPS)
def test_first_case_of_every_benchmark_agrees_and_is_timed(op: str, runner: ModuleType) -> None:
    with torch.no_grad():
        rows = runner.measure(op, next(runner.REGISTRY[op]()), seconds=0.0)
    assert [row["form"] for row in rows][:2] == ["ours", "reference"]
    assert len(rows) > 2
    for row in rows:
        assert row["error"] <= runner.TOLERANCE
        assert row["us"] > 0
        assert row["tokens_per_s"] > 0


def test_a_wrong_kernel_gets_no_speed(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = next(runner.REGISTRY["paged_attention"]())
    right = case.ours

    def slightly_off() -> tuple[torch.Tensor, ...]:
        return tuple(1.001 * output for output in right.outputs())

    wrong = replace(case, ours=replace(right, outputs=slightly_off))
    monkeypatch.setitem(runner.REGISTRY, "paged_attention", lambda: iter([wrong]))
    out = tmp_path / "result.json"
    assert runner.main(["--op", "paged_attention", "--seconds", "0", "--json", str(out)]) == 1
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["ratios"] == {}
    assert all(row["us"] is None and row["tokens_per_s"] is None for row in result["rows"])
    assert set(result) >= {"name", "commit", "machine", "rows", "ratios"}


def test_a_wrong_baseline_is_not_compared_with(runner: ModuleType) -> None:
    case = next(runner.REGISTRY["paged_attention"]())
    broken = replace(case.ours, outputs=lambda: (torch.full((1,), math.nan),))
    rows = runner.measure("paged_attention", replace(case, others={"broken": broken}), seconds=0.0)
    assert rows[0]["us"] > 0
    assert math.isnan(rows[-1]["us"])
    assert math.isnan(rows[-1]["over_ours"])
