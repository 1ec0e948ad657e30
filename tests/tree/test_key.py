"""Namespaces and salts are typed parts; token comparison does not stumble over its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.tree.key import Namespace, Salt, common_prefix_len

if TYPE_CHECKING:
    from agentcache.types import IntArray

# few letters, the digest's own punctuation among them, so that concatenations collide
TEXTS = st.text(alphabet="a1:0", max_size=4)
PARTS = st.tuples(TEXTS, st.none() | TEXTS, st.none() | TEXTS)


def naive_prefix_len(a: IntArray, b: IntArray) -> int:
    for at, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))


@given(PARTS, PARTS)
def test_digests_are_equal_exactly_where_all_parts_are(
    first: tuple[str, str | None, str | None], second: tuple[str, str | None, str | None]
) -> None:
    same = Namespace(*first).digest() == Namespace(*second).digest()
    assert same == (first == second)


@given(st.text(max_size=6), st.data())
def test_any_two_ways_to_cut_one_text_into_parts_differ(text: str, data: st.DataObject) -> None:
    cuts = st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(sorted)
    (a, b), (c, d) = data.draw(cuts), data.draw(cuts)
    first = Namespace(text[:a], text[a:b], text[b:])
    second = Namespace(text[:c], text[c:d], text[d:])
    assert (first.digest() == second.digest()) == ((a, b) == (c, d))


@pytest.mark.parametrize("inside", ["", ":", "1:", "1:1:", "tenant:1:", "tenant:1:1:", "\0"])
def test_part_that_looks_like_the_border_of_two_parts_is_none(inside: str) -> None:
    first = Namespace("a" + inside + "b", tenant="c")
    second = Namespace("a", tenant="b" + inside + "c")
    assert first.digest() != second.digest()


@given(st.text(max_size=4))
def test_default_tenant_and_no_adapter_differ_from_every_text(text: str) -> None:
    assert Namespace("m").digest() != Namespace("m", tenant=text).digest()
    assert Namespace("m").digest() != Namespace("m", adapter=text).digest()


def test_a_text_is_another_part_as_tenant_than_as_adapter() -> None:
    assert Namespace("m", tenant="x").digest() != Namespace("m", adapter="x").digest()


def test_texts_that_utf8_cannot_hold_have_digests_of_their_own() -> None:
    lone = [Namespace("m", tenant=text).digest() for text in ("\ud800", "\ud801", "?", "\ufffd")]
    assert len(set(lone)) == 4


SALT_PARTS = st.tuples(st.none() | TEXTS, st.none() | TEXTS, st.none() | TEXTS.map(str.encode))


@given(st.integers(0, 3), SALT_PARTS, st.integers(0, 3), SALT_PARTS)
def test_digests_of_salts_are_equal_exactly_where_all_parts_but_the_position_are(
    at: int,
    first: tuple[str | None, str | None, bytes | None],
    other_at: int,
    second: tuple[str | None, str | None, bytes | None],
) -> None:
    same = Salt(at, *first).digest() == Salt(other_at, *second).digest()
    assert same == (first == second)


@given(TEXTS)
def test_a_text_is_another_part_of_a_salt_as_tenant_than_as_adapter_or_content(text: str) -> None:
    salts = [Salt(0), Salt(0, tenant=text), Salt(0, adapter=text), Salt(0, content=text.encode())]
    digests = {salt.digest() for salt in salts} | {Namespace(text).digest()}
    assert len(digests) == 5


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 2047, 2048, 2049])
def test_common_prefix_is_found_at_the_borders_of_blocks(length: int) -> None:
    a = np.random.default_rng(length).integers(0, 5, length + 3).astype(np.int32)
    b = a.copy()
    b[length] += 1
    b[length + 2] += 1
    assert common_prefix_len(a, b) == length == naive_prefix_len(a, b)
    assert common_prefix_len(a, a[:length]) == length
    assert common_prefix_len(a[:length], a) == length


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), max_size=6))
def test_common_prefix_agrees_with_a_plain_loop(a: list[int], b: list[int]) -> None:
    x, y = np.array(a, dtype=np.int32), np.array(b, dtype=np.int32)
    assert common_prefix_len(x, y) == naive_prefix_len(x, y)


def test_common_prefix_agrees_with_a_plain_loop_on_long_sequences() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        a = rng.integers(0, 9, int(rng.integers(1, 3000))).astype(np.int32)
        b = a[: int(rng.integers(1, 3000))].copy()
        if rng.random() < 0.8:
            b[int(rng.integers(len(b)))] += 1
        assert common_prefix_len(a, b) == naive_prefix_len(a, b)
