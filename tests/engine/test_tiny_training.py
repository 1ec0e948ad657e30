"""Training `tiny-agent`: the pass it trains with, that it learns, goes on, and is written whole."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from agentcache.engine.embedded import AGENT_FOLDER
from agentcache.engine.tiny import export as exporting
from agentcache.engine.tiny import train as training
from agentcache.engine.tiny.batches import draw_examples, example_of, rows_of
from agentcache.engine.tiny.evaluate import held_out_dialogues
from agentcache.engine.tiny.export import export
from agentcache.engine.tiny.model import new_agent
from agentcache.engine.tiny.muon import Muon, orthogonal
from agentcache.engine.tiny.packed import CHUNK, Places, hidden_of, packed_scan
from agentcache.engine.tiny.train import Settings, train
from agentcache.kernels.ssd_scan import ssd_scan_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SETTINGS = Settings(steps=4, tokens=300, rate=4e-3)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def folder_with_tokenizer(path: Path) -> Path:
    path.mkdir()
    shutil.copyfile(AGENT_FOLDER / "tokenizer.json", path / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = folder_with_tokenizer(tmp_path_factory.mktemp("training") / "out")
    train(out, SETTINGS)
    return out


@pytest.mark.parametrize("lengths", [[128], [1, 31, 32, 64], [5, 3, 77, 2, 1, 40], [95, 33]])
def test_scan_of_a_row_is_that_of_the_reference_for_each_dialogue(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(lengths))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tokens = sum(lengths)
    x, dt, A = draw(tokens, 3, 4), draw(tokens, 3).exp(), -draw(3).exp()
    B, C = draw(tokens, 5), draw(tokens, 5)
    places = Places.of(lengths)
    got = packed_scan(x, dt, A, B, C, places.number)
    for start, end in places.spans:
        at = slice(start, end)
        rows = x[None, at], dt[None, at], A, B[None, at, None], C[None, at, None]
        expected, _ = ssd_scan_reference(*rows, D=torch.zeros(3))
        torch.testing.assert_close(got[at], expected[0], rtol=1e-4, atol=1e-4)


def test_a_dialogue_in_a_row_gets_what_transformers_computes_for_it_alone() -> None:
    model = new_agent(0)
    lengths = [40, 3, 200, 1, 90, 51, 300, 83]
    assert sum(lengths) % CHUNK == 0
    ids = torch.randint(8, 1536, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    places = Places.of(lengths)
    with torch.no_grad():
        got = hidden_of(model, ids, places)
        for start, end in places.spans:
            alone = model.model(input_ids=ids[None, start:end], use_cache=False)
            expected = alone.last_hidden_state[0]
            torch.testing.assert_close(got[start:end], expected, rtol=1e-4, atol=1e-4)


def test_muon_takes_the_steps_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(6, 20)) for _ in range(2))
    one = Muon([ours], lr=1e-2)
    other = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        ours.grad = torch.randn(6, 20, generator=generator)
        theirs.grad = ours.grad.clone()
        one.step()
        other.step()
    moved = (theirs.detach() - 1).abs().mean()
    assert (ours.detach() - theirs.detach()).abs().max() < 0.05 * moved  # theirs is in bfloat16


def test_muon_makes_tall_and_wide_matrices_nearly_orthogonal() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((8, 30), (30, 8), (9, 9)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=generator)))
        assert values.min() > 0.4
        assert values.max() < 1.3


def test_drills_are_copied_from_what_stands_before() -> None:
    tokenizer = Tokenizer.from_file(str(AGENT_FOLDER / "tokenizer.json"))
    start = tokenizer.token_to_id("<|start_of_role|>")
    examples = draw_examples(tokenizer, "drills", 0.0, 8000)
    drills = [example for example in examples if start not in example.ids]
    assert 0.6 < len(drills) / len(examples) < 0.95
    for drill in drills:
        (reply,) = drill.replies
        length = len(drill.ids) // 3
        assert drill.ids[reply] == drill.ids[reply.start - length : reply.stop - length]
    late = draw_examples(tokenizer, "drills", 0.5, 8000)
    assert all(start in example.ids for example in late)


def test_learning_lowers_the_loss_of_what_it_saw() -> None:
    tokenizer = Tokenizer.from_file(str(AGENT_FOLDER / "tokenizer.json"))
    model = new_agent(0)
    optimizers = training._optimizers(model)
    examples = [example_of(tokenizer, dialogue) for dialogue in held_out_dialogues(2)]
    losses = []
    for _ in range(6):
        losses.append(training._learn(model, rows_of(examples, 640, 3)))
        training._update(model, optimizers, 4e-3)
    assert losses[-1] < 0.8 * losses[0]


def test_going_on_gives_what_one_run_gives(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder_with_tokenizer(tmp_path / "halves")
    monkeypatch.setattr(training, "_STEPS_PER_CHECKPOINT", 2)

    class Stopped(Exception):
        pass

    def stop(*_: object) -> None:
        if (out / "checkpoint.pt").exists():
            raise Stopped

    with monkeypatch.context() as patch:
        learn = training._learn

        def learn_until_checkpoint(*arguments: Any, **more: Any) -> float:
            stop()
            return learn(*arguments, **more)

        patch.setattr(training, "_learn", learn_until_checkpoint)
        with pytest.raises(Stopped):
            train(out, SETTINGS)
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] == 2
    train(out, SETTINGS)
    one, halves = (
        torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
        for folder in (trained, out)
    )
    assert all(torch.equal(one[name], halves[name]) for name in one)


def test_exported_folder_is_what_was_trained_in_fewer_bits(trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype is torch.float32
    weights = torch.load(trained / "checkpoint.pt", weights_only=True)["model"]
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name].to(torch.bfloat16).float()), name
    assert (tmp_path / "model.safetensors").stat().st_size < 12_000_000
    assert (tmp_path / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (training.main, ["--out=new", "--steps=0"], "--steps is 0"),
        (training.main, ["--out=new", "--rate=-1"], "--rate is -1.0"),
        (training.main, ["--out=file"], "file is a file; give a folder"),
        (training.main, [], "--out"),
        (exporting.main, ["nothing"], "no checkpoint.pt in nothing"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    main: Callable[[], None],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("sys.argv", ["command", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
