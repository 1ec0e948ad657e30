from __future__ import annotations

from typing import Any

import pytest
import torch

from agentcache.kernels.rg_lru import rg_lru, rg_lru_reference

WIDTH = 24


def make_inputs(batch: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(batch, num_tokens, WIDTH, generator=rng)
    return x, torch.rand(batch, num_tokens, WIDTH, generator=rng) ** 0.05


def make_state(batch: int) -> torch.Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 500])
@pytest.mark.parametrize("batch", [1, 3])
def test_matches_the_formula(
    batch: int, num_tokens: int, with_state: bool, check_close: Any
) -> None:
    x, decay = make_inputs(batch, num_tokens)
    state = make_state(batch) if with_state else None
    check_close(rg_lru(x, decay, state), rg_lru_reference(x, decay, state))


def test_a_run_goes_on_from_any_of_its_states(check_close: Any) -> None:
    x, decay = make_inputs(1, 90)
    whole = rg_lru(x, decay, None)
    for cut in (1, 40, 89):
        rest = rg_lru(x[:, cut:], decay[:, cut:], whole[:, cut - 1])
        check_close(rest, whole[:, cut:])


def test_a_decay_of_zero_forgets_everything(check_close: Any) -> None:
    x, decay = make_inputs(1, 20)
    decay[:, 5] = 0
    states = rg_lru(x, decay, make_state(1))
    assert torch.equal(states[:, 5], x[:, 5])
    check_close(states[:, 5:], rg_lru(x[:, 5:], decay[:, 5:], None))


def test_arguments_stay_as_they_are() -> None:
    x, decay = make_inputs(2, 9)
    state = make_state(2)
    before = [tensor.clone() for tensor in (x, decay, state)]
    states = rg_lru(x, decay, state)
    states.fill_(7.0)
    for tensor, old in zip((x, decay, state), before, strict=True):
        assert torch.equal(tensor, old)


def test_bfloat16_inputs_keep_the_state_in_float32(check_close: Any) -> None:
    x, decay = (tensor.bfloat16() for tensor in make_inputs(1, 60))
    states = rg_lru(x, decay, make_state(1))
    assert states.dtype == torch.float32
    check_close(states, rg_lru_reference(x.float(), decay.float(), make_state(1)))


def test_inputs_may_require_gradients() -> None:
    x, decay = make_inputs(1, 4)
    assert not rg_lru(x.requires_grad_(), decay, None).requires_grad
