"""A model or a backend that is not proven, tried on a few tokens before it serves anybody."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentcache.engine._probe_memory import Memory
from agentcache.engine.admission import code_of_others
from agentcache.engine.describe import sample_ids

if TYPE_CHECKING:
    from agentcache.engine.native.backend import NativeBackend
    from agentcache.engine.transformers_backend import TransformersBackend

__all__ = ["Trial", "logits_of", "try_out", "warn_of_doubt"]


@dataclass(frozen=True, slots=True)
class Trial:
    """Errors on a few tokens, in units of the logits' standard deviation: the greatest, and the
    root of their mean square. Infinite where something is no number."""

    greatest: float
    typical: float


def try_out(backend: NativeBackend | TransformersBackend, sample: torch.Tensor) -> Trial:
    """Whether the model computes over our memory at all, and how far off it is.

    In two passes, from a checkpoint taken inside the first, and in a step; against its own code
    without a cache. sample: what that code, or the backend earlier, says of
    `sample_ids`, [T, vocab] float32. Raises UnsupportedModel where a model in doubt fails.
    """
    tokens = sample_ids(backend.shape.vocab_size)
    middle, stop = len(tokens) // 2, len(tokens) - 1
    with code_of_others(backend.model_type, backend.doubt):
        memory = Memory(
            backend, np.random.default_rng(0), room=len(tokens), num_running=2, num_captures=1
        )
        base = memory.start()
        first, (checkpoint,) = memory.extend(base, tokens[:middle], [middle - 3])
        again, _ = memory.extend(memory.resume(checkpoint), tokens[middle - 3 : middle])
        rest, _ = memory.extend(base, tokens[middle:stop])
        step = memory.step([base], [int(tokens[stop])])
    whole = torch.cat([first, rest, step])
    gaps = torch.cat([whole - sample, again - sample[middle - 3 : middle]]) / sample.std()
    if not gaps.isfinite().all():
        return Trial(math.inf, math.inf)
    return Trial(float(gaps.abs().max()), float(gaps.square().mean().sqrt()))


def logits_of(backend: NativeBackend) -> torch.Tensor:
    """What a backend says of `sample_ids` in one pass, [T, vocab] float32."""
    tokens = sample_ids(backend.shape.vocab_size)
    memory = Memory(backend, np.random.default_rng(0), room=len(tokens))
    logits, _ = memory.extend(memory.start(), tokens)
    return logits


def warn_of_doubt(backend: TransformersBackend, trial: Trial) -> None:
    """Log what is given up with a model that is not proven."""
    logging.getLogger("agentcache").warning(
        "a %s model is used unproven: %s. No promise that an answer from the cache is the answer "
        "without one; on %d tokens it was off by %.1e of the logits' deviation. Check it with "
        "`agentcache doctor --model ... --unproven`, or calls with verify=",
        backend.model_type,
        backend.doubt,
        len(sample_ids(backend.shape.vocab_size)),
        trial.greatest,
    )
