"""Fresh memory is NaN in every test of this room, so that an element nobody wrote shows.

Each begins with one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from agentcache.kernels import (
    conv_step,
    delta_step,
    mamba1_step,
    mamba2_step,
    row_attention,
    row_experts,
    row_gates,
    row_latent,
    rows,
)

CheckClose = Callable[..., None]


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Each test begins with one thread and may take more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["compiled", "fallback"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either the compiled forms for a few rows, with the formulas out of reach, or the formulas."""
    name: str = request.param
    if name == "fallback":
        monkeypatch.setattr(rows, "IS_COMPILED", False)
        return name
    if not rows.IS_COMPILED:
        pytest.skip("the compiled forms are not installed")
    for module, *ops in (
        (rows, "linear", "rms_norm"),
        (row_gates, "opened", "soft_cap", "gate"),
        (row_attention, "attend"),
        (row_experts, "route", "mix", "blend"),
        (row_latent, "attend"),
        (conv_step, "conv_step"),
        (delta_step, "delta_step"),
        (mamba1_step, "mamba1_step"),
        (mamba2_step, "mamba2_step"),
    ):
        for op in ops:
            monkeypatch.setattr(module, f"{op}_reference", None)
    return name


@pytest.fixture
def check_close() -> CheckClose:
    """Fail where shapes or dtypes differ or the relative L2 error exceeds the dtype's tolerance."""
    tolerances = {torch.float64: 1e-6, torch.float32: 2e-6, torch.bfloat16: 8e-3}

    def check(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        assert bool(actual.isfinite().all())
        scale = float(expected.double().norm())
        error = float((actual.double() - expected.double()).norm())
        limit = tolerances[actual.dtype] if tolerance is None else tolerance
        assert error <= limit * scale, f"relative error {error / scale:.1e} above {limit:.0e}"

    return check
