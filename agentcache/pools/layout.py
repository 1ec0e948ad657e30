"""How a token's KV and a sequence's state lie in memory, in bytes; and how a budget divides."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm, prod
from typing import TYPE_CHECKING

import numpy as np

from agentcache.errors import BudgetTooSmall, ConfigError
from agentcache.types import Kind

if TYPE_CHECKING:
    import torch

    from agentcache.types import IntArray

__all__ = [
    "KVGroup",
    "KVLayout",
    "KVSpec",
    "PageShape",
    "PoolSizes",
    "SidecarSpec",
    "StateLayout",
    "StateSpec",
    "divide_budget",
]

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One attention layer: keys [num_kv_heads, head_dim] and values of the same shape per token.

    value_dim: width of a value, where it is another than a key's. window: how many positions a
    token sees, its own included; None: all before it.
    """

    layer_idx: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None

    @property
    def value_width(self) -> int:
        """Elements of one head's value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def token_elements(self) -> int:
        """Elements of one token's keys and values."""
        return self.num_kv_heads * (self.head_dim + self.value_width)


@dataclass(frozen=True, slots=True)
class SidecarSpec:
    """Something else that a page of KV brings with it: it follows the page and has no vote.

    One entry of `shape` for every `tokens` positions: 1 for the keys of an indexer or the KV of a
    draft model, 4 or 128 for compressed KV (DeepSeek-V4's C4 and C128). An entry lies in the page
    that holds its last position, and is there once that position is computed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens: int = 1

    def entries(self, page_size: int) -> int:
        """Entries in a page; one where an entry stands for more positions than a page has.

        Raises ConfigError where pages and entries would overlap in part.
        """
        if page_size % self.tokens and self.tokens % page_size:
            raise ConfigError(
                f"page_size is {page_size}, but {self.name} keeps one entry for {self.tokens} "
                "positions; one of the two has to be a multiple of the other"
            )
        return max(1, page_size // self.tokens)

    def page_bytes(self, page_size: int) -> int:
        """Bytes beside one page, aligned."""
        num_bytes = self.entries(page_size) * prod(self.shape) * self.dtype.itemsize
        return -(-num_bytes // _ALIGN) * _ALIGN

    def place(self, entry: int, page_size: int) -> tuple[int, int]:
        """(index of the page in its sequence, index in that page) of a sequence's entry.

        >>> import torch
        >>> SidecarSpec("c4", (8,), torch.float32, tokens=4).place(5, page_size=16)
        (1, 1)
        """
        pages, places = self.places(entry, entry + 1, page_size)
        return int(pages[0]), int(places[0])

    def places(self, start: int, stop: int, page_size: int) -> tuple[IntArray, IntArray]:
        """`place` of the entries [start, stop): their pages, and their indices in those."""
        last = np.arange(start + 1, stop + 1, dtype=np.int32) * self.tokens - 1
        return last // page_size, last % page_size // self.tokens * (self.tokens < page_size)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV shares pages: all that see everything before them, or all with one window.

    kind: the component's name for it. window: None where everything is seen.
    """

    kind: str
    window: int | None
    specs: tuple[KVSpec, ...]

    @property
    def token_elements(self) -> int:
        """Elements of one token's keys and values in these layers."""
        return sum(spec.token_elements for spec in self.specs)


@dataclass(frozen=True, slots=True)
class PageShape:
    """A page holds `elements` elements, which are `lens[kind]` tokens' KV of a group's layers."""

    elements: int
    lens: dict[str, int]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One token's KV of a group's layers, side by side: per layer its keys, then its values.

    Token after token this way, any run of neighbouring slots is one strided view per layer, and a
    page is one block of memory. Layers with a window have pages of their own, of the same size in
    bytes, so that what lies before the window can be given back. Sidecars lie in pools of their
    own, under the page numbers of what they describe: with them all layers share their pages,
    since the entries outlive the window.
    """

    specs: tuple[KVSpec, ...]
    dtype: torch.dtype
    sidecars: tuple[SidecarSpec, ...] = ()

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """Layers that see everything first, then by their windows, shortest first."""
        if self.sidecars:
            return (KVGroup(Kind.FULL.value, None, self.specs),)
        by_window: dict[int | None, list[KVSpec]] = {}
        for spec in self.specs:
            by_window.setdefault(spec.window, []).append(spec)
        full = by_window.pop(None, [])
        out = [KVGroup(Kind.FULL.value, None, tuple(full))] if full else []
        for window, specs in sorted(by_window.items(), key=lambda item: item[0] or 0):
            kind = Kind.SWA.value if len(by_window) == 1 else f"{Kind.SWA}{window}"
            out.append(KVGroup(kind, window, tuple(specs)))
        return tuple(out)

    def kind_of(self, layer_idx: int) -> str:
        """The kind of the pages a layer's KV lies in."""
        for group in self.groups:
            if any(spec.layer_idx == layer_idx for spec in group.specs):
                return group.kind
        raise KeyError(layer_idx)

    def page_shape(self, page_size: int) -> PageShape:
        """Pages of `page_size` tokens of the first group, and of as many as fit of the others.

        A page is made a little larger where that lets more tokens fit evenly.

        >>> import torch
        >>> full, window = KVSpec(0, 2, 64), KVSpec(1, 6, 64, window=512)
        >>> KVLayout((full, window), torch.float32).page_shape(16)
        PageShape(elements=4160, lens={'full': 16, 'swa': 5})
        """
        groups = self.groups
        if not groups:
            return PageShape(0, {})
        elements = page_size * groups[0].token_elements
        elements = max(elements, *(group.token_elements for group in groups))
        lens = {groups[0].kind: page_size}
        for group in groups[1:]:
            most = elements // group.token_elements
            step = lcm(*lens.values())
            fits = [(count, _round_up(elements, lcm(step, count))) for count in range(most, 0, -1)]
            even = (fit for fit in fits if fit[1] <= elements * _MOST_PADDING)
            best = next(even, None) or min(fits, key=lambda fit: fit[1] / fit[0])
            lens[group.kind], elements = best
        whole_words = _WORD // gcd(_WORD, self.dtype.itemsize)
        return PageShape(_round_up(elements, lcm(whole_words, *lens.values())), lens)

    @property
    def token_elements(self) -> int:
        return sum(spec.token_elements for spec in self.specs)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV in all layers, windows or not."""
        return self.token_elements * self.dtype.itemsize


_MOST_PADDING = 1.02
_WORD = 8
"""Bytes of the largest item that any state in a page has."""


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state tensor of one layer, for one sequence.

    `name` is "conv" or "recurrent", with a number behind it from a layer's second one on; other
    names are those of tokens that wait to be compressed. fill: every element's value before the
    first token.
    """

    layer_idx: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int = 0

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateLayout:
    """All state tensors of one sequence in one row of bytes, each aligned to 64 bytes."""

    specs: tuple[StateSpec, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins in the row."""
        out, at = [], 0
        for spec in self.specs:
            out.append(at)
            at += -(-spec.num_bytes // _ALIGN) * _ALIGN
        return tuple(out)

    @property
    def num_bytes(self) -> int:
        """Bytes of one row; 0 for a model without recurrent state."""
        return sum(-(-spec.num_bytes // _ALIGN) * _ALIGN for spec in self.specs)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """How much of everything a set of pools has. Rows are padded to whole pages; each page has
    `sidecar_bytes` beside it.

    row_pages: pages as large as a running state. state_pages: pages of a checkpoint, fewer where it
    is packed.
    """

    num_pages: int
    page_size: int
    page_bytes: int
    row_pages: int
    state_pages: int
    num_rows: int
    num_staging: int
    sidecar_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one running state."""
        return self.row_pages * self.page_bytes

    @property
    def packing_bytes(self) -> int:
        """Bytes in which a checkpoint is packed; 0 where checkpoints are kept as they are."""
        return self.state_pages * self.page_bytes if self.state_pages < self.row_pages else 0

    @property
    def total_bytes(self) -> int:
        """Everything together: what the budget bounds."""
        pages = self.num_pages * (self.page_bytes + self.sidecar_bytes)
        rows = (self.num_rows + self.num_staging) * self.row_bytes
        return pages + rows + self.packing_bytes

    @classmethod
    def of(
        cls,
        kv: KVLayout,
        state: StateLayout,
        *,
        num_pages: int,
        page_size: int,
        num_rows: int,
        num_staging: int,
        checkpoint_bytes: int | None = None,
    ) -> PoolSizes:
        """Sizes for given layouts; without KV a page is as large as a checkpoint.

        checkpoint_bytes: of a packed checkpoint; None where states are kept as they are, as they
        are also where packing would not save a page.
        """
        parked = state.num_bytes if checkpoint_bytes is None else checkpoint_bytes
        page_bytes = kv.page_shape(page_size).elements * kv.dtype.itemsize
        page_bytes = page_bytes or max(parked, 1)
        row_pages = -(-state.num_bytes // page_bytes)
        return cls(
            num_pages=num_pages,
            page_size=page_size,
            page_bytes=page_bytes,
            row_pages=row_pages,
            state_pages=min(row_pages, -(-parked // page_bytes)),
            num_rows=num_rows,
            num_staging=num_staging,
            sidecar_bytes=sum(sidecar.page_bytes(page_size) for sidecar in kv.sidecars),
        )


_FEWEST_STAGING, _MOST_STAGING = 2, 8
_ROWS_SHARE = 4  # running rows take at most this part (a fourth) of the budget
_STAGING_SHARE = 4  # and staging rows at most a fourth of those


def divide_budget(
    kv: KVLayout,
    state: StateLayout,
    *,
    budget_bytes: int,
    page_size: int,
    max_running: int,
    checkpoint_bytes: int | None = None,
) -> PoolSizes:
    """The largest pools within a budget: first rows for running requests, the rest pages.

    Up to `max_running` rows, fewer where they would take more than a fourth of the budget; and some
    to stage captures in, for several prompts in a pass.
    checkpoint_bytes: as for `PoolSizes.of`. Raises BudgetTooSmall when not even one row, one
    checkpoint and a page of KV fit.
    """

    def sizes(num_pages: int, num_rows: int, num_staging: int) -> PoolSizes:
        return PoolSizes.of(
            kv,
            state,
            num_pages=num_pages,
            page_size=page_size,
            num_rows=num_rows,
            num_staging=num_staging,
            checkpoint_bytes=checkpoint_bytes,
        )

    one = sizes(0, 1, 1)
    page_bytes = one.page_bytes + one.sidecar_bytes
    least_pages = (one.state_pages + max(1, len(kv.groups))) * page_bytes
    minimum = one.total_bytes + least_pages
    if budget_bytes < minimum:
        raise BudgetTooSmall(budget_bytes, minimum)
    budget_bytes -= one.packing_bytes
    rows, staging = max_running, _MOST_STAGING
    if one.row_bytes:
        fit = min(budget_bytes // _ROWS_SHARE, budget_bytes - least_pages) // one.row_bytes
        staging = max(_FEWEST_STAGING, min(_MOST_STAGING, fit // _STAGING_SHARE))
        rows = max(1, min(max_running, fit - staging))
        staging = staging if fit > staging else 1
    left = budget_bytes - (rows + staging) * one.row_bytes
    return sizes(left // page_bytes, rows, staging)
