"""Proofs: a model that is right on the native backend comes without its code, and is the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import pytest
import torch
from testkit.models import tokenizer
from transformers import PreTrainedModel

from agentcache.config import CacheConfig
from agentcache.engine import loader, proofs, weights
from agentcache.engine.backends import make_backend
from agentcache.engine.describe import describe
from agentcache.engine.doctor import diagnose_model
from agentcache.engine.families.tiny import build
from agentcache.engine.fingerprint import model_digest
from agentcache.engine.loader import load_model
from agentcache.engine.mapped import MappedModel
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.families import NATIVE
from agentcache.engine.transformers_backend import TransformersBackend
from agentcache.engine.trial import logits_of
from agentcache.engine.weights import free_bytes
from agentcache.errors import ModelError, ModelNotFound, ModelTooLarge
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

DENSE = ["bamba", "falcon_h1", "gemma3", "granitemoehybrid", "lfm2", "llama", "qwen3", "qwen3_5"]
SMALL = CacheConfig(budget="8MiB")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where proofs are kept, empty at first."""
    tokenizer()  # which lies where the other tests have their files
    monkeypatch.setenv("AGENTCACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A llama that nobody has loaded."""
    return save(build("llama", vocab_size=8192), tmp_path / "llama")


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """The model as a runtime loads it."""
    return load_model(folder, dtype, backend="auto").model


def prove(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """The model as it is first loaded, shown to be right."""
    model = load(folder, dtype)
    assert isinstance(model, PreTrainedModel)
    assert isinstance(make_backend(model), NativeBackend)
    return model


def kept(home: Path) -> list[Path]:
    return sorted((home / "proofs").iterdir()) if (home / "proofs").exists() else []


def computed_digest(model: Any) -> str:
    """The digest of a model by its weights, whatever is remembered of it."""
    vars(model).pop("agentcache_digest", None)
    return model_digest(model)


# what comes is the same model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DENSE)
def test_a_model_comes_without_its_code_once_it_is_proven(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    stock = prove(save(build(name, dtype=dtype), tmp_path))
    mapped = load(tmp_path)
    assert isinstance(mapped, MappedModel)
    assert computed_digest(mapped) == computed_digest(stock)
    assert mapped.dtype == stock.dtype
    assert mapped.generation_config.to_dict() == stock.generation_config.to_dict()
    one, two = describe(mapped), describe(stock)
    assert (one.family, one.shape, one.kv) == (two.family, two.shape, two.kv)
    assert (one.state, one.layers, one.doubt) == (two.state, two.layers, two.doubt)
    backends = [make_backend(mapped), make_backend(stock)]
    assert all(isinstance(backend, NativeBackend) for backend in backends)
    assert torch.equal(logits_of(backends[0]), logits_of(backends[1]))


def test_weights_in_several_files_are_mapped(tmp_path: Path) -> None:
    stock = prove(save(build("llama", vocab_size=8192), tmp_path, max_shard_size="1MB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    mapped = load(tmp_path)
    assert isinstance(mapped, MappedModel)
    assert computed_digest(mapped) == computed_digest(stock)


def test_a_model_in_the_hubs_cache_is_mapped_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--llama"
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    first = load_model("some/llama", backend="auto").model
    assert isinstance(make_backend(first), NativeBackend)
    second = load_model("some/llama", backend="auto").model
    assert isinstance(second, MappedModel)
    assert isinstance(load(folder), MappedModel)  # the same files


def test_a_tied_head_is_there_under_both_names_and_once(tmp_path: Path) -> None:
    prove(save(build("granitemoehybrid", tie_word_embeddings=True), tmp_path))
    mapped = load(tmp_path)
    assert isinstance(mapped, MappedModel)
    tensors = mapped.state_dict()
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]
    assert len(list(mapped.parameters())) == len(tensors) - 1


def test_a_dtype_that_is_asked_for_has_a_proof_of_its_own(folder: Path, home: Path) -> None:
    prove(folder)
    stock = prove(folder, torch.bfloat16)
    assert len(kept(home)) == 2
    mapped = load(folder, torch.bfloat16)
    assert isinstance(mapped, MappedModel)
    assert {tensor.dtype for tensor in mapped.state_dict().values()} == {torch.bfloat16}
    assert computed_digest(mapped) == computed_digest(stock)
    assert computed_digest(load(folder)) != computed_digest(mapped)


def test_a_runtime_is_the_same_either_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "available_bytes", lambda: 2**30)
    monkeypatch.setattr(weights, "mapped_bytes", lambda: 2**29)
    seen = []
    for weight_format in ("unchanged", "int8", "int8", "unchanged"):
        model = load(folder)
        seen.append((type(model), free_bytes(model)))
        with (
            Runtime.load(folder, cache=SMALL, weight_format=weight_format) as runtime,
            runtime.session() as session,
        ):
            turn = session.generate(list(range(40, 70)), max_new_tokens=8, verify=True)
            assert turn.verify.ok
            backend = runtime.engine.backend
            assert isinstance(backend, NativeBackend)
            seen[-1] += (tuple(turn.ids), backend.rounding_error, runtime.namespace(None).digest())
    assert [each[0] is MappedModel for each in seen] == [False, True, True, True]
    assert seen[0][1:] == seen[3][1:]
    assert seen[1][1:] == seen[2][1:]


def test_the_error_of_rounding_needs_no_run_of_the_models_own_code(folder: Path) -> None:
    first, second = (
        make_backend(load(folder), weight_format="int8").rounding_error  # type: ignore[union-attr]
        for _ in range(2)
    )
    assert 0 < first == second


def test_no_code_of_models_is_imported_for_a_proven_one() -> None:
    code = """
import sys
from agentcache import CacheConfig, Runtime
with Runtime.load("tiny-agent", cache=CacheConfig(budget="64MiB")) as runtime:
    turn = runtime.session().chat([{"role": "user", "content": "Hi"}], max_new_tokens=8)
    heavy = {"transformers.activations", "transformers.modeling_utils", "sympy", "torch._dynamo"}
    print(sorted(heavy & set(sys.modules)), list(turn.ids), runtime.namespace(None).digest())
"""
    first, second = (
        subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
        ).stdout.partition("]")
        for _ in range(2)
    )
    assert "transformers.modeling_utils" in first[0]
    assert second[0] == "["
    assert first[2] == second[2]


# when there is none


def test_a_proof_holds_for_the_weights_that_it_is_about(folder: Path, home: Path) -> None:
    prove(folder)
    other = save(build("llama", seed=1, vocab_size=8192), folder.with_name("other"))
    prove(other)
    assert len(kept(home)) == 1
    assert isinstance(load(other), MappedModel)
    assert isinstance(load(folder), MappedModel)


def flipped(path: Path) -> None:
    text = path.read_text()
    assert '\\"max_len\\": ' in text
    path.write_text(text.replace('\\"max_len\\": ', '\\"max_len\\": 1'))


def of_another(path: Path) -> None:
    """The proof of the same model as another dtype."""
    own = path.read_bytes()
    prove(path.parents[2] / "llama", torch.bfloat16)
    (other,) = set(path.parent.iterdir()) - {path}
    assert other.read_bytes() != own
    other.replace(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text('{"sha256": null, "proof": null}'),
        lambda path: path.write_text("[" * 100_000),
        flipped,
        of_another,
        a_folder,
    ],
    ids=["cut", "no text", "a list", "nulls", "nested", "a digit", "foreign", "a folder"],
)
def test_a_damaged_proof_is_no_proof(
    folder: Path, home: Path, damage: Callable[[Path], object]
) -> None:
    prove(folder)
    (path,) = kept(home)
    damage(path)
    prove(folder)
    assert path.is_dir() or isinstance(load(folder), MappedModel)


def test_what_other_code_has_shown_is_shown_anew(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(folder)
    monkeypatch.setattr(proofs, "_code", lambda: "other")
    prove(folder)
    assert isinstance(load(folder), MappedModel)
    assert len(kept(home)) == 1


def test_the_digest_of_the_code_is_of_the_native_backend_and_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Path] = []
    plain = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or plain(path))
    proofs._code.__wrapped__()
    names = {"/".join(path.parts[-2:]) for path in read}
    assert {"native/linear.py", "families/llama.py", "kernels/rows.py", "engine/trial.py"} <= names
    assert any(name.startswith("kernels/_rows.") for name in names) == proofs.rows.IS_COMPILED


def test_where_none_can_be_written_the_model_is_loaded_all_the_same(
    folder: Path, home: Path
) -> None:
    home.write_text("no folder")
    prove(folder)
    assert not isinstance(load(folder), MappedModel)
    assert home.read_text() == "no folder"


def test_nothing_is_left_of_a_write_that_failed(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    prove(folder)
    assert kept(home) == []


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners")
def test_a_proof_of_another_user_is_none(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that several write to anyone could say how memory is laid out."""
    prove(folder)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    prove(folder)
    monkeypatch.undo()
    monkeypatch.setenv("AGENTCACHE_HOME", str(home))
    assert isinstance(load(folder), MappedModel)


def test_a_user_without_a_home_folder_loads_models_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AGENTCACHE_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    prove(folder)
    assert not isinstance(load(folder), MappedModel)


def test_they_can_be_turned_off(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(folder)
    monkeypatch.setenv("AGENTCACHE_NO_PROOFS", "1")
    prove(folder)
    shutil.rmtree(home)
    prove(folder)
    assert kept(home) == []
    monkeypatch.setenv("AGENTCACHE_NO_PROOFS", "0")
    prove(folder)
    assert len(kept(home)) == 1


def test_a_model_that_is_computed_wrongly_is_not_proven(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentcache.engine.backends._MOST_ERROR", 0.0)
    assert isinstance(make_backend(load(folder)), TransformersBackend)
    assert kept(home) == []


def with_other_weights(folder: Path) -> None:
    shutil.copy(
        folder / "model.safetensors", folder / "shard-00000-model-00001-of-00001.safetensors"
    )


def with_an_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def packed(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "other"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("change", [with_other_weights, with_an_adapter, packed])
def test_what_is_not_plain_goes_by_transformers(
    folder: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(folder)
    change(folder)
    monkeypatch.setattr(loader, "find_proven", lambda *_: pytest.fail("a proof was sought"))
    monkeypatch.setattr(loader, "_weights", lambda *_: "by transformers")
    assert load(folder) == "by transformers"


@pytest.mark.parametrize("name", ["granitemoehybrid_moe", "nemotron_h"])
def test_weights_with_other_names_in_the_files_go_by_transformers(
    name: str, tmp_path: Path, home: Path
) -> None:
    prove(save(build(name), tmp_path / "model"))
    assert kept(home) == []


def test_a_model_in_doubt_goes_by_transformers(tmp_path: Path, home: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    save(build("llama", rope_parameters=rope), tmp_path / "model")
    for _ in range(2):
        model = load_model(tmp_path / "model", unproven=True, backend="auto").model
        assert isinstance(make_backend(model, unproven=True), TransformersBackend)
    assert kept(home) == []


def test_transformers_and_the_doctor_heed_no_proof(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(folder)
    monkeypatch.setattr(loader, "find_proven", lambda *_: pytest.fail("a proof was sought"))
    with Runtime.load(folder, backend="transformers", cache=SMALL) as runtime:
        assert isinstance(runtime.engine.backend, TransformersBackend)
    assert [each.backend for each in diagnose_model(str(folder))] == ["transformers", "native"]


# what goes wrong


def test_a_description_that_does_not_fit_after_all_goes_by_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Runtime.load(folder, cache=SMALL) as runtime:
        digest = runtime.namespace(None).digest()

    def unfit(*_: object) -> None:
        raise ModelError("it does not fit")

    monkeypatch.setitem(NATIVE, "llama", unfit)
    assert isinstance(load(folder), MappedModel)
    with Runtime.load(folder, cache=SMALL) as runtime:
        assert isinstance(runtime.engine.backend, TransformersBackend)
        assert runtime.namespace(None).digest() == digest
    with pytest.raises(ModelError, match="it does not fit"):
        Runtime.load(folder, cache=SMALL, backend="native")


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-1000]),
        lambda file: file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:]),
        lambda file: file.write_bytes(b""),
        lambda file: file.unlink(),
    ],
    ids=["cut short", "length", "empty", "missing"],
)
def test_damaged_weights_are_the_same_error(folder: Path, damage: Callable[[Path], object]) -> None:
    prove(folder)
    damage(folder / "model.safetensors")
    said = []
    for backend in ("transformers", "auto"):
        with pytest.raises(ModelNotFound, match="cannot be loaded") as raised:
            load_model(folder, backend=backend)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_a_proven_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(folder)
    monkeypatch.setattr(proofs, "map_model", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(loader, "available_bytes", lambda: 2**20)
    with pytest.raises(ModelTooLarge):
        Runtime.load(folder, cache=SMALL)
