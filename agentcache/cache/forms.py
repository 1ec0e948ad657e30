"""The tree's components by the form of their data, on which it depends how that is filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from agentcache.components.base import SnapshotComponent, WindowComponent
from agentcache.components.full import FullComponent

if TYPE_CHECKING:
    from agentcache.tree.radix_tree import RadixTree

__all__ = ["Forms"]

_C = TypeVar("_C", FullComponent, SnapshotComponent)


@dataclass(frozen=True, slots=True)
class Forms:
    """edge: its pages lie along the nodes' edges. snapshot: it copies something at the nodes' ends.
    windows: their pages lie before the nodes' ends. None and empty where the tree has none such.
    """

    edge: FullComponent | None
    snapshot: SnapshotComponent | None
    windows: tuple[WindowComponent, ...]

    @classmethod
    def of(cls, tree: RadixTree) -> Forms:
        """Those of a tree, which has at most one of each of the first two."""
        windows = tuple(rule for rule in tree.rules if isinstance(rule, WindowComponent))
        return cls(_only(tree, FullComponent), _only(tree, SnapshotComponent), windows)


def _only(tree: RadixTree, base: type[_C]) -> _C | None:
    found = [rule for rule in tree.rules if isinstance(rule, base)]
    assert len(found) <= 1, f"{len(found)} components of the form {base.__name__}; one can be"
    return found[0] if found else None
