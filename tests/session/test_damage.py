"""Verification notices each kind of damage to what is cached, near and far from the end.

A check that nothing can fail proves nothing: here the cached data itself is spoiled, and the call
that resumes from it has to be reported.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from agentcache.cache.tables import path_pages
from agentcache.config import CacheConfig
from agentcache.pools.tensors import TensorPools
from agentcache.runtime import Runtime
from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from agentcache.tree.node import Node

_FRESH = itertools.count(20)


def fresh_tail() -> list[int]:
    """Tokens that no call appended before, so that a call resumes at the spoiled checkpoint."""
    return [next(_FRESH), 12, 13, 14, 15, 16, 17, 18]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime.load("tiny-hybrid", cache=CacheConfig(budget="64MiB")) as made:
        yield made


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(7).integers(20, 8000, length).tolist()


def node_at(runtime: Runtime, prompt: list[int]) -> Node:
    """The node whose checkpoint has absorbed the whole prompt."""
    tree = runtime.cache.tree
    tokens = np.array(prompt, dtype=np.int32)
    match = tree.match(tree.root(runtime.namespace(None).digest()), tokens, len(prompt))
    assert match.boundary == len(prompt)
    return match.node


class Spoiler:
    """Changes cached bytes in place, and puts them back."""

    def __init__(self, runtime: Runtime, node: Node, before: Node) -> None:
        pools = runtime.cache.pools
        assert isinstance(pools, TensorPools)
        self.pools = pools
        self.node = node
        self.before = before
        page_size = runtime.config.page_size
        self.kv_pages: IntArray = path_pages(
            node, Kind.FULL, page_size, 0, -(-node.end // page_size)
        )
        self._saved = pools._arena.clone()

    def undo(self) -> None:
        self.pools._arena.copy_(self._saved)

    def _edit(self, change: Callable[[int, int], None]) -> None:
        """Load both checkpoints into rows, let `change` alter the first, file it again."""
        row, other, *_ = self.pools.staging_rows
        self.pools.load_state(self.node.data[Kind.STATE].slots, row)
        self.pools.load_state(self.before.data[Kind.STATE].slots, other)
        change(row, other)
        self.pools.save_state(row, self.node.data[Kind.STATE].slots)

    def _each(
        self, name: str | None, value: Callable[[torch.Tensor, int], torch.Tensor | float]
    ) -> None:
        def change(row: int, other: int) -> None:
            for (_, kind), state in self.pools.state.items():
                if name in (None, kind):
                    state[row] = value(state, other)

        self._edit(change)

    def zero_recurrent_states(self) -> None:
        self._each("recurrent", lambda state, other: 0.0)

    def state_one_token_early(self) -> None:
        self._each(None, lambda state, other: state[other])

    def stale_conv_states(self) -> None:
        self._each("conv", lambda state, other: state[other])

    def swap_two_kv_pages(self) -> None:
        a, b = int(self.kv_pages[2]), int(self.kv_pages[17])
        arena = self.pools._arena
        arena[[a, b]] = arena[[b, a]]


DAMAGES = [
    Spoiler.zero_recurrent_states,
    Spoiler.state_one_token_early,
    Spoiler.stale_conv_states,
    Spoiler.swap_two_kv_pages,
]


@pytest.mark.parametrize("length", [500, 8000])
def test_every_kind_of_damage_is_reported(runtime: Runtime, length: int) -> None:
    prompt = prompt_of(length)
    runtime.clear()
    runtime.session().generate(prompt[:-1], max_new_tokens=0)
    runtime.session().generate(prompt, max_new_tokens=0)
    spoiler = Spoiler(runtime, node_at(runtime, prompt), node_at(runtime, prompt[:-1]))

    def verified_call() -> tuple[bool, str]:
        turn = runtime.session().generate([*prompt, *fresh_tail()], replay=[5, 6, 7], verify=True)
        assert turn.usage.cached_tokens == length
        assert turn.verify is not None
        report = turn.verify
        return report.ok, f"logits {report.max_logit_error:.1e} states {report.max_state_error:.1e}"

    sound, figures = verified_call()
    assert sound, figures
    for damage in DAMAGES:
        runtime.on_engine(lambda damage=damage: damage(spoiler))
        ok, figures = verified_call()
        runtime.on_engine(spoiler.undo)
        assert not ok, f"{damage.__name__} went unseen: {figures}"
    sound, figures = verified_call()
    assert sound, figures


def test_damage_moves_the_logits_themselves(runtime: Runtime) -> None:
    """A lost state shows in the answer and not only in the state: the model remembers that far."""
    prompt = prompt_of(500)
    runtime.clear()
    runtime.session().generate(prompt[:-1], max_new_tokens=0)
    runtime.session().generate(prompt, max_new_tokens=0)
    spoiler = Spoiler(runtime, node_at(runtime, prompt), node_at(runtime, prompt[:-1]))
    for damage in (Spoiler.zero_recurrent_states, Spoiler.state_one_token_early):
        runtime.on_engine(lambda damage=damage: damage(spoiler))
        turn = runtime.session().generate([*prompt, *fresh_tail()], replay=[5, 6, 7], verify=True)
        runtime.on_engine(spoiler.undo)
        assert turn.verify is not None
        assert turn.verify.max_logit_error > 1e-2
