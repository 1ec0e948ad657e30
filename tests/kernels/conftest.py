"""Fresh memory is NaN in every test of this room, so that an element nobody wrote shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

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
