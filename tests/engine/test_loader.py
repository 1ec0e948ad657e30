"""Loading: where models are found, whether they fit, GGUF files, adapters, and no network."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import pytest
import torch
from testkit.command import agentcache
from testkit.models import tokenizer

from agentcache.config import CacheConfig
from agentcache.engine import loader, source, weights
from agentcache.engine.families.tiny import VARIANTS, build
from agentcache.engine.loader import load_model
from agentcache.engine.source import find_source
from agentcache.engine.tiny_hybrid import hybrid_path
from agentcache.engine.weights import free_bytes, weight_bytes
from agentcache.errors import (
    ModelError,
    ModelNotFound,
    ModelTooLarge,
    UnsupportedModel,
    UnsupportedOption,
)
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

VOCAB = 8192
MIB = 2**20


def llama(**changes: Any) -> PreTrainedModel:
    return build("llama", vocab_size=VOCAB, **changes)


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with weights in three files."""
    return save(llama(), tmp_path_factory.mktemp("llama"), max_shard_size="1MB")


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hosts that were asked for; the Hub is switched on, and nobody answers."""
    hosts: list[str] = []

    def resolve(host: Any, *rest: Any, **options: Any) -> Any:
        hosts.append(str(host))
        raise socket.gaierror("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # before asking again
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return hosts


def no_weights_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(loader, "_weights", fail)


# what it takes


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float64])
def test_estimate_is_what_the_loaded_weights_take(folder: Path, dtype: torch.dtype | None) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = load_model(folder, dtype).model
    estimate = weight_bytes(find_source(folder), model.config, dtype)
    assert estimate == sum(weight.nbytes for weight in model.parameters())


def test_estimate_follows_the_dtype_the_config_names(tmp_path: Path) -> None:
    save(llama().to(torch.bfloat16), tmp_path)
    loaded = load_model(tmp_path).model
    assert loaded.dtype == torch.bfloat16
    assert weight_bytes(find_source(tmp_path), loaded.config, None) == 2 * loaded.num_parameters()


def test_estimate_without_headers_builds_the_model_without_memory(tmp_path: Path) -> None:
    model = llama()
    save(model, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    expected = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    found = find_source(tmp_path)
    assert weight_bytes(found, model.config, None) == expected
    assert weight_bytes(found, model.config, torch.bfloat16) < 0.6 * expected


def test_weights_packed_on_disk_but_not_in_memory_count_unpacked(folder: Path) -> None:
    config = llama().config
    config.quantization_config = {"quant_method": "mxfp4"}
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    config.dtype = torch.bfloat16
    assert weight_bytes(find_source(folder), config, None) < 0.6 * stored
    config.quantization_config = {"quant_method": "other"}
    assert weight_bytes(find_source(folder), config, None) == pytest.approx(stored, rel=0.01)


def test_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = weight_bytes(find_source(folder), llama().config, None)
    no_weights_read(monkeypatch)
    monkeypatch.setattr(loader, "available_bytes", lambda: size + MIB - 1)
    with pytest.raises(ModelTooLarge, match=rf"{size}.*{MIB}.*{size + MIB - 1}.*budget") as raised:
        Runtime.load(folder, cache=CacheConfig(budget=MIB))
    error = raised.value
    assert (error.weight_bytes, error.cache_bytes, error.available_bytes) == (
        size,
        MIB,
        size + MIB - 1,
    )


def test_model_that_just_fits_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = weight_bytes(find_source(folder), llama().config, None)
    monkeypatch.setattr(loader, "available_bytes", lambda: size + 4 * MIB)
    with Runtime.load(folder, cache=CacheConfig(budget=4 * MIB)) as runtime:
        assert runtime.stats()["budget"] == 4 * MIB


def test_weights_that_the_model_does_not_take_are_no_reason_to_refuse(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    size = weight_bytes(find_source(folder), llama().config, None)
    monkeypatch.setattr(weights, "_shard_bytes", lambda *_: 1000 * size)
    monkeypatch.setattr(loader, "available_bytes", lambda: size + MIB)
    assert load_model(folder).model.num_parameters() * 4 == size


def test_no_budget_takes_half_of_what_the_weights_leave(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder).model
    size = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr(weights, "available_bytes", lambda: 100 * MIB)
    # weights mapped from their file count as available, other mapped files do not matter
    monkeypatch.setattr(weights, "mapped_bytes", lambda: 50 * MIB)
    assert free_bytes(model) == 100 * MIB - size
    monkeypatch.setattr(weights, "mapped_bytes", lambda: MIB)
    assert free_bytes(model) == 99 * MIB
    with Runtime(model, tokenizer(), cache=CacheConfig(budget=None)) as runtime:
        assert runtime.stats()["budget"] == 99 * MIB // 2
        assert runtime.stats()["bytes"]["total"]["reserved"] <= 99 * MIB // 2


def test_budget_beside_a_model_on_a_device_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice:
        device = torch.device("cuda", 1)

    asked = []
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: asked.append(device) or (7 * MIB, 9 * MIB)
    )
    assert free_bytes(OnDevice()) == 7 * MIB
    assert asked == [OnDevice.device]


# where it is


def test_a_local_folder_never_reaches_for_the_network(folder: Path, reached: list[str]) -> None:
    with Runtime.load(str(folder), cache=CacheConfig(budget="4MiB")):
        pass
    assert load_model("tiny-hybrid").model is not None
    assert reached == []


@pytest.fixture
def hub_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache that holds `some/llama`; the folder of its files."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    revision = "0" * 40
    repository = tmp_path / "models--some--llama"
    shutil.copytree(folder, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return repository / "snapshots" / revision


def test_a_downloaded_hub_id_never_reaches_for_the_network(
    hub_cache: Path, reached: list[str]
) -> None:
    found = find_source("some/llama")
    assert found.folder == hub_cache
    model = load_model("some/llama").model
    assert weight_bytes(found, model.config, None) == model.num_parameters() * 4
    assert reached == []


def test_a_hub_id_that_is_not_here_is_asked_for(hub_cache: Path, reached: list[str]) -> None:
    with pytest.raises(ModelNotFound, match=r"other/llama.*connection"):
        load_model("other/llama")
    assert reached != []


def test_offline_a_hub_id_that_is_not_here_is_an_error_that_says_what_to_do(
    hub_cache: Path, reached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load_model("some/llama").model is not None
    with pytest.raises(ModelNotFound, match=r"other/llama.*HF_HUB_OFFLINE is set.*unset it"):
        load_model("other/llama")
    for file in hub_cache.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelNotFound, match=r"some/llama.*HF_HUB_OFFLINE is set.*unset it"):
        load_model("some/llama")
    assert reached == []


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./here", "~/there", "a/b/c", "two words", "", Path("some/llama")]
)
def test_what_can_only_be_a_path_is_not_asked_for(name: str | Path, reached: list[str]) -> None:
    with pytest.raises(ModelNotFound, match=r"no such folder.*tiny-hybrid.*config.json"):
        load_model(name)
    assert reached == []


def test_a_folder_without_weights_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ModelNotFound, match=rf"{tmp_path.name}.*cannot be loaded"):
        load_model(tmp_path)
    with pytest.raises(ModelNotFound, match=r"config.json.* is a file, but no .gguf"):
        load_model(tmp_path / "config.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"no" + data[10:],
        lambda data: b"",
    ],
    ids=["cut short", "length", "header", "empty"],
)
def test_damaged_weights_are_an_error_of_ours(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    file = save(llama(), tmp_path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelNotFound, match=rf"{tmp_path.name}.*cannot be loaded.*again"):
        load_model(tmp_path)


def test_a_family_that_is_not_admitted_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    no_weights_read(monkeypatch)
    with pytest.raises(UnsupportedModel, match="gpt2"):
        load_model(tmp_path)


def test_a_family_without_a_causal_lm_is_loaded_by_the_class_that_also_sees(tmp_path: Path) -> None:
    settings = {**VARIANTS["glm5_next"].settings["text_config"], "vocab_size": VOCAB}
    model = build("glm5_next", text_config=settings)
    save(model, tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded.model) is type(model)
    loaded.model.set_attn_implementation("eager")
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(loaded.model.eval()(ids).logits, model(ids).logits)
    with (
        Runtime.load(tmp_path, cache=CacheConfig(budget="8MiB")) as runtime,
        runtime.session() as session,
    ):
        turn = session.generate(list(range(40, 70)), max_new_tokens=4, verify=True)
        assert turn.verify.ok


# GGUF


def gguf_file(model: PreTrainedModel, path: Path) -> Path:
    """The llama as a GGUF file, with the embedded tokenizer and its template."""
    gguf = pytest.importorskip("gguf", reason="needs agentcache[gguf]")
    pytest.importorskip("accelerate", reason="needs agentcache[gguf]")
    config, tokens = model.config, tokenizer()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    out = gguf.GGUFWriter(path, "llama")
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_vocab_size(config.vocab_size)
    bpe = json.loads(tokens.backend_tokenizer.to_str())["model"]
    special = set(tokens.all_special_ids)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("llama-bpe")
    out.add_token_list(tokens.convert_ids_to_tokens(range(len(tokens))))
    out.add_token_types([3 if idx in special else 1 for idx in range(len(tokens))])
    out.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    out.add_eos_token_id(tokens.eos_token_id)
    out.add_chat_template(tokens.chat_template)
    tensor_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        # the format keeps the halves that rope rotates side by side
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                halves = weight.view(count, 2, -1, weight.shape[-1])
                weight = halves.transpose(1, 2).reshape(weight.shape)
        file_name = tensor_names.get_name(name, try_suffixes=(".weight",))
        out.add_tensor(file_name, weight.contiguous().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_a_gguf_file_computes_what_the_model_it_was_made_of_does(
    tmp_path: Path, reached: list[str]
) -> None:
    model = llama()
    path = gguf_file(model, tmp_path / "tiny.gguf")
    for name in (path, str(path), tmp_path):
        assert find_source(name).gguf == "tiny.gguf"
    loaded = load_model(path)
    assert loaded.model.dtype == torch.float32
    ids = torch.arange(40, 80)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        error = (loaded.model.eval()(ids).logits - expected).abs().max() / expected.std()
    assert error < 1e-5
    text = "def answer():\n    return 42"
    assert loaded.tokenizer(text).input_ids == tokenizer()(text).input_ids
    with (
        Runtime(loaded.model, loaded.tokenizer, cache=CacheConfig(budget="8MiB")) as runtime,
        runtime.session() as session,
    ):
        messages = [{"role": "user", "content": text}]
        turn = session.chat(messages, max_new_tokens=4, verify=True)
        assert turn.verify.ok
        assert session.chat(messages, max_new_tokens=1).usage.cached_tokens > 10
    assert reached == []


def test_a_gguf_file_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_file(llama(), tmp_path / "tiny.gguf")
    no_weights_read(monkeypatch)
    monkeypatch.setattr(loader, "available_bytes", lambda: MIB)
    with pytest.raises(ModelTooLarge):
        load_model(path)


def test_a_damaged_gguf_file_is_an_error_of_ours(tmp_path: Path) -> None:
    path = gguf_file(llama(), tmp_path / "tiny.gguf")
    path.write_bytes(b"GGUG" + path.read_bytes()[4:])
    with pytest.raises(ModelNotFound, match=r"tiny\.gguf"):
        load_model(path)


def test_without_the_packages_for_it_a_gguf_file_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOption, match=r"tiny.gguf.*pip install agentcache\[gguf\]"):
        load_model(tmp_path / "tiny.gguf")


def test_of_several_gguf_files_one_has_to_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"a\.gguf, b\.gguf"):
        load_model(tmp_path)


# adapters


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """Makes the folder of a LoRA adapter for a model, with weights by a seed."""
    peft = pytest.importorskip("peft", reason="needs agentcache[adapters]")

    def make(name: str, seed: int, model: PreTrainedModel | None = None, **changes: Any) -> Path:
        settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], **changes}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = peft.LoraConfig(init_lora_weights=False, **settings)
            peft.get_peft_model(model or llama(), config).save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


adapted = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@adapted
def test_an_adapter_is_merged_as_peft_computes_it(
    folder: Path, adapter: Callable[..., Path]
) -> None:
    import peft

    path, ids = adapter("one", seed=1), torch.arange(40, 80)[None]
    beside = peft.PeftModel.from_pretrained(llama(), path).eval()
    loaded = load_model(folder, adapter=path)
    assert type(loaded.model) is type(llama())
    with torch.inference_mode():
        expected, plain = beside(input_ids=ids).logits, llama()(ids).logits
        found = loaded.model.eval()(ids).logits
    assert (found - expected).abs().max() < 1e-4 * expected.std()
    assert (found - plain).abs().max() > 0.1 * expected.std()


@adapted
def test_two_adapters_never_share_what_is_cached(
    folder: Path, adapter: Callable[..., Path]
) -> None:
    paths = [None, adapter("one", seed=1), adapter("two", seed=2)]
    again = adapter("one again", seed=1)
    seen = []
    for path in [*paths, again]:
        with (
            Runtime.load(folder, adapter=path, cache=CacheConfig(budget="4MiB")) as runtime,
            runtime.session() as session,
        ):
            names = [runtime.namespace("t"), runtime.namespace(None, shared_head=True)]
            turn = session.generate(list(range(40, 70)), max_new_tokens=4, verify=True)
            assert turn.verify.ok
            seen.append([name.digest() for name in names])
            assert (names[0].adapter is None) == (path is None)
    assert seen[3] == seen[1]
    for which in (0, 1):
        assert len({digests[which] for digests in seen}) == 3


@adapted
def test_an_adapter_that_changes_nothing_is_still_kept_apart(
    folder: Path, adapter: Callable[..., Path]
) -> None:
    one, two = adapter("one", seed=1), adapter("two", seed=1, lora_alpha=16)
    digests = {load_model(folder, adapter=path).adapter for path in (one, two)}
    assert len(digests) == 2
    runtimes = [Runtime(llama(), tokenizer(), adapter=digest) for digest in sorted(digests)]
    names = {runtime.namespace(None).digest() for runtime in runtimes}
    for runtime in runtimes:
        runtime.close()
    assert len(names) == 2


@adapted
def test_an_adapter_reaches_recurrent_layers_before_they_are_replaced(
    adapter: Callable[..., Path],
) -> None:
    plain = load_model("tiny-hybrid").model
    path = adapter("hybrid", seed=1, model=plain, target_modules=["in_proj", "out_proj", "o_proj"])
    cache = CacheConfig(budget="16MiB")
    with (
        Runtime.load("tiny-hybrid", adapter=path, cache=cache, backend="transformers") as runtime,
        runtime.session() as session,
    ):
        turn = session.generate(list(range(40, 70)), max_new_tokens=4, verify=True)
        assert turn.verify.ok
        before = load_model(hybrid_path("tiny-hybrid")).model.state_dict()
        after = runtime.engine.backend.model.state_dict()
        changed = {name.rsplit(".", 2)[-2] for name in before if before[name].ne(after[name]).any()}
    assert changed == {"in_proj", "out_proj", "o_proj"}


@adapted
@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"hidden_size": 32}]
)
def test_an_adapter_of_another_model_is_refused(
    folder: Path, adapter: Callable[..., Path], changes: dict[str, int]
) -> None:
    path = adapter("other", seed=1, model=llama(**changes))
    with pytest.raises(ModelError, match=r"other.*does not fit this model.*trained on"):
        load_model(folder, adapter=path)


@pytest.mark.parametrize(
    "settings",
    [{"peft_type": "PROMPT_TUNING"}, {"peft_type": "LORA", "alora_invocation_tokens": [1]}],
)
def test_an_adapter_that_cannot_be_merged_is_refused_before_any_weight_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    no_weights_read(monkeypatch)
    with pytest.raises(UnsupportedOption, match="cannot be merged"):
        load_model(folder, adapter=tmp_path)


@adapted
def test_commands_take_an_adapter(folder: Path, adapter: Callable[..., Path]) -> None:
    path, out = adapter("one", seed=1), folder.parent / "doctor.json"
    probed = []
    for flags in ([], [f"--adapter={path}"]):
        done = agentcache("doctor", f"--model={folder}", *flags, f"--json={out}")
        assert done.status == 0, done.stdout + done.stderr
        probed.append(json.loads(out.read_text())[0]["effects"])
    assert probed[0] != probed[1], "the same weights were probed"
    replay = ("replay", f"--model={folder}", "--limit=1", "--max-turns=1")
    done = agentcache(*replay, f"--adapter={path}")
    assert done.status == 0, done.stdout + done.stderr
    other = adapter("other", seed=1, model=llama(num_hidden_layers=3))
    for command in (replay, ("doctor", f"--model={folder}")):
        done = agentcache(*command, f"--adapter={other}")
        assert done.status == 2
        assert "does not fit this model" in done.stderr.replace("\n", " ")


def test_an_adapter_for_no_model_is_wrong_usage() -> None:
    done = agentcache("doctor", "--family=llama", "--adapter=some/adapter")
    assert done.status == 2
    assert "no model to merge it into; give --model" in done.stderr.replace("\n", " ")


def test_an_adapter_that_is_not_there_is_an_error_that_names_it(
    folder: Path, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_weights_read(monkeypatch)
    with pytest.raises(ModelNotFound, match=r"no adapter.*nowhere.*adapter_config.json"):
        load_model(folder, adapter=tmp_path / "nowhere")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"some/adapter.*HF_HUB_OFFLINE is set"):
        load_model(folder, adapter="some/adapter")


@adapted
def test_an_adapter_without_weights_or_with_damaged_ones_is_an_error_of_ours(
    folder: Path, adapter: Callable[..., Path], reached: list[str]
) -> None:
    path = adapter("one", seed=1)
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="one' does not fit this model"):
        load_model(folder, adapter=path)
    file.unlink()
    with pytest.raises(ModelNotFound, match=r"one' has no weights.*adapter_model.safetensors"):
        load_model(folder, adapter=path)
    assert reached == []


def test_without_peft_an_adapter_is_an_error_that_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentcache.engine import adapter

    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOption, match=r"pip install agentcache\[adapters\]"):
        load_model(folder, adapter=tmp_path)


# ---- devices ----


@pytest.mark.parametrize("device", ["nowhere", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_before_any_weight_is_read(device: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"device='{device}' cannot be used: ."):
        Runtime.load("tiny-hybrid", device=device)


def test_graphs_are_refused_on_a_cpu_and_by_transformers() -> None:
    with pytest.raises(UnsupportedOption, match="for models on a CUDA device"):
        Runtime.load("tiny-hybrid", cuda_graphs=True)
    with pytest.raises(UnsupportedOption, match="cuda_graphs needs the native backend"):
        Runtime.load("tiny-hybrid", backend="transformers", cuda_graphs=True)
