"""Models for which warm = cold is not proven: refused, admitted by a flag, or beyond it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from testkit.command import agentcache
from testkit.models import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from agentcache.config import CacheConfig
from agentcache.engine._probe_memory import Memory
from agentcache.engine.families.tiny import build
from agentcache.engine.transformers_backend import TransformersBackend
from agentcache.engine.trial import try_out
from agentcache.errors import UnsupportedModel
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from pathlib import Path

    from agentcache.engine.backend import Batch

REMEDY = r"not been proven.*unproven=True \(--unproven\) admits it.*granitemoehybrid"
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def random_model(model_type: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(model_type, **SMALL, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def runtime_on(model: Any, **options: Any) -> Runtime:
    settings = CacheConfig(budget="4MiB", page_size=4, prefill_chunk=16)
    return Runtime(model, tokenizer(), cache=settings, poison=True, **options)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "unproven" in r.getMessage()]


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound model of a family that is not in the registry."""
    return save(random_model("qwen2"), tmp_path_factory.mktemp("qwen2"))


@pytest.mark.parametrize("model_type", ["qwen2", "mistral", "gpt_neox"])
def test_unknown_family_works_with_the_flag_and_is_refused_without(
    model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(model_type)
    with pytest.raises(UnsupportedModel, match=f"'{model_type}' is not admitted.*{REMEDY}"):
        runtime_on(model)
    ids = np.random.default_rng(1).integers(20, 8000, 40).tolist()
    with runtime_on(model, unproven=True, verify=True) as runtime:
        (warned,) = said(caplog)
        assert f"a {model_type} model is used unproven" in warned
        assert "No promise" in warned
        first = runtime.session().generate(ids, max_new_tokens=3)
        again = runtime.session().generate([*ids, 5, 6, 7], max_new_tokens=3)
    assert again.usage.cached_tokens >= 40
    for turn in (first, again):
        assert turn.verify is not None
        assert turn.verify.ok
    with pytest.raises(UnsupportedModel):  # also once it has been taken over
        runtime_on(model)


def test_proven_family_is_what_it_is_with_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama", vocab_size=8192)
    assert TransformersBackend(model, unproven=True).shape == TransformersBackend(model).shape
    with runtime_on(build("llama", vocab_size=8192), unproven=True):
        assert said(caplog) == []


def test_sequences_decode_one_by_one() -> None:
    class Counts(TransformersBackend):
        widths: tuple[int, ...] = ()

        def forward(self, batch: Batch) -> list[torch.Tensor]:
            self.widths = (*self.widths, len(batch.spans))
            return super().forward(batch)

    backend = Counts(random_model("qwen2"), unproven=True)
    memory = Memory(backend, np.random.default_rng(0), room=16, num_running=2)
    running = [memory.start(), memory.start()]
    for each in running:
        memory.extend(each, np.arange(30, 34, dtype=np.int32))
    backend.widths = ()
    memory.step(running, [40, 41])
    assert backend.widths == (2, 1, 1)


def test_code_that_computes_something_else_is_told_by_how_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This scan begins at zeros in every pass: nothing raises, and the answers are wrong."""
    model = random_model("mamba", state_size=8)
    with runtime_on(model, unproven=True):
        (warned,) = said(caplog)
    backend = TransformersBackend(model, unproven=True)
    assert backend.sample is not None
    trial = try_out(backend, backend.sample)
    assert trial.greatest > trial.typical > 1e-3
    assert f"off by {trial.greatest:.1e}" in warned
    sound = TransformersBackend(random_model("qwen2"), unproven=True)
    assert sound.sample is not None
    assert try_out(sound, sound.sample).greatest < 1e-5


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("rwkv", {"attention_hidden_size": 64}, "hands nothing to the cache"),
        ("bloom", {}, "stored keys that no attention has read"),
        ("gemma2", {"head_dim": 16}, "soft cap are not supported"),
        ("xlstm", {"num_heads": 4}, "cannot work, with unproven=True neither: AttributeError"),
    ],
)
def test_model_that_cannot_work_is_refused_with_the_flag_too(
    model_type: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as raised:
        runtime_on(random_model(model_type, **changes), unproven=True)
    assert "another model" in str(raised.value) or "take a model" in str(raised.value)


def test_rope_that_depends_on_the_batch_is_a_doubt_and_a_known_wrong_is_none() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("llama", vocab_size=8192, rope_parameters=rope)
    with pytest.raises(UnsupportedModel, match=r"rope of type 'dynamic'.*--unproven"):
        TransformersBackend(model)
    assert TransformersBackend(model, unproven=True).doubt is not None
    both_ways = build("gemma3", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModel, match="see later ones"):
        TransformersBackend(both_ways, unproven=True)


def test_loading_by_name_needs_the_flag(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnsupportedModel, match=REMEDY):
        Runtime.load(folder)
    with Runtime.load(folder, unproven=True, cache=CacheConfig(budget="4MiB")) as runtime:
        assert runtime.session().generate([30, 31, 32], max_new_tokens=2).ids.size == 2
    assert len(said(caplog)) == 1


def test_doctor_says_what_an_unknown_family_would_pass(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    refused = agentcache("doctor", f"--model={folder}", f"--json={out}")
    assert refused.status == 1
    (row,) = json.loads(out.read_text())
    assert not row["ok"]
    assert "--unproven" in row["reason"]
    assert row["unproven"] is None
    probed = agentcache("doctor", f"--model={folder}", "--unproven", f"--json={out}")
    (row,) = json.loads(out.read_text())
    assert row["components"] == ["full"]
    assert max(row["errors"].values()) <= row["tolerance"]
    assert "has not been proven" in row["unproven"]
    assert "admitted with --unproven alone" in probed.stdout.replace("\n", " ")
    assert probed.status == (0 if row["ok"] else 1)


def test_doctor_reports_what_cannot_work_as_a_row(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    folder = save(random_model("rwkv", attention_hidden_size=64), tmp_path / "rwkv")
    done = agentcache("doctor", f"--model={folder}", "--unproven", f"--json={out}")
    assert done.status == 1
    (row,) = json.loads(out.read_text())
    assert "hands nothing to the cache" in row["reason"]


def test_replay_needs_the_flag(folder: Path) -> None:
    arguments = ("replay", f"--model={folder}", "--limit=1", "--max-turns=2", "--budget=200%")
    refused = agentcache(*arguments)
    assert refused.status == 2
    assert "--unproven" in refused.stderr.replace("\n", " ")
    done = agentcache(*arguments, "--unproven", "--verify=1")
    assert done.status == 0, done.stdout + done.stderr
