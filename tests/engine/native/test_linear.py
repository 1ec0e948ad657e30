"""Linear maps of many rows give the same whichever way is fastest on a machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentcache.engine.native.linear import Linear
from agentcache.kernels import rows


@pytest.mark.parametrize("num_rows", [rows.MOST_ROWS, rows.MOST_ROWS + 1, 200])
@pytest.mark.parametrize("is_rounded", [False, True], ids=["as given", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["pytorch", "compiled", "widened"])
def test_every_way_takes_bias_and_scale(
    way: rows.Way,
    dtype: torch.dtype,
    is_rounded: bool,
    num_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "way_of_many", lambda _: way)
    draw = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=draw).to(dtype) for shape in [(24, 40), (24,)])
    scale = torch.rand(24, generator=draw) + 0.5
    linear = Linear(weight, bias, scale=scale)
    if is_rounded:
        linear.round_to_int8()
    x = torch.randn((num_rows, 40), generator=draw).to(dtype)
    y = linear(x)
    assert y.dtype == dtype
    most = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(y.double(), formula(linear, x), rtol=most, atol=most)


def formula(linear: Linear, x: Tensor) -> Tensor:
    weight = linear.weight.double()
    if linear.weight_scale is not None:
        weight = weight * linear.weight_scale.double()[:, None]
    assert linear.bias is not None
    assert linear.scale is not None
    return (x.double() @ weight.T + linear.bias.double()) * linear.scale.double()
