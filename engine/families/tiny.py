"""Tiny random models, one per known variant of a family: hidden size 64, vocabulary 256.

What the capability probe and the tests run on. Nothing is downloaded: config and weights follow
from what stands here and a seed.
"""

from __future__ import annotations

import math
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from agentcache.engine.families.tiny_variants import VARIANTS, Variant
from agentcache.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["VARIANTS", "Variant", "build", "long_memory"]


def build(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """The tiny model of a variant, with long memory, stock attention, in evaluation mode.

    changes: settings of its config to replace. The same seed gives the same weights; torch's global
    random state is left as it was. Raises ConfigError for a name not in `VARIANTS`.
    """
    variant = VARIANTS.get(name)
    if variant is None:
        raise ConfigError(f"no family {name!r}; there are {', '.join(VARIANTS)}")
    config = AutoConfig.for_model(variant.model_type, **{**variant.settings, **changes})
    config._attn_implementation = "eager"
    module = import_module(variant.module)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = getattr(module, variant.class_name)._from_config(
            config, dtype=dtype
        )
    long_memory(model, seed=seed)
    model.eval()
    return model


_SHORTEST, _LONGEST = 8.0, 16384.0
"""Tokens after which the quickest and the slowest part of a state has forgotten."""

_STEP = 0.5
"""Step size of a scan that also scales by it what is written."""

_DATA_DECAY = re.compile(r"\.(a_proj|f_proj|f_a_proj|f_b_proj)\.weight$")
"""Projections that make a decay depend on the token."""


@torch.no_grad()
def long_memory(model: nn.Module, *, seed: int = 0) -> None:
    """Give a random model weights that remember: an early token shows in much later logits.

    With default initialisation a state fades within a few tokens and adds next to nothing to the
    residual stream: in most families all recurrent states can be zeroed and the logits move by 1e-6
    of their deviation, so that a test of them proves nothing. Here projections are as strong as
    their inputs, and the decays of each layer spread from 8 to 16K tokens, evenly on a logarithmic
    scale. What a model computes without weights (slopes in buffers) stays as it is.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, weight in model.named_parameters():
        spread = _deviation(name, weight)
        if spread is not None:
            mean = _SINK if name.endswith(_SINKS) else 0.0
            weight.normal_(mean, spread, generator=generator)
    for module in model.modules():
        if getattr(module, "A_log", None) is not None:
            if hasattr(module, "D"):
                _slow_scan(module)
            else:
                _slow_delta_rule(module)
        if hasattr(module, "recurrent_param"):
            _slow_gated_recurrence(module)


_SINKS = ("sinks", "temp")
_SINK = 0.5


def _deviation(name: str, weight: torch.Tensor) -> float | None:
    """Standard deviation a parameter is drawn with; None: it keeps its first values."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf in _SINKS:
        return _SINK
    if weight.dim() < 2 or "norm" in leaf or leaf == "A_log":
        return None
    if _DATA_DECAY.search(name):
        return 0.1 / math.sqrt(weight.shape[-1])  # the token's part of a decay stays small
    if weight.dim() == 3 and "conv" in name:
        return 0.5
    return 1 / math.sqrt(weight.shape[-1])


def _memories(num: int) -> torch.Tensor:
    """So many lengths of memory in tokens, from the shortest to the longest."""
    share = torch.arange(num, dtype=torch.float32) / max(1, num - 1)
    return _SHORTEST * (_LONGEST / _SHORTEST) ** share


def _softplus_inverse(values: torch.Tensor) -> torch.Tensor:
    return torch.log(torch.expm1(values))


def _slow_scan(module: Any) -> None:
    """Mamba-1 and -2: a token's decay is exp(-step * A), and step also scales what it writes.

    So the step is the same everywhere and A spreads: over heads, or over channels where the last
    dimension of `A_log` is the state's.
    """
    a_log = module.A_log
    spread_over = a_log.shape[: max(1, a_log.dim() - 1)]
    rate = 1 / (_STEP * _memories(math.prod(spread_over)))
    rate = rate.reshape(*spread_over, *[1] * (a_log.dim() - len(spread_over)))
    a_log.copy_(rate.log().expand_as(a_log))
    step = _softplus_inverse(torch.tensor(_STEP)).item()
    for bias in (
        getattr(module, "dt_bias", None),
        getattr(module, "dt_proj_bias", None),
        getattr(getattr(module, "dt_proj", None), "bias", None),
    ):
        if bias is not None:
            bias.fill_(step)


def _slow_delta_rule(module: Any) -> None:
    """Delta rules: a token's decay is exp(-A * softplus(x + dt_bias)), apart from what it writes.

    So A is one and the bias spreads. With a lower bound the decay is exp(bound * sigmoid(.)), which
    for slow decays is the same but for that factor.
    """
    module.A_log.zero_()
    bias = _softplus_inverse(1 / _memories(module.dt_bias.numel()))
    bound = getattr(module, "lower_bound", None) or getattr(module, "safe_gate_lower_bound", None)
    if bound:
        bias -= math.log(abs(bound))
    module.dt_bias.copy_(bias.view_as(module.dt_bias))


_GATE = 4.0
"""RG-LRU scales its decays by eight, and its gates are about a half."""


def _slow_gated_recurrence(module: Any) -> None:
    """RG-LRU: a token's decay is exp(-8 * gate * softplus(parameter))."""
    memories = _memories(module.recurrent_param.numel())
    module.recurrent_param.copy_(_softplus_inverse(1 / (_GATE * memories)))
