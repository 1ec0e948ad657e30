"""The recurrence of an RG-LRU, the recurrent layer of Griffin: a decay per channel and token.

Per channel `h_t = a_t * h_{t-1} + x_t`, where the gates that make decay and input of a token are
the caller's: equation 4 of De et al., "Griffin: Mixing Gated Linear Recurrences with Local
Attention" (2024). The state is the output, so the states at all positions are there anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rg_lru", "rg_lru_reference"]


def rg_lru_reference(x: Tensor, decay: Tensor, initial_state: Tensor | None) -> Tensor:
    """The formula, token by token in float32. Shapes as in `rg_lru`."""
    state = x.new_zeros(x[:, 0].shape, dtype=torch.float32)
    if initial_state is not None:
        state = state + initial_state
    states = []
    for t in range(x.shape[1]):
        state = decay[:, t].float() * state + x[:, t].float()
        states.append(state)
    return torch.stack(states, dim=1)


@torch.no_grad()
def rg_lru(x: Tensor, decay: Tensor, initial_state: Tensor | None) -> Tensor:
    """Scan T >= 1 tokens and return the states after each of them, `[B, T, W]` float32.

    Args:
        x: gated inputs `[B, T, W]`.
        decay: `[B, T, W]`, between 0 and 1; 0 forgets what came before.
        initial_state: `[B, W]`, read only; None means zeros.

    Computes in float32, without gradients.

    >>> import torch
    >>> rg_lru(torch.ones(1, 3, 1), torch.full((1, 3, 1), 0.5), torch.full((1, 1), 4.0)).flatten()
    tensor([3.0000, 2.5000, 2.2500])
    """
    inputs, decays = x.float().unbind(1), decay.float().unbind(1)
    states = torch.empty(x.shape, device=x.device)
    state = torch.zeros_like(states[:, 0]) if initial_state is None else initial_state
    for after, a, value in zip(states.unbind(1), decays, inputs, strict=True):
        state = torch.addcmul(value, a, state, out=after)
    return states
