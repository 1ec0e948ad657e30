"""Each native description gives what the stock modeling code gives, over the same cached data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from agentcache.engine.doctor import stock_reference
from agentcache.engine.families.tiny import VARIANTS, build
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.families import NATIVE
from agentcache.engine.probe import probe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentcache.engine.probe import Report

COVERED = [name for name, each in VARIANTS.items() if each.text_model_type in NATIVE]


def probed(model: PreTrainedModel) -> Report:
    reference = stock_reference(model)
    return probe(NativeBackend(model), reference, seed=0)


@pytest.mark.parametrize("name", COVERED)
def test_native_model_passes_the_probe(name: str) -> None:
    report = probed(build(name))
    assert report.ok, report.reason
    assert None not in report.errors.values()


def test_every_native_family_has_a_tiny_model_to_be_probed_on() -> None:
    assert set(NATIVE) == {VARIANTS[name].text_model_type for name in COVERED}


def test_bias_of_experts_changes_which_are_chosen_and_not_how_they_weigh() -> None:
    """The tiny model's is zero, as a fresh one's, and would not be missed."""
    model = build("lfm2_moe")
    generator = torch.Generator().manual_seed(0)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_(generator=generator)
    report = probed(model)
    assert report.ok, report.reason


def test_short_convolution_and_its_projections_may_have_biases() -> None:
    model = build("lfm2", conv_bias=True)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith(".bias"):
            weight.data.normal_(generator=generator)
    report = probed(model)
    assert report.ok, report.reason


def test_cap_in_a_gemma3_config_is_left_out_as_stock_attention_leaves_it_out() -> None:
    """Stock modules keep `attn_logit_softcapping` and never apply it."""
    report = probed(build("gemma3", attn_logit_softcapping=0.5))
    assert report.ok, report.reason
