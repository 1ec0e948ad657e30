"""Sparse and compressed attention: what lies beside the pages is as exact as what lies in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from testkit.models import tokenizer

from agentcache.cache.tables import path_pages
from agentcache.config import CacheConfig
from agentcache.engine.backend import Batch, Capture, Span
from agentcache.engine.families.tiny import VARIANTS, build
from agentcache.engine.transformers_backend import TransformersBackend
from agentcache.errors import ConfigError, UnsupportedModel
from agentcache.pools.layout import PoolSizes, StateSpec
from agentcache.pools.table import PageTable
from agentcache.pools.tensors import TensorPools
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from agentcache.types import IntArray

TOLERANCE = 5e-5
LENGTHS = (70, 30, 21)
END_ID = 2

GLM5: dict[str, Any] = dict(VARIANTS["glm5_next"].settings["text_config"])
LONG_ENTRIES = {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}
}
FOLLOWERS = {
    "text_config": {
        **GLM5,
        "layer_types": ["linear_attention", *["indexed_attention"] * 3],
        "indexer_types": ["full", "full", "shared", "full"],
        "mlp_layer_types": ["dense", *["sparse"] * 3],
    }
}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "an indexer": ("qwen4_exp", 4, {}),
    "n-grams of ids": ("qwen4_exp_ple", 1, {"eos_token_id": [END_ID, 7]}),
    "entries shorter than a page": ("deepseek_v4", 16, {}),
    "entries longer than a page": ("deepseek_v4", 4, LONG_ENTRIES),
    "pools of keys": ("glm5_next", 8, {}),
    "layers that take over a selection": ("glm5_next", 4, FOLLOWERS),
}
FAMILIES = ("qwen4_exp", "qwen4_exp_ple", "deepseek_v4", "glm5_next")


class Subject:
    """A model over an arena whose pages lie in random order, and what it should compute."""

    def __init__(self, variant: str, page_size: int, changes: dict[str, Any]) -> None:
        rng = np.random.default_rng(5)
        self.tokens = [rng.integers(3, 256, length).astype(np.int32) for length in LENGTHS]
        self.tokens[0][[7, 30, 31]] = END_ID
        stock = build(variant, **changes)
        with torch.inference_mode():
            self.expected = [
                stock(input_ids=torch.from_numpy(t).long()[None], use_cache=False).logits[0]
                for t in self.tokens
            ]
        self.backend = TransformersBackend(build(variant, **changes))
        kv, state = self.backend.kv_layout, self.backend.state_layout
        sizes = PoolSizes.of(
            kv, state, num_pages=1500, page_size=page_size, num_rows=4, num_staging=2
        )
        self.pools = TensorPools(kv, state, sizes, poison=True)
        self.page_size = page_size
        self._free = rng.permutation(sizes.num_pages).astype(np.int32)

    def take(self, count: int) -> IntArray:
        out, self._free = self._free[:count], self._free[count:]
        assert len(out) == count
        return out

    def table(self, length: int) -> PageTable:
        return PageTable(self.page_size, self.take(-(-length // self.page_size)))

    def run(
        self, which: int, start: int, stop: int, table: PageTable, row: int, *captures: Capture
    ) -> float:
        """Error of one pass, in deviations of the expected logits."""
        ids = self.tokens[which][start:stop]
        every = tuple(range(len(ids)))
        span = Span(ids, start, table, row, logits_at=every, captures=captures)
        (logits,) = self.backend.forward(Batch((span,), self.pools))
        return self.error(logits, which, start)

    def fresh(self, which: int, row: int, *stops: int) -> tuple[PageTable, float]:
        """A sequence from nothing, in passes up to these lengths."""
        table, errors = self.table(LENGTHS[which]), []
        self.pools.clear_state(row)
        for start, stop in zip((0, *stops), stops, strict=False):
            errors.append(self.run(which, start, stop, table, row))
        return table, max(errors)

    def error(self, logits: torch.Tensor, which: int, start: int) -> float:
        expected = self.expected[which]
        gap = (logits - expected[start : start + len(logits)]).abs().max()
        return float(gap / expected.std())

    def resumed(self, table: PageTable, length: int) -> PageTable:
        """A sequence's table up to a length, the page in which it goes on copied."""
        whole, tail = divmod(length, self.page_size)
        own = self.take(-(-LENGTHS[0] // self.page_size) - whole)
        if tail:
            self.pools.copy_tail("full", int(table.pages[whole]), int(own[0]), tail)
        return PageTable(self.page_size, np.concatenate([table.pages[:whole], own]))


@pytest.mark.parametrize("case", CASES)
def test_every_way_of_computing_gives_the_stock_logits(case: str) -> None:
    """At once, in chunks, in steps, and resumed after others used arena and rows."""
    variant, page_size, changes = CASES[case]
    subject = Subject(variant, page_size, changes)
    pools = subject.pools
    errors = {
        "one": subject.fresh(0, 0, 70)[1],
        "chunks": subject.fresh(0, 1, 1, 3, 14, 40, 70)[1],
        "steps": subject.fresh(0, 2, *range(1, 12))[1],
    }

    pools.clear_state(3)
    table, saved = subject.table(70), {}
    for start, stop, cuts in ((0, 33, (2, 21)), (33, 60, (34, 50))):
        staged = [Capture(cut, pools.staging_rows[i]) for i, cut in enumerate(cuts)]
        subject.run(0, start, stop, table, 3, *staged)
        for capture in staged:
            saved[capture.length] = subject.take(pools.state_pages)
            pools.save_state(capture.row, saved[capture.length])
    gone, _ = subject.fresh(1, 3, 30)
    pools.on_free(gone.pages)
    for row in range(3):
        subject.fresh(1 + row % 2, row, 21)
    for cut, row in ((50, 0), (2, 3), (34, 2), (21, 1)):
        pools.load_state(saved[cut], row)
        errors[f"resumed at {cut}"] = subject.run(0, cut, 70, subject.resumed(table, cut), row)
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.slow  # every family is probed for it
@pytest.mark.parametrize("variant", FAMILIES)
def test_sequences_of_unequal_length_decode_together(variant: str) -> None:
    subject = Subject(variant, 8, {})
    rows = (3, 0, 2)
    tables = [subject.fresh(which, row, LENGTHS[which] - 6)[0] for which, row in enumerate(rows)]
    for step in range(6, 0, -1):
        at = [length - step for length in LENGTHS]
        spans = tuple(
            Span(subject.tokens[i][at[i] : at[i] + 1], at[i], tables[i], rows[i], (0,))
            for i in range(3)
        )
        outs = subject.backend.forward(Batch(spans, subject.pools))
        errors = [subject.error(logits, i, at[i]) for i, logits in enumerate(outs)]
        assert max(errors) <= TOLERANCE, errors


def test_layers_of_a_kind_share_a_sidecar() -> None:
    layout = {name: TransformersBackend(build(name)).kv_layout.sidecars for name in FAMILIES}
    shapes = {
        name: {spec.name: (spec.shape, spec.tokens) for spec in sidecars}
        for name, sidecars in layout.items()
    }
    assert shapes == {
        "qwen4_exp": {"indexer": ((2, 16), 1)},
        "qwen4_exp_ple": {"indexer": ((2, 16), 1)},
        "deepseek_v4": {
            "compressor8": ((1, 32), 8),
            "compressor4": ((1, 32), 4),
            "indexer4": ((1, 16), 4),
        },
        "glm5_next": {"indexer": ((2, 33), 1)},
    }


def test_window_whose_values_are_its_keys_is_stored_once() -> None:
    backend = TransformersBackend(build("deepseek_v4"))
    widths = [(spec.head_dim, spec.value_width) for spec in backend.kv_layout.specs]
    assert widths == [(32, 32), (32, 0), (32, 0)]  # the first layer has a window alone


def test_what_waits_does_not_depend_on_how_a_sequence_was_cut() -> None:
    subject = Subject("deepseek_v4", 8, {})
    subject.fresh(0, 0, 67)
    subject.fresh(0, 1, 7, 8, 30, 63, 67)
    for (layer, name), rows in subject.pools.state.items():
        assert torch.allclose(rows[0], rows[1], atol=1e-5), (layer, name)
        assert rows[0].any(), (layer, name)


def test_ids_before_the_first_token_are_the_end_of_another_sequence() -> None:
    subject = Subject("qwen4_exp_ple", 8, {})
    subject.fresh(1, 0, 30)
    subject.pools.clear_state(0)  # row 1 was never used
    filled = [spec for spec in subject.backend.state_layout.specs if spec.fill]
    assert filled == [StateSpec(0, "conv2", (2,), torch.int64, END_ID)]
    for (layer, name), rows in subject.pools.state.items():
        start = END_ID if name == "conv2" else 0
        assert (rows[:2] == start).all(), (layer, name)


@pytest.mark.parametrize("variant", FAMILIES)
def test_session_reuses_what_lies_beside_the_pages(variant: str) -> None:
    model = build(variant)
    ids = np.random.default_rng(2).integers(3, 256, 70).tolist()
    settings = CacheConfig(budget="8MiB", page_size=8, prefill_chunk=16)
    with Runtime(model, tokenizer(), cache=settings, poison=True) as runtime:
        session, other = runtime.session(), runtime.session()
        options: dict[str, Any] = {"verify": True}
        turns = [
            session.generate(ids[:31], replay=ids[31:40], **options),
            other.generate(ids[:20] + ids[50:60], replay=ids[:4], **options),
            session.generate(ids[:47], replay=ids[47:52], stepwise=True, **options),
            other.generate(ids[:51] + ids[60:64], replay=ids[:4], **options),
            session.generate(ids[:53], replay=ids[53:60], **options),
        ]
    assert [turn.usage.cached_tokens for turn in turns][2:] == [40, 51, 51]
    for turn in turns:
        assert turn.verify is not None
        assert turn.verify.ok, turn.verify


@pytest.mark.parametrize("variant", FAMILIES)
def test_damage_beside_the_pages_is_reported(variant: str) -> None:
    """One page's entries at a time, of each sidecar: verification names it."""
    ids = np.random.default_rng(2).integers(3, 256, 60).tolist()
    settings = CacheConfig(budget="8MiB", page_size=8, prefill_chunk=16)
    with Runtime(build(variant), tokenizer(), cache=settings, poison=True) as runtime:
        pools, cache = runtime.cache.pools, runtime.cache
        assert isinstance(pools, TensorPools)
        runtime.session().generate(ids[:40], max_new_tokens=0)

        def page() -> int:
            root = cache.tree.root(runtime.namespace(None).digest())
            match = cache.tree.match(root, np.array(ids[:40], dtype=np.int32), 40)
            assert match.boundary == 40
            return int(path_pages(match.node, "full", runtime.config.page_size, 1, 2)[0])

        where = runtime.on_engine(page)
        for turn_no, name in enumerate(pools.sidecars):
            entries = pools.sidecars[name]
            sound = entries[where].clone()
            runtime.on_engine(lambda entries=entries: entries[where].mul_(1.01))
            prompt = [*ids[:40], 100 + turn_no, *ids[41:48]]
            turn = runtime.session().generate(prompt, replay=[5, 6], verify=True)
            runtime.on_engine(lambda entries=entries, sound=sound: entries[where].copy_(sound))
            assert turn.usage.cached_tokens == 40
            report = turn.verify
            assert report is not None
            assert not report.ok
            off = [layer for layer, error in report.layers.items() if error > 1e-4]
            assert [layer for layer in off if layer.startswith(f"{name}[")], off
        turn = runtime.session().generate(ids, replay=[5, 6], verify=True)
        assert turn.verify is not None
        assert turn.verify.ok
        beside = [layer for layer in turn.verify.layers if "[" in layer]
        assert len(beside) == sum(spec.shape[0] for spec in pools.kv_layout.sidecars)


@pytest.mark.parametrize(
    ("variant", "beside"),
    [("qwen4_exp", 2 * 16 * 4), ("deepseek_v4", 32 * 4 // 8 + (32 + 16) * 4 // 4)],
)
def test_bytes_of_a_token_count_what_lies_beside_its_pages(variant: str, beside: int) -> None:
    backend = TransformersBackend(build(variant))
    assert backend.shape.kv_bytes_per_token == backend.kv_layout.token_bytes + beside


def test_runtime_refuses_a_page_size_that_splits_entries() -> None:
    with pytest.raises(ConfigError, match="page_size is 12, but compressor8"):
        Runtime(build("deepseek_v4"), tokenizer(), cache=CacheConfig(page_size=12))


def test_selection_that_leaves_first_tokens_nothing_is_refused() -> None:
    model = build("glm5_next", text_config={**GLM5, "index_kpool_always_select_tail": False})
    with pytest.raises(UnsupportedModel, match="index_kpool_always_select_tail is off"):
        TransformersBackend(model)
