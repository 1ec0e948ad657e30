"""Who shares with whom hangs on digests: they are equal where all parts are, and nowhere else."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from testkit.helpers import Forest, ids

from agentcache.tree.key import Namespace, Salt
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

# the digests' own punctuation and names among the letters, so that parts could run together
TEXTS = st.one_of(
    st.text(alphabet="a1:0\0", max_size=4),
    st.sampled_from(
        ["tenant", "adapter:1:1:", "None", "namespace:3:", "\ud800", "\N{PILE OF POO}"]
    ),
)
MAYBE = st.none() | TEXTS
BYTES = st.none() | TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass"))
NAMESPACES = st.builds(
    Namespace, model=TEXTS, tenant=MAYBE, adapter=MAYBE, shares_head=st.booleans()
)
SALTS = st.builds(Salt, at=st.integers(0, 5), tenant=MAYBE, adapter=MAYBE, content=BYTES)


@given(st.lists(NAMESPACES, min_size=2, max_size=8))
def test_digests_of_namespaces_differ_for_every_pair_of_different_parts(
    namespaces: list[Namespace],
) -> None:
    for one, two in itertools.combinations(namespaces, 2):
        assert (one.digest() == two.digest()) == (one == two)


@given(st.lists(SALTS, min_size=2, max_size=8))
def test_digests_of_salts_differ_for_every_pair_of_different_parts(salts: list[Salt]) -> None:
    for one, two in itertools.combinations(salts, 2):
        assert (one.digest() == two.digest()) == (replace(one, at=0) == replace(two, at=0))


@given(NAMESPACES, SALTS)
def test_digest_of_a_salt_is_never_that_of_a_namespace(namespace: Namespace, salt: Salt) -> None:
    assert namespace.digest() != salt.digest()
    assert len(namespace.digest()) == len(salt.digest()) == 32


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    """A text in consecutive parts."""
    return [text[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(text)])]


CUTS = st.tuples(st.integers(0, 6), st.integers(0, 6))


@given(st.text(alphabet="a1:", min_size=1, max_size=6), CUTS, CUTS, st.booleans())
def test_parts_that_concatenate_to_one_text_are_told_apart(
    text: str, first: tuple[int, int], second: tuple[int, int], shares_head: bool
) -> None:
    one, two = cut(text, first), cut(text, second)
    assume(one != two)
    assert "".join(one) == "".join(two) == text
    namespaces = [Namespace(*parts, shares_head=shares_head).digest() for parts in (one, two)]
    assert namespaces[0] != namespaces[1]
    salts = [Salt(0, a, b, c.encode()).digest() for a, b, c in (one, two)]
    assert salts[0] != salts[1]


@given(TEXTS, MAYBE, MAYBE)
def test_text_of_one_part_is_not_the_same_in_another(
    text: str, other: str | None, third: str | None
) -> None:
    assume(text not in (other, third) and other != third)
    namespaces = itertools.permutations([text, other, third])
    digests = [Namespace("m", tenant=a, adapter=b).digest() for a, b, _ in namespaces]
    assert len(set(digests)) == 6


@given(TEXTS)
def test_text_and_its_bytes_are_different_parts(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    salts = [Salt(0, content=data), Salt(0, tenant=text), Salt(0, adapter=text), Salt(0)]
    assert len({salt.digest() for salt in salts}) == 4


@pytest.mark.parametrize("part", ["tenant", "adapter"])
def test_no_value_is_not_the_empty_one(part: str) -> None:
    values = [None, "", "None", "\0", " "]
    for make in (
        lambda value: Namespace("m", **{part: value}),
        lambda value: Namespace("m", **{part: value}, shares_head=True),
        lambda value: Salt(0, **{part: value}),
    ):
        assert len({make(value).digest() for value in values}) == 5
    assert Salt(0, content=b"").digest() != Salt(0).digest()


@given(NAMESPACES, NAMESPACES)
def test_namespace_of_shared_heads_is_nobodys_own(one: Namespace, two: Namespace) -> None:
    shared, own = replace(one, shares_head=True), replace(two, shares_head=False)
    assert shared.digest() != own.digest()


@given(NAMESPACES, SALTS)
def test_equal_parts_have_equal_digests(namespace: Namespace, salt: Salt) -> None:
    assert replace(namespace).digest() == namespace.digest()
    assert replace(salt).digest() == salt.digest() == replace(salt, at=salt.at + 1).digest()


@pytest.mark.parametrize("tenants", [("a", "b"), (None, "a"), (None, ""), ("a", "a\0")])
def test_tails_of_two_tenants_behind_one_head_are_kept_apart(
    tenants: tuple[str | None, str | None],
) -> None:
    forest = Forest()
    sequence = ids(1, 2, 3, 4, 5, 6)
    root = forest.tree.root(Namespace("m", shares_head=True).digest())
    salts = [((4, Salt(4, tenant=tenant).digest()),) for tenant in tenants]
    inserted = forest.tree.insert(root, sequence, 6, salts[0])
    for node in inserted.created:
        count = -(-node.end // forest.page_size) - node.start // forest.page_size
        forest.tree.commit(node, Kind.FULL, forest.pages(count))
        forest.tree.commit(node, Kind.STATE, forest.pages(1))
    matches = [forest.tree.match(root, sequence, 6, each) for each in salts]
    assert [match.boundary for match in matches] == [6, 4]
    other = forest.tree.root(Namespace("m", tenant=tenants[0]).digest())
    assert forest.tree.match(other, sequence, 6).known_len == 0
