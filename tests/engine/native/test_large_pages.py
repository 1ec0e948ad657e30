"""Weights in memory of large pages are the same weights."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from testkit.models import tokenizer
from testkit.sequences import World

from agentcache.engine.backends import make_backend
from agentcache.engine.families.tiny import build
from agentcache.engine.loader import load_model
from agentcache.engine.machine import drop_file_pages, mapped_bytes
from agentcache.engine.native import large_pages
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.large_pages import move_weights
from agentcache.engine.native.linear import Linear, LinearStack
from agentcache.engine.trial import logits_of

if TYPE_CHECKING:
    from agentcache.types import WeightFormat

needs_large_pages = pytest.mark.skipif(
    not large_pages._are_offered(), reason="the kernel offers no large pages"
)


@pytest.fixture
def all_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_LEAST", 0)


def huge_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    (line,) = (line for line in text.splitlines() if line.startswith("AnonHugePages"))
    return int(line.split()[1]) * 1024


@needs_large_pages
def test_weights_move_and_stay_the_same() -> None:
    rng = torch.Generator().manual_seed(0)
    kept = [torch.randn(shape, generator=rng) for shape in ((900, 1000), (3, 700, 1001), (5, 7))]
    parts = [Linear(kept[0].clone()), LinearStack(kept[1].clone()), Linear(kept[2].bfloat16())]
    before, places = huge_bytes(), [part.weight.data_ptr() for part in parts]
    moved = move_weights(parts)
    assert moved >= sum(part.weight.nbytes for part in parts)
    assert all(part.weight.data_ptr() not in places for part in parts)
    assert all(part.weight.data_ptr() % 64 == 0 for part in parts)
    for part, weight in zip(parts, kept, strict=True):
        assert torch.equal(part.weight, weight.to(part.weight.dtype))
    assert huge_bytes() - before >= moved - 2 * large_pages._PAGE
    del parts, part
    gc.collect()
    assert huge_bytes() <= before


def test_few_weights_stay() -> None:
    part = Linear(torch.ones(10, 10))
    place = part.weight.data_ptr()
    assert move_weights([part]) == 0
    assert part.weight.data_ptr() == place


@pytest.mark.usefixtures("all_move")
@pytest.mark.parametrize("text", ["always madvise [never]\n", None])
def test_without_large_pages_weights_stay(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = tmp_path / "enabled"
    if text is not None:
        offered.write_text(text)
    monkeypatch.setattr(large_pages, "_OFFERED", offered)
    assert move_weights([Linear(torch.ones(10, 10))]) == 0


@pytest.mark.usefixtures("all_move")
def test_where_there_is_no_memory_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(large_pages.mmap, "mmap", refuse)
    assert move_weights([Linear(torch.ones(10, 10))]) == 0


@needs_large_pages
@pytest.mark.parametrize("is_enough", [True, False])
def test_weights_stay_where_a_copy_would_not_fit(
    is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux grants more memory than there is, and kills who writes to it."""
    part = Linear(torch.ones(2200, 1000))
    size = part.weight.nbytes
    free = size if is_enough else size - 1
    monkeypatch.setattr(large_pages, "available_bytes", lambda: free)
    assert move_weights([part]) == (size if is_enough else 0)


@pytest.mark.usefixtures("all_move")
@needs_large_pages
@pytest.mark.parametrize("weight_format", ["unchanged", "int8"])
@pytest.mark.parametrize("name", ["granitemoehybrid_moe", "llama", "kimi_linear"])
def test_a_backend_computes_the_same(name: str, weight_format: WeightFormat) -> None:
    """Also where a head is tied to the embedding, and steps were recorded before."""
    moved = make_backend(build(name), weight_format=weight_format)
    plain = NativeBackend(build(name))
    if weight_format == "int8":
        plain.round_weights()
    assert isinstance(moved, NativeBackend)
    assert (moved._steps is None) == (plain._steps is None)
    places = {part.weight.data_ptr() >> 21 for part in moved._model.roundable()}
    assert len(places) <= 2
    assert torch.equal(logits_of(moved), logits_of(plain))


SIZE = 1 << 22


@pytest.mark.usefixtures("all_move")
@needs_large_pages
def test_steps_recorded_before_are_not_played_on_what_was_left_behind() -> None:
    backend = NativeBackend(build("granitemoehybrid"))
    played, passed = World(backend), World(backend)
    assert torch.equal(played.step([0, 1]), passed.passed([0, 1]))
    left = [part.weight for part in backend._model.roundable()]
    assert backend.move_weights()
    for weight in left:
        weight.fill_(torch.nan)
    assert torch.equal(played.step([0, 1]), passed.passed([0, 1]))


def mapped(file: Path) -> torch.Tensor:
    """A file of sevens, mapped and read."""
    file.write_bytes(bytes([7]) * SIZE)
    tensor = torch.from_file(str(file), size=SIZE, dtype=torch.uint8)
    assert int(tensor.sum()) == 7 * SIZE
    return tensor


def test_files_that_were_read_are_let_go_of(tmp_path: Path) -> None:
    """What was written to is not, nor others, and all can be read again."""
    clean, written, other = (mapped(tmp_path / each) for each in ("clean", "written", "other"))
    written[5] = 3
    before = mapped_bytes()
    assert drop_file_pages([each.data_ptr() + 99 for each in (clean, written)]) == SIZE
    assert SIZE <= before - mapped_bytes() < 2 * SIZE
    assert int(written[5]) == 3
    assert int(clean.sum()) == int(other.sum()) == 7 * SIZE


def test_what_was_written_and_swapped_out_stays(tmp_path: Path) -> None:
    """The kernel counts as anonymous what is in memory alone."""
    written = mapped(tmp_path / "written")
    written[5] = 3
    at = written.data_ptr()
    lines = ("Rss: 4096 kB", "Anonymous: 0 kB", "Swap: 4 kB")
    listed = tmp_path / "proc" / "self" / "smaps"
    listed.parent.mkdir(parents=True)
    head = f"{at:x}-{at + SIZE:x} rw-p 00000000 08:01 7 {tmp_path / 'written'}"
    listed.write_text("\n".join([head, *lines]))
    assert drop_file_pages([at], tmp_path) == 0
    assert int(written[5]) == 3


def test_a_system_without_lists_of_mappings_lets_go_of_nothing(tmp_path: Path) -> None:
    assert drop_file_pages([0], tmp_path) == 0


@needs_large_pages
@pytest.mark.usefixtures("all_move")
def test_weights_are_let_go_of_whatever_their_files_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the Hub's cache they are links to files that have digests for names."""
    monkeypatch.setenv("AGENTCACHE_HOME", str(tmp_path / "home"))
    folder, blob = tmp_path / "model", tmp_path / ("0" * 64)
    build("llama", vocab_size=1 << 16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    model = load_model(folder, backend="auto").model
    size, before = sum(weight.nbytes for weight in model.parameters()), mapped_bytes()
    assert size > 1 << 24
    make_backend(model)
    assert mapped_bytes() - before < size / 4
