"""What tests of the kernels for a few rows use: when they run, and tensors drawn from a seed."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from agentcache.kernels import rows

if TYPE_CHECKING:
    from agentcache.kernels.row_attention import KeyRuns

needs_compiled = pytest.mark.skipif(
    not rows.IS_COMPILED, reason="the compiled forms are not installed"
)
DTYPES = [torch.float32, torch.bfloat16]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def runs_of(runs: KeyRuns) -> list[list[tuple[int, int]]]:
    """Start and length of all runs of each row."""
    pairs = [(start, num) for start, num in runs.pairs.tolist()]
    return [pairs[first:end] for first, end in pairwise(runs.firsts.tolist())]
