"""Which backend a model gets: the native one where it is there and right, and never a wrong one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agentcache.engine.backends import make_backend
from agentcache.engine.families.tiny import build
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.families import NATIVE
from agentcache.engine.transformers_backend import TransformersBackend
from agentcache.errors import ModelError, UnsupportedModel, UnsupportedOption

if TYPE_CHECKING:
    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights


@pytest.fixture
def wrong_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """A description that uses every weight and computes something else."""
    right = NATIVE["llama"]

    def wrong(config: Any, weights: Weights) -> NativeModel:
        model = right(config, weights)
        return replace(model, logits_scale=1.002)

    monkeypatch.setitem(NATIVE, "llama", wrong)


def test_auto_takes_the_native_one_where_it_is_there() -> None:
    assert isinstance(make_backend(build("llama")), NativeBackend)
    assert isinstance(make_backend(build("llama"), "native"), NativeBackend)
    assert isinstance(make_backend(build("llama"), "transformers"), TransformersBackend)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", "granitemoehybrid_moe"])
def test_rounding_of_bfloat16_is_no_reason_against_it(name: str) -> None:
    assert isinstance(make_backend(build(name, dtype=torch.bfloat16)), NativeBackend)


def test_families_without_a_description_go_by_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert isinstance(make_backend(build("mamba2")), TransformersBackend)
    assert not caplog.records
    with pytest.raises(UnsupportedModel, match=r"no native backend for 'mamba2'.*transformers"):
        make_backend(build("mamba2"), "native")


def test_a_model_that_it_computes_wrongly_goes_by_transformers_and_that_is_said(
    wrong_llama: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(make_backend(build("llama")), TransformersBackend)
    (record,) = caplog.records
    assert "more slowly" in record.getMessage()
    assert "off by" in record.getMessage()
    with pytest.raises(ModelError, match=r"off by .* take backend='transformers'"):
        make_backend(build("llama"), "native")


def test_a_weight_that_no_layer_takes_is_a_reason_against_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build("llama")
    model.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
    assert isinstance(make_backend(model), TransformersBackend)
    assert "'extra'" in caplog.records[0].getMessage()


def test_a_model_in_doubt_never_goes_by_it() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    backend = make_backend(build("llama", rope_parameters=rope), unproven=True)
    assert isinstance(backend, TransformersBackend)
    assert backend.doubt is not None


def test_other_names_are_refused() -> None:
    with pytest.raises(UnsupportedOption, match="'fast'; take one of auto, native, transformers"):
        make_backend(build("llama"), "fast")  # type: ignore[arg-type]
