"""Train `tiny-agent` from nothing, on the cores of one machine.

    torchrun --nproc-per-node 2 -m agentcache.engine.tiny.train --out FOLDER

One process per core, of one thread each, with their gradients averaged: small tensors gain little
from several threads. Stopped and started again with the same folder it goes on where it was. What a
step sees follows from the seed, the step and the process alone.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from agentcache.engine.tiny.batches import IGNORED, Row, draw_examples, rows_of
from agentcache.engine.tiny.model import new_agent
from agentcache.engine.tiny.muon import Muon
from agentcache.engine.tiny.packed import CHUNK, hidden_of
from agentcache.engine.tiny.vocabulary import train_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Settings", "main", "train"]

_MOST_TOKENS_IN_A_ROW = 3072
_STEPS_TO_WARM_UP = 40
_SMALL_UPDATES = 0.146  # of the updates, of a quarter as many tokens: copying needs updates
_STEPS_PER_CHECKPOINT = 100
_NUM_HELD_OUT_TOKENS = 30_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What a training is made of.

    steps: updates in all. tokens: per update, over all processes. rate: of learning, at most.
    compiled: have `torch.compile` fuse what is small, in 0.6 of the time; needs a C++ compiler.
    """

    steps: int = 3600
    tokens: int = 6144
    rate: float = 8e-3
    seed: int = 0
    compiled: bool = False


def train(out: Path, settings: Settings) -> None:
    """Write weights and tokenizer to `out`, with a checkpoint to go on from."""
    torch.set_num_threads(1)
    rank, world = _join()
    tokenizer = _tokenizer(out, settings.seed, rank)
    model: Any = new_agent(settings.seed)
    optimizers = _optimizers(model)
    first = _restore(out, model, optimizers)
    with _Bar(rank, first, settings.steps) as show:
        for step in range(first, settings.steps):
            began = time.perf_counter()
            seed = f"train {settings.seed} {step} {rank}"
            progress = step / settings.steps
            num_tokens = settings.tokens if progress >= _SMALL_UPDATES else settings.tokens // 4
            examples = draw_examples(tokenizer, seed, progress, num_tokens // world)
            row_length = _row_length(num_tokens // world)
            rows = rows_of(examples, row_length, model.config.pad_token_id)
            loss = _learn(model, rows, compiled=settings.compiled)
            _update(model, optimizers, settings.rate * _share(step, settings.steps))
            show(loss, num_tokens / (time.perf_counter() - began))
            if (step + 1) % _STEPS_PER_CHECKPOINT == 0 or step + 1 == settings.steps:
                exact = held_out_exactness(
                    model, tokenizer, settings.seed, compiled=settings.compiled
                )
                if rank == 0:
                    _save(out, model, optimizers, step + 1)
                    print(
                        f"step {step + 1}: loss {loss:.4f}, replies exact {exact:.2%}", flush=True
                    )
    if dist.is_initialized():
        dist.destroy_process_group()


def _join() -> tuple[int, int]:
    """This process among those that torchrun started."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
        return dist.get_rank(), world
    return 0, 1


def _tokenizer(out: Path, seed: int, rank: int) -> Tokenizer:
    path = out / "tokenizer.json"
    if rank == 0 and not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        train_vocabulary(seed).save(str(path), pretty=False)
    if dist.is_initialized():
        dist.barrier()
    return Tokenizer.from_file(str(path))


def _optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for embeddings, convolutions, norms and decays."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    return [Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]


def _share(step: int, steps: int) -> float:
    """Of the greatest rate: up at once, level, and down to nothing in the last five eighths."""
    return min(1.0, (step + 1) / _STEPS_TO_WARM_UP, 1.6 * (steps - step) / steps)


def _row_length(num_tokens: int) -> int:
    """Of the fewest rows of equal length that hold so many tokens."""
    rows = -(-num_tokens // _MOST_TOKENS_IN_A_ROW)
    return max(CHUNK, round(num_tokens / rows / CHUNK) * CHUNK)


def _learn(model: Any, rows: Iterable[Row], *, compiled: bool = False) -> float:
    """Gradients of the mean loss over what all processes predict; returns that loss."""
    total, count = torch.zeros(()), 0
    for row in rows:
        wanted = row.targets != IGNORED
        logits = _logits(model, row, wanted, compiled)
        loss = F.cross_entropy(logits, row.targets[wanted], reduction="sum")
        loss.backward()
        total += loss.detach()
        count += int(wanted.sum())
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([total[None], torch.tensor([float(count)]), *(g.flatten() for g in grads)])
    if dist.is_initialized():
        dist.all_reduce(flat)
    mean = flat / flat[1]
    at = 2
    for grad in grads:
        grad.copy_(mean[at : at + grad.numel()].view_as(grad))
        at += grad.numel()
    return float(mean[0])


def _logits(model: Any, row: Row, wanted: torch.Tensor, compiled: bool) -> torch.Tensor:
    hidden = hidden_of(model, row.ids, row.places, compiled=compiled)
    logits: torch.Tensor = model.lm_head(hidden[wanted]) / model.config.logits_scaling
    return logits


def _update(model: Any, optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def held_out_exactness(
    model: Any, tokenizer: Tokenizer, seed: int, *, compiled: bool = False
) -> float:
    """Share of whole replies that greedy decoding would get right after the right history.

    A reply is decoded exactly if each of its tokens is the likeliest one after those before.
    """
    examples = draw_examples(tokenizer, f"held out {seed}", 0.3, _NUM_HELD_OUT_TOKENS)
    right = num_replies = 0
    for row in rows_of(examples, _MOST_TOKENS_IN_A_ROW, model.config.pad_token_id):
        wanted = row.targets != IGNORED
        hits = torch.ones_like(wanted)
        hits[wanted] = _logits(model, row, wanted, compiled).argmax(-1) == row.targets[wanted]
        for reply in (reply for replies in row.replies for reply in replies):
            num_replies += 1
            right += bool(hits[reply.start - 1 : reply.stop - 1].all())
    return right / num_replies


def _save(out: Path, model: Any, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    part = out / "checkpoint.part"
    torch.save(state, part)
    part.replace(out / "checkpoint.pt")


def _restore(out: Path, model: Any, optimizers: list[torch.optim.Optimizer]) -> int:
    path = out / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])


class _Bar:
    """A bar in the first process, nothing in the others; entered, it gives what moves it on."""

    def __init__(self, rank: int, first: int, steps: int) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}, {task.fields[speed]:.0f} tokens/s"),
            TimeRemainingColumn(),
            disable=rank != 0,
        )
        self._task = self._bar.add_task("", total=steps, completed=first, loss=0.0, speed=0.0)

    def __enter__(self) -> Callable[[float, float], None]:
        self._bar.start()
        return lambda loss, speed: self._bar.update(self._task, advance=1, loss=loss, speed=speed)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder, new or to go on in")
    for name, kind in (("steps", int), ("tokens", int), ("rate", float), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Settings(), name))
    parser.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        default=which("c++") is not None,
        help="compile the forward pass; by default where a C++ compiler is found",
    )
    args = parser.parse_args()
    for name in ("steps", "tokens", "rate"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} is {getattr(args, name)}; give more than 0")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"{args.out} is a file; give a folder")
    train(args.out, Settings(args.steps, args.tokens, args.rate, args.seed, args.compiled))


if __name__ == "__main__":
    main()
