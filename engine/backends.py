"""Which backend computes a model: the native one where it is there and shown to be right."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args

import torch

from agentcache.engine.describe import describe, text_config
from agentcache.engine.mapped import MappedModel
from agentcache.engine.native.backend import NativeBackend, has_native
from agentcache.engine.proofs import keep_proof
from agentcache.engine.trial import logits_of, try_out, warn_of_doubt
from agentcache.errors import ModelError, UnsupportedModel, UnsupportedOption
from agentcache.types import BackendName, WeightFormat

if TYPE_CHECKING:
    from agentcache.engine.transformers_backend import TransformersBackend

__all__ = ["check_backend_name", "check_weight_format", "make_backend"]

_MOST_ERROR = 1e-3
_MOST_ERROR_OF_HALVES = 0.25
"""On a few tokens, in units of the logits' deviation; a wrong description is off by about one. In
half precision single tokens may go through other experts, so there it is the root mean square."""


def check_backend_name(name: str) -> None:
    """Raise UnsupportedOption for a backend there is not."""
    if name not in get_args(BackendName):
        raise UnsupportedOption(
            f"backend is {name!r}; take one of {', '.join(get_args(BackendName))}"
        )


def check_weight_format(weight_format: str) -> None:
    """Raise UnsupportedOption for a form of weights there is not."""
    if weight_format not in get_args(WeightFormat):
        raise UnsupportedOption(
            f"weight_format is {weight_format!r}; take one of {', '.join(get_args(WeightFormat))}"
        )


def make_backend(
    model: Any,
    name: BackendName = "auto",
    *,
    unproven: bool = False,
    weight_format: WeightFormat = "unchanged",
    cuda_graphs: bool = False,
) -> NativeBackend | TransformersBackend:
    """A backend that takes a model over, of transformers or mapped from its files.

    name: "auto" takes the native backend for families it describes, and then only if it computes
    what the model's own code computes of a few tokens; everything else goes by transformers.
    unproven: as for `TransformersBackend`; such a model never goes by the native backend, and what
    is given up with it is logged. weight_format: "int8" rounds the weights of the native backend,
    once it is shown to be right with those it was loaded with, and logs by how much that moves
    logits. cuda_graphs: as for `NativeBackend`. Raises UnsupportedOption for another name, or int8
    or graphs without the native backend; UnsupportedModel and ModelError as the backends do.
    """
    check_backend_name(name)
    check_weight_format(weight_format)
    backend = _choose(model, name, unproven, cuda_graphs)
    if cuda_graphs and not isinstance(backend, NativeBackend):
        raise UnsupportedOption(
            f"cuda_graphs needs the native backend, and this {backend.model_type} model goes by "
            "transformers"
        )
    if weight_format == "int8":
        _round(backend)
    if isinstance(backend, NativeBackend):
        backend.move_weights()
    return backend


def _choose(
    model: Any, name: BackendName, unproven: bool, cuda_graphs: bool
) -> NativeBackend | TransformersBackend:
    model_type = text_config(model.config).model_type
    if isinstance(model, MappedModel):
        if name != "transformers":
            with suppress(ModelError):
                # which a proof says is right
                return NativeBackend(model, cuda_graphs=cuda_graphs)
        model = model.stock()
    if name == "transformers" or (name == "auto" and not has_native(model_type)):
        return _transformers(model, unproven)
    try:
        return _native(model, cuda_graphs)
    except ModelError as error:
        if name == "native":
            raise
        if not isinstance(error, UnsupportedModel):
            logging.getLogger("agentcache").warning(
                "this %s model goes by transformers, more slowly, since the native backend does "
                "not fit it: %s",
                model_type,
                error,
            )
        return _transformers(model, unproven)


def _round(backend: NativeBackend | TransformersBackend) -> None:
    """Round weights to int8, and say what that costs."""
    if not isinstance(backend, NativeBackend):
        raise UnsupportedOption(
            f"weight_format='int8' needs the native backend, and this {backend.model_type} model "
            "goes by transformers"
        )
    before = logits_of(backend)
    num = backend.round_weights()
    trial = try_out(backend, before)
    backend.rounding_error = trial.typical
    logging.getLogger("agentcache").info(
        "%d weights are kept in 8 bits; on %d tokens that moves logits by %.1e of their deviation "
        "(root mean square), at most %.1e",
        num,
        len(before),
        trial.typical,
        trial.greatest,
    )


def _native(model: Any, cuda_graphs: bool) -> NativeBackend:
    """The native backend, tried out. Raises UnsupportedModel, and ModelError if it is wrong."""
    backend = NativeBackend(model, cuda_graphs=cuda_graphs)
    description = describe(model)
    sample = description.sample
    assert sample is not None, "families with a native backend are described by a run of theirs"
    trial = try_out(backend, sample)
    is_half = backend.dtype.itemsize < torch.float32.itemsize
    error = trial.typical if is_half else trial.greatest
    if error > (_MOST_ERROR_OF_HALVES if is_half else _MOST_ERROR):
        raise ModelError(
            f"on {len(sample)} tokens it is off by {error:.1e} of the logits' deviation; take "
            "backend='transformers', and please report the model"
        )
    keep_proof(model, description, error)
    return backend


def _transformers(model: Any, unproven: bool) -> TransformersBackend:
    from agentcache.engine.transformers_backend import TransformersBackend  # and modeling code

    backend = TransformersBackend(model, unproven=unproven)
    if backend.sample is not None:
        warn_of_doubt(backend, try_out(backend, backend.sample))
    return backend
