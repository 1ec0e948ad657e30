"""Training `tiny-agent`: the scan it trains with, that it learns, goes on, and is written whole."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from agentcache.engine.embedded import AGENT_FOLDER
from agentcache.engine.tiny import export as exporting
from agentcache.engine.tiny import train as training
from agentcache.engine.tiny.batches import draw_examples, example_of
from agentcache.engine.tiny.evaluate import held_out_dialogues
from agentcache.engine.tiny.export import export
from agentcache.engine.tiny.model import differentiable_scan, new_agent, swapped_scan
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


@pytest.mark.parametrize("length", [1, 31, 32, 77])
def test_scan_is_that_of_the_reference(length: int) -> None:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, dt = draw(2, length, 3, 4), draw(2, length, 3)
    B, C = draw(2, length, 1, 5), draw(2, length, 1, 5)
    A, D, bias = -draw(3).exp(), draw(3), draw(3)
    got = differentiable_scan(x, dt, A, B, C, D=D, dt_bias=bias)
    steps = torch.nn.functional.softplus(dt + bias)
    expected, _ = ssd_scan_reference(x, steps, A, B, C, D=D)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_model_computes_the_same_with_either_scan() -> None:
    model = new_agent(0)
    ids = torch.tensor([[5, 900, 17, 3, 44, 1200] * 15])
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        with swapped_scan():
            got = model(input_ids=ids, use_cache=False).logits
        after = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(after, expected)


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
    with swapped_scan():
        for _ in range(6):
            losses.append(training._learn(model, training.batches_of(examples, 600, 3)))
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

        def learn_until_checkpoint(*arguments: object) -> float:
            stop()
            return learn(*arguments)  # type: ignore[arg-type]

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
