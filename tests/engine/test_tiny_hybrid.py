"""The embedded models: same weights everywhere, a folder that heals, and a memory that shows."""

from __future__ import annotations

import copy
import hashlib
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    GraniteMoeHybridConfig,
)

from agentcache.engine import tiny_hybrid
from agentcache.engine.tiny_hybrid import (
    EMBEDDED_MODELS,
    build,
    hybrid_path,
    small_hybrid_config,
    tiny_hybrid_config,
    tiny_hybrid_path,
)
from agentcache.errors import ModelError, ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOGIT_TOLERANCE = 1e-4
STATE_TOLERANCE = 1e-4
EXTENSION = 32
PAGE = 16


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take many times as long as one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    return build(tiny_hybrid_config())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def own_home(home: Path, tmp_path: Path) -> Path:
    """A home that a test may damage."""
    hybrid_path("tiny-hybrid", home)
    shutil.copytree(home / "models", tmp_path / "models")
    return tmp_path


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(8, 8192, (8192 + EXTENSION,), generator=generator)


def digest_of(model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def run(
    model: Any, ids: torch.Tensor, *, chunk: int, keep: int, cache: Any = None
) -> tuple[torch.Tensor, Any]:
    """Absorb `ids` after `cache`, `chunk` tokens a pass; logits of the last `keep` positions."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    rows = []
    for part in ids.split(chunk):
        start = cache.get_seq_length()
        out = model(
            input_ids=part[None],
            position_ids=torch.arange(start, start + len(part))[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        rows.append(out.logits[0])
    return torch.cat(rows)[-keep:], cache


def tensors_of(cache: Any) -> dict[str, torch.Tensor]:
    """Every layer's states or keys and values, by layer and kind."""
    tensors = {}
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "recurrent_states"):
            tensors[f"{index}.recurrent"] = layer.recurrent_states[0]
            tensors[f"{index}.conv"] = layer.conv_states[0]
        else:
            tensors[f"{index}.keys"], tensors[f"{index}.values"] = layer.keys, layer.values
    return tensors


def logit_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, in standard deviations of the logits."""
    return float((got - expected).pow(2).mean().sqrt() / expected.std())


def state_error(got: Any, expected: Any, *keys: str) -> float:
    """Greatest relative L2 distance over layers and kinds, or over the given ones."""
    before, after = tensors_of(expected), tensors_of(got)
    return max(
        float((after[key] - before[key]).norm() / before[key].norm()) for key in keys or before
    )


def swap_pages(layer: Any, first: int, second: int) -> None:
    for tensor in (layer.keys, layer.values):
        pages = [slice(page * PAGE, (page + 1) * PAGE) for page in (first, second)]
        held = tensor[:, :, pages[0]].clone()
        tensor[:, :, pages[0]] = tensor[:, :, pages[1]]
        tensor[:, :, pages[1]] = held


def test_weights_follow_from_the_seed_on_every_machine(model: Any) -> None:
    assert digest_of(model) == "a59d7a1c6102664cbdb72843c084f281ee668e51cdc46adfe8b82d96ea6aafa0"


def test_another_seed_gives_other_weights(model: Any) -> None:
    other = build(tiny_hybrid_config(), seed=1)
    drawn = [
        name for name, _ in model.named_parameters() if not name.endswith(("A_log", "dt_bias"))
    ]
    assert not any(
        torch.equal(model.get_parameter(name), other.get_parameter(name)) for name in drawn
    )


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    build(tiny_hybrid_config())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_configs_with_experts_are_refused() -> None:
    config = GraniteMoeHybridConfig.from_dict(
        {**tiny_hybrid_config().to_dict(), "num_local_experts": 2, "num_experts_per_tok": 1}
    )
    with pytest.raises(UnsupportedModel, match="block_sparse_moe"):
        build(config)


@pytest.mark.parametrize(
    ("config", "least", "most"),
    [(tiny_hybrid_config(), 3e6, 5e6), (small_hybrid_config(), 28e6, 35e6)],
    ids=["tiny", "small"],
)
def test_sizes(config: GraniteMoeHybridConfig, least: float, most: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert least <= sum(parameter.numel() for parameter in model.parameters()) <= most


def test_one_checkpoint_of_the_tiny_model_stays_small(model: Any, ids: torch.Tensor) -> None:
    _, cache = run(model, ids[:8], chunk=8, keep=1)
    states = [t for key, t in tensors_of(cache).items() if key.endswith(("recurrent", "conv"))]
    assert sum(t.nbytes for t in states) < 700_000


def test_folder_loads_offline_with_the_auto_classes(model: Any, home: Path) -> None:
    folder = tiny_hybrid_path(home)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert digest_of(loaded) == digest_of(model)
    assert loaded.dtype is torch.float32
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == loaded.config.vocab_size
    end_ids = GenerationConfig.from_pretrained(folder).eos_token_id
    assert end_ids == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end_of_text|>")


def test_folder_is_written_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hybrid_path("tiny-hybrid", home)
    monkeypatch.setattr(tiny_hybrid, "build", lambda config: pytest.fail("built a second time"))
    assert hybrid_path("tiny-hybrid", home) == folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, lambda path: path.unlink()])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "agentcache.json"])
def test_damaged_folder_is_written_anew(
    own_home: Path, model: Any, name: str, damage: Callable[[Path], None]
) -> None:
    folder = hybrid_path("tiny-hybrid", own_home)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder / name)
    assert hybrid_path("tiny-hybrid", own_home) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_another_tokenizer_gets_another_folder(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = hybrid_path("tiny-hybrid", own_home)
    shutil.copytree(tiny_hybrid._ASSETS, tmp_path / "assets")
    with (tmp_path / "assets" / "chat_template.jinja").open("a") as file:
        file.write("{# changed #}")
    monkeypatch.setattr(tiny_hybrid, "_ASSETS", tmp_path / "assets")
    after = hybrid_path("tiny-hybrid", own_home)
    assert after != before
    assert (after / "chat_template.jinja").read_text().endswith("{# changed #}")


def test_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="small-hybrid, tiny-hybrid"):
        hybrid_path("huge-hybrid", tmp_path)
    assert set(EMBEDDED_MODELS) == {"small-hybrid", "tiny-hybrid"}


def test_home_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ModelError, match="AGENTCACHE_HOME"):
        hybrid_path("tiny-hybrid", tmp_path / "home")


def test_logits_have_clear_winners_that_do_not_echo_the_input(
    model: Any, ids: torch.Tensor
) -> None:
    logits, _ = run(model, ids[:512], chunk=512, keep=512)
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1] < 1e-3 * logits.std()).float().mean() < 0.02
    assert (logits.argmax(-1) == ids[:512]).float().mean() < 0.01
    assert logits.argmax(-1).unique().numel() > 256


def test_splitting_a_prefill_changes_only_rounding(model: Any, ids: torch.Tensor) -> None:
    whole, whole_cache = run(model, ids[:4096], chunk=4096, keep=512)
    split, split_cache = run(model, ids[:4096], chunk=512, keep=512)
    assert (split - whole).abs().max() <= 3e-5 * whole.std()
    assert state_error(split_cache, whole_cache) <= 3e-5


@pytest.mark.parametrize("length", [500, 8192])
def test_an_early_token_and_every_damage_show(model: Any, ids: torch.Tensor, length: int) -> None:
    """Each against the same extension by a few tokens after an undamaged prefix."""
    prefix, tail = ids[:length], ids[length : length + EXTENSION]
    _, early = run(model, prefix[:-1], chunk=512, keep=1)
    _, cache = run(model, prefix[-1:], chunk=1, keep=1, cache=copy.deepcopy(early))

    def extend(cache: Any) -> tuple[torch.Tensor, Any]:
        return run(model, tail, chunk=EXTENSION, keep=EXTENSION, cache=cache)

    logits, end = extend(copy.deepcopy(cache))

    def errors(damage: Callable[[Any, Any], None]) -> tuple[float, float]:
        """Errors of logits and end states if `damage` befalls each layer, given its early twin."""
        damaged = copy.deepcopy(cache)
        for layer, twin in zip(damaged.layers, early.layers, strict=True):
            damage(layer, twin)
        damaged_logits, damaged_end = extend(damaged)
        return logit_error(damaged_logits, logits), state_error(damaged_end, end)

    def zero_state(layer: Any, twin: Any) -> None:
        if hasattr(layer, "recurrent_states"):
            layer.recurrent_states[0].zero_()

    def early_state(layer: Any, twin: Any) -> None:
        if hasattr(layer, "recurrent_states"):
            layer.recurrent_states[0].copy_(twin.recurrent_states[0])

    def stale_conv(layer: Any, twin: Any) -> None:
        if hasattr(layer, "conv_states"):
            layer.conv_states[0].copy_(twin.conv_states[0])

    def other_page(layer: Any, twin: Any) -> None:
        if hasattr(layer, "keys"):
            for tensor in (layer.keys, layer.values):
                tensor[:, :, 2 * PAGE : 3 * PAGE] = tensor[:, :, 5 * PAGE : 6 * PAGE]

    def swapped_pages(layer: Any, twin: Any) -> None:
        if hasattr(layer, "keys"):
            swap_pages(layer, 2, 5)

    for damage in (zero_state, early_state, stale_conv, other_page):
        in_logits, in_states = errors(damage)
        assert in_logits > 20 * LOGIT_TOLERANCE, damage
        assert in_states > 20 * STATE_TOLERANCE, damage

    # attention adds up its keys in any order: only the comparison of the pages can tell
    in_logits, in_states = errors(swapped_pages)
    assert in_logits < LOGIT_TOLERANCE
    assert in_states > 20 * STATE_TOLERANCE

    changed = prefix.clone()
    changed[5] = (changed[5] + 1234) % 8192
    _, changed_cache = run(model, changed, chunk=512, keep=1)
    changed_logits, changed_end = extend(changed_cache)
    assert logit_error(changed_logits, logits) > 1e-2
    assert state_error(changed_end, end) > 1e-2
    # below any attention nothing but the state itself can have kept the token
    assert state_error(changed_end, end, "0.recurrent") > 5 * STATE_TOLERANCE
