"""The integrity checks notice every kind of damage; a check that nothing fails proves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from testkit.helpers import NAMESPACE, Forest, ids, rules_of

from agentcache.tree.check import check_pages, check_tree
from agentcache.tree.node import Node, Residency
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from collections.abc import Callable


def forest() -> tuple[Forest, dict[str, Node]]:
    made = Forest(page_size=2)
    names = {
        "top": made.add(ids(1, 2, 3)),
        "left": made.add(ids(1, 2, 3, 4, 5, 6)),
        "right": made.add(ids(1, 2, 3, 7)),
    }
    return made, names


def swap_children(nodes: dict[str, Node]) -> None:
    children = nodes["top"].children
    children[4], children[7] = children[7], children[4]


def change_pages(nodes: dict[str, Node], slots: list[int], start: int) -> None:
    left = nodes["left"]
    assert (left.start, left.data[Kind.FULL].slots.tolist()) == (3, [3, 4])
    left.data[Kind.FULL] = Residency(ids(*slots), start)


DAMAGE: dict[str, tuple[Callable[[dict[str, Node]], None], str | None]] = {
    "removed": (lambda nodes: setattr(nodes["left"], "generation", 1), "left the tree"),
    "swapped": (swap_children, "another token"),
    "moved": (lambda nodes: setattr(nodes["left"], "end", 7), "does not go on"),
    "negative locks": (lambda nodes: setattr(nodes["top"], "locks", -1), None),
    "negative refs": (lambda nodes: setattr(nodes["top"], "refs", -1), None),
    "no pages": (lambda nodes: nodes["left"].data.pop(Kind.FULL), "no KV"),
    "pages missing": (lambda nodes: change_pages(nodes, [3], 3), "pages for"),
    "pages too many": (lambda nodes: change_pages(nodes, [3, 4, 30], 3), "pages for"),
    "pages begin late": (lambda nodes: change_pages(nodes, [4], 4), "begins at 4"),
    "leaf without checkpoint": (lambda nodes: nodes["left"].data.pop(Kind.STATE), "nobody can"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_the_tree_is_noticed(name: str) -> None:
    made, nodes = forest()
    check_tree(made.tree)
    damage, message = DAMAGE[name]
    damage(nodes)
    with pytest.raises(AssertionError, match=message):
        check_tree(made.tree)


def test_a_node_without_tokens_is_noticed() -> None:
    made, nodes = forest()
    left = nodes["left"]
    left.tokens, left.end = left.tokens[:0], 3
    with pytest.raises((AssertionError, IndexError)):
        check_tree(made.tree)


def test_a_locked_leaf_may_stand_without_a_checkpoint() -> None:
    made, nodes = forest()
    del nodes["left"].data[Kind.STATE]
    made.tree.lock(nodes["left"])
    check_tree(made.tree)


def counts(made: Forest, nodes: dict[str, Node]) -> tuple[IntArray, list[IntArray], int]:
    """References as they should be, with a lease that holds two pages, one of them alone."""
    refs = np.zeros(made.num_pages + 3, dtype=np.int32)
    for node in nodes.values():
        for residency in node.data.values():
            refs[residency.slots] += 1
    held = [nodes["top"].data[Kind.FULL].slots[-1:], np.array([made.num_pages], dtype=np.int32)]
    for pages in held:
        refs[pages] += 1
    return refs, held, int((refs == 0).sum())


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("place", ["tree", "lease", "free"])
def test_page_with_a_holder_too_many_or_too_few_is_noticed(change: int, place: str) -> None:
    made, nodes = forest()
    refs, held, num_free = counts(made, nodes)
    check_pages(made.tree, refs, held, num_free)
    pages = {"tree": int(nodes["left"].data[Kind.STATE].slots[0]), "lease": int(held[1][0])}
    refs[pages.get(place, made.num_pages + 1)] += change
    with pytest.raises(AssertionError, match="counted"):
        check_pages(made.tree, refs, held, num_free)


def test_wrong_count_of_free_pages_is_noticed() -> None:
    made, nodes = forest()
    refs, held, num_free = counts(made, nodes)
    with pytest.raises(AssertionError, match="free pages"):
        check_pages(made.tree, refs, held, num_free + 1)


def test_lease_nobody_counted_is_noticed() -> None:
    made, nodes = forest()
    refs, held, num_free = counts(made, nodes)
    with pytest.raises(AssertionError, match="counted"):
        check_pages(made.tree, refs, held[:1], num_free)


def test_window_that_does_not_cover_what_it_reaches_is_noticed() -> None:
    tree = RadixTree(rules_of(4, kv=False, window=5, state=False, swa_page=2))
    node = tree.insert(tree.root(NAMESPACE), ids(*range(9)), 9).node
    tree.commit(node, Kind.SWA, ids(2, 3))  # positions 5 to 8 lie in three pages
    with pytest.raises(AssertionError, match="2 pages for 3"):
        check_tree(tree)
    tree.drop(node, Kind.SWA, 0.0)
    tree.commit(node, Kind.SWA, ids(2, 3, 4))
    check_tree(tree)
