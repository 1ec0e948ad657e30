"""Mamba-2 state update by one token for several rows: the decode step of `ssd_scan`.

Per row and head: `S = exp(dt * A) * S + dt * x B^T`, then `y = S C + D * x`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["state_update", "state_update_reference"]


def state_update_reference(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The formula in float32; returns y and the new state, and leaves `state` as it is."""
    heads_per_group = state.shape[1] // B.shape[1]
    B32 = B.float().repeat_interleave(heads_per_group, dim=1)
    C32 = C.float().repeat_interleave(heads_per_group, dim=1)
    decay = torch.exp(dt.float() * A.float())[..., None, None]
    update = (dt.float()[..., None] * x.float())[..., None] * B32[:, :, None, :]
    new_state = decay * state + update
    y = (new_state * C32[:, :, None, :]).sum(-1)
    if D is not None:
        y = y + D.float()[:, None] * x.float()
    return y.to(x.dtype), new_state


@torch.no_grad()
def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
) -> Tensor:
    """Absorb one token per row into `state`, in place, and return y `[R, H, P]` in x's dtype.

    Args:
        state: `[R, H, P, N]` float32, changed in place. Rows may lie any distance apart; a row
            itself is contiguous.
        x: inputs `[R, H, P]`.
        dt: step sizes `[R, H]`, bias, softplus and clamp already applied.
        A: decay rates `[H]`, negative.
        B, C: input and output projections `[R, G, N]`; G divides H.
        D: skip weights `[H]`, or None for none.

    Computes in float32, without gradients. Decode is bound by the number of calls and by passes
    over the state, so there are three passes: decay, add, read.
    """
    num_rows, num_heads, head_dim, state_dim = state.shape
    num_groups = B.shape[1]
    x32, C32, step = x.float(), C.float(), dt.float().unsqueeze(-1)
    state.mul_((step * A.unsqueeze(-1)).exp_().unsqueeze(-1))
    by_group = state.view(num_rows, num_groups, -1, state_dim)
    inputs = (x32 * step).view(num_rows, num_groups, -1, 1)
    by_group.addcmul_(inputs, B.float().unsqueeze(2))
    # C on the left: the product then streams over each row's state and does not copy it.
    outputs = [
        torch.bmm(C32[:, g : g + 1], by_group[:, g].transpose(1, 2)) for g in range(num_groups)
    ]
    y = outputs[0] if num_groups == 1 else torch.cat(outputs, dim=1)
    y = y.view(num_rows, num_heads, head_dim)
    if D is not None:
        y.addcmul_(x32, D.float().unsqueeze(-1))
    return y.to(x.dtype)
