"""Mamba-1 selective scan: many tokens with states handed out at any position, or one token a row.

Per channel, with state `h` `[N]`, the recurrence over tokens `t` is

    h_t = exp(dt_t * A) * h_{t-1} + dt_t * x_t * B_t
    y_t = C_t . h_t + D * x_t, and y_t * silu(z_t) where there is a gate

These are equations 2a and 2b of Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective
State Spaces" (2023). The decay is that of equation 4; the input's weight is `dt * B`, the first
order of equation 4, which is what models are trained with.

`selective_scan_reference` is that loop. Every channel and state element decays at a rate of its
own, so no product of matrices covers a chunk as in `ssd_scan`. `selective_scan` builds the decays
of a chunk of tokens at once, turns them one after another into the states after their tokens, and
reads all outputs of the chunk off its states in one product. Nothing is divided by a decay, and
no sum of exponents grows with the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "SelectiveScanResult",
    "selective_scan",
    "selective_scan_reference",
    "selective_state_update",
    "selective_state_update_reference",
]

# Exponents are cut here: e**-69 vanishes beside any float32 sum, but its products stay normal
# numbers. One exp that ends in a denormal costs a CPU as much as hundreds of others.
_MIN_LOG = -69.0

# The states of a chunk fill about an L2 cache, but span enough tokens that calls made once per
# chunk do not weigh.
_CHUNK_BYTES = 1024 * 1024
_MIN_CHUNK = 8


@dataclass(frozen=True, slots=True)
class SelectiveScanResult:
    """What a scan returns: `y` `[B, T, E]` in the dtype of x; states `[B, E, N]` in float32.

    `states[i]` is the state after `state_positions[i]` tokens. No tensor shares memory with an
    argument or with another result.
    """

    y: Tensor
    final_state: Tensor
    states: tuple[Tensor, ...]


def selective_state_update_reference(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """The formula in float32; returns y and the new state, and leaves `state` as it is.

    Shapes as in `selective_state_update`.
    """
    channels_per_group = x.shape[1] // B.shape[1]
    B32 = B.float().repeat_interleave(channels_per_group, dim=1)
    C32 = C.float().repeat_interleave(channels_per_group, dim=1)
    x32, step = x.float(), dt.float()
    if dt_bias is not None:
        step = step + dt_bias.float()
    if dt_softplus:
        step = F.softplus(step)
    new_state = torch.exp(step[..., None] * A.float()) * state + (step * x32)[..., None] * B32
    y = (new_state * C32).sum(-1)
    if D is not None:
        y = y + D.float() * x32
    if z is not None:
        y = y * F.silu(z.float())
    return y.to(x.dtype), new_state


def selective_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token in float32; returns y and state. As in `selective_scan`."""
    state = x.new_zeros(x.shape[0], *A.shape, dtype=torch.float32)
    if initial_state is not None:
        state = state + initial_state
    ys = []
    for t in range(x.shape[1]):
        y, state = selective_state_update_reference(
            state,
            x[:, t],
            dt[:, t],
            A,
            B[:, t],
            C[:, t],
            D=D,
            z=None if z is None else z[:, t],
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
        )
        ys.append(y)
    return torch.stack(ys, dim=1), state


@torch.no_grad()
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    chunk_size: int | None = None,
    state_positions: Sequence[int] = (),
) -> SelectiveScanResult:
    """Scan T >= 1 tokens and return outputs, final state and the states at `state_positions`.

    Args:
        x: inputs `[B, T, E]`; strides are free here and below.
        dt: step sizes `[B, T, E]`, positive once `dt_bias` and softplus are applied.
        A: decay rates `[E, N]`, negative.
        B, C: input and output projections `[B, T, G, N]`; G divides E. Mamba-1 has one group;
            heads with projections of their own are groups of neighbouring channels.
        D: skip weights `[E]`, or None for none.
        z: gate `[B, T, E]`, whose SiLU multiplies the outputs, or None for none.
        dt_bias: `[E]`, added to dt, or None for none.
        dt_softplus: whether dt, with its bias, still needs its softplus.
        initial_state: `[B, E, N]`, read only; None means zeros.
        chunk_size: tokens whose decays are built at once; None takes what suits the cache.
        state_positions: counts of absorbed tokens in `0..T`, ascending, at which to return states.

    Computes in float32, without gradients.

    >>> import torch
    >>> x, dt, rates = torch.randn(1, 100, 24), torch.randn(1, 100, 24), -torch.rand(24, 16)
    >>> bc = torch.randn(1, 100, 1, 16)
    >>> result = selective_scan(x, dt, rates, bc, bc, dt_softplus=True, state_positions=[70])
    >>> result.states[0].shape
    torch.Size([1, 24, 16])
    """
    num_tokens = x.shape[1]
    _check_shapes(x, dt, A, B, C, {"D": D, "z": z, "dt_bias": dt_bias}, initial_state)
    _check_run(num_tokens, chunk_size, state_positions)
    dt32 = _steps(dt, dt_bias, dt_softplus)
    inputs = torch.empty(x.shape, device=x.device)
    torch.mul(x, dt32, out=inputs)
    y = torch.empty_like(inputs)
    state = torch.empty(x.shape[0], *A.shape, device=x.device)
    if initial_state is None:
        state.zero_()
    else:
        state.copy_(initial_state)
    states = tuple(torch.empty_like(state) for _ in state_positions)
    rates, B32, C32 = A.float().t().contiguous(), B.float(), C.float()
    # One sequence and one group at a time: products then take two-dimensional views. Passes over
    # many tokens mostly have one sequence, and most models one group.
    num_groups = B.shape[2]
    width = x.shape[2] // num_groups
    for b in range(x.shape[0]):
        for g in range(num_groups):
            channels = slice(g * width, (g + 1) * width)
            part = _Part(
                inputs[b, :, channels],
                dt32[b, :, channels],
                rates[:, channels],
                B32[b, :, g],
                C32[b, :, g],
                y[b, :, channels],
                state[b, channels],
                [(p, s[b, channels]) for p, s in zip(state_positions, states, strict=True)],
            )
            part.run(chunk_size or part.fitting_chunk_size)
    return SelectiveScanResult(_finish(y, x, D, z), state, states)


@torch.no_grad()
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """Absorb one token per row into `state`, in place, and return y `[R, E]` in x's dtype.

    The decode step of `selective_scan`, and the same formula.

    Args:
        state: `[R, E, N]` float32, changed in place. Rows may lie any distance apart; a row
            itself is contiguous.
        x: inputs `[R, E]`.
        dt: step sizes `[R, E]`, positive once `dt_bias` and softplus are applied.
        A: decay rates `[E, N]`, negative.
        B, C: input and output projections `[R, G, N]`; G divides E.
        D, z, dt_bias, dt_softplus: as in `selective_scan`, the gate z `[R, E]`.

    Computes in float32, without gradients.

    >>> import torch
    >>> state, bc = torch.zeros(2, 24, 16), torch.ones(2, 1, 16)
    >>> x, dt, rates = torch.ones(2, 24), torch.ones(2, 24), -torch.ones(24, 16)
    >>> y = selective_state_update(state, x, dt, rates, bc, bc)
    >>> y[0, 0].item(), state[0, 0, 0].item()
    (16.0, 1.0)
    """
    num_rows, num_groups, state_dim = B.shape
    _check_groups(x.shape[1], num_groups)
    x32, C32, step = x.float(), C.float(), _steps(dt, dt_bias, dt_softplus)
    state.mul_((step.unsqueeze(-1) * A.float()).clamp_(_MIN_LOG).exp_())
    by_group = state.view(num_rows, num_groups, -1, state_dim)
    inputs = (x32 * step).view(num_rows, num_groups, -1, 1)
    by_group.addcmul_(inputs, B.float().unsqueeze(2))
    # C on the left: the product then streams over each row's state and does not copy it.
    outputs = [
        torch.bmm(C32[:, g : g + 1], by_group[:, g].transpose(1, 2)) for g in range(num_groups)
    ]
    y = outputs[0] if num_groups == 1 else torch.cat(outputs, dim=1)
    return _finish(y.view(num_rows, -1), x, D, z)


def _steps(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
    """Step sizes in float32, contiguous; possibly dt itself."""
    steps = dt.float()
    if dt_bias is not None:
        steps = steps + dt_bias.float()
    return (F.softplus(steps) if dt_softplus else steps).contiguous()


def _finish(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Skip connection and gate, in place, then the dtype of x."""
    if D is not None:
        y.addcmul_(x.float(), D.float())
    if z is not None:
        y.mul_(F.silu(z.float()))
    return y.to(x.dtype)


def _check_groups(num_channels: int, num_groups: int) -> None:
    if num_channels % num_groups:
        raise ValueError(f"{num_channels} channels do not divide into {num_groups} groups")


def _check_shapes(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    optional: dict[str, Tensor | None],
    initial_state: Tensor | None,
) -> None:
    """Refuse shapes that would broadcast: each must be what those of x, A and B make it."""
    batch, num_tokens, num_channels = x.shape
    num_groups, state_dim = B.shape[2], A.shape[1]
    _check_groups(num_channels, num_groups)
    per_group = (batch, num_tokens, num_groups, state_dim)
    expected = {
        "dt": (dt, x.shape),
        "A": (A, (num_channels, state_dim)),
        "B": (B, per_group),
        "C": (C, per_group),
        "initial_state": (initial_state, (batch, num_channels, state_dim)),
        **{
            name: (tensor, x.shape if name == "z" else (num_channels,))
            for name, tensor in optional.items()
        },
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; inputs of shape {tuple(x.shape)} "
                f"with {state_dim} state elements per channel take {tuple(shape)}"
            )


def _check_run(num_tokens: int, chunk_size: int | None, state_positions: Sequence[int]) -> None:
    if num_tokens < 1:
        raise ValueError("selective_scan got 0 tokens; pass at least 1")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
    previous = 0
    for position in state_positions:
        if not previous <= position <= num_tokens:
            raise ValueError(
                f"state position {position} is out of order or outside 0..{num_tokens}; "
                "pass ascending counts of absorbed tokens"
            )
        previous = position


@dataclass(frozen=True, slots=True)
class _Part:
    """The channels of one group in one sequence: fill `y` and `captures`, step `state`.

    inputs (dt * x), dt, y `[T, W]`, rates `[N, W]`, B, C `[T, N]`, state `[W, N]`; captures pair a
    count of absorbed tokens with its destination `[W, N]`. Within a run the state is `[N, W]`: the
    innermost loops of its passes then have the length of the many channels.
    """

    inputs: Tensor
    dt: Tensor
    rates: Tensor
    B: Tensor
    C: Tensor
    y: Tensor
    state: Tensor
    captures: list[tuple[int, Tensor]]

    @property
    def fitting_chunk_size(self) -> int:
        token_bytes = self.rates.numel() * self.rates.element_size()
        return max(_MIN_CHUNK, _CHUNK_BYTES // token_bytes)

    def run(self, chunk_size: int) -> None:
        num_tokens = self.dt.shape[0]
        chunk = torch.empty(min(chunk_size, num_tokens), *self.rates.shape, device=self.dt.device)
        rows = chunk.unbind()
        state = self.state.t().contiguous()
        self._capture(0, state[None])
        for start in range(0, num_tokens, chunk_size):
            tokens = slice(start, min(start + chunk_size, num_tokens))
            states = chunk[: tokens.stop - start]
            self._build_decays(tokens, states)
            inputs, B = self.inputs[tokens, None].unbind(), self.B[tokens, :, None].unbind()
            before = state
            # Each token's decays turn into the state after it. The last chunk may fill fewer rows.
            for after, update, column in zip(rows, inputs, B, strict=False):
                before = after.mul_(before).addmm_(column, update)
            torch.bmm(self.C[tokens, None], states, out=self.y[tokens, None])
            self._capture(start + 1, states)
            state.copy_(before)
        self.state.copy_(state.t())

    def _build_decays(self, tokens: slice, decays: Tensor) -> None:
        torch.mul(self.dt[tokens, None], self.rates, out=decays)
        decays.clamp_(_MIN_LOG).exp_()

    def _capture(self, first: int, states: Tensor) -> None:
        """Fill the captures at `first` and the positions after it, which `states` stand at."""
        for position, capture in self.captures:
            if first <= position < first + states.shape[0]:
                capture.copy_(states[position - first].t())
