"""Chat templates cut at their main loop, where that cannot change what they write.

The loop's body may then run for one message alone. It may see the message, the ones beside it, its
place, and values that can be compared; a template whose body sees more is `Unfit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2
from jinja2 import meta, nodes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

__all__ = ["ITEMS", "REPLY_PROMPT", "TemplateCut", "Unfit", "cut_template", "module_of"]

ITEMS = "stepwise_items"
"""The variable that holds what the loop goes through; for the body, pairs of item and place."""

REPLY_PROMPT = "add_generation_prompt"
"""The variable that says whether a reply is asked for."""

_LOOP = "stepwise_loop"
_MESSAGES = "messages"
_CAUSAL = frozenset({"index", "index0", "first", "previtem"})
_AHEAD = frozenset({"last", "nextitem"})


class Unfit(Exception):
    """The template cannot be cut, or its body cannot be run for one message alone."""


@dataclass(frozen=True, slots=True)
class TemplateCut:
    """The parts of a template, each to be compiled on its own.

    looks_ahead: the body asks for the item after its own. seen: names whose values the body can
    see, apart from its item. lists: names of lists of messages, of which it may ask for neighbours.
    asks_early: whether a reply is asked for matters before the end of the loop.
    """

    before: list[nodes.Node]
    body: list[nodes.Node]
    after: list[nodes.Node]
    looks_ahead: bool
    seen: frozenset[str]
    lists: frozenset[str]
    asks_early: bool


def cut_template(environment: jinja2.Environment, source: str) -> TemplateCut:
    """The template cut at the last loop of its top level. Raises Unfit."""
    before, loop, after = _cut(environment, source)
    looks_ahead, seen = _Body(environment, before, loop, after).check()
    body: list[nodes.Node] = [_single(loop)]
    asks_early = any(name.name == REPLY_PROMPT for name in _names([*before, *body]))
    return TemplateCut(before, body, after, looks_ahead, seen, _lists(loop), asks_early)


def module_of(environment: jinja2.Environment, body: list[nodes.Node]) -> nodes.Template:
    """Nodes as a template of their own."""
    module = nodes.Template(body, lineno=1)
    module.set_lineno(1)
    module.set_environment(environment)
    return module


def _lists(loop: nodes.For) -> frozenset[str]:
    """Names of lists of messages."""
    own = {loop.iter.name} if isinstance(loop.iter, nodes.Name) else set()
    return frozenset({_MESSAGES, *own})


def _cut(
    environment: jinja2.Environment, source: str
) -> tuple[list[nodes.Node], nodes.For, list[nodes.Node]]:
    """What stands before the last loop of the top level, the loop, and what follows it."""
    body = environment.parse(source).body
    loops = [i for i, node in enumerate(body) if isinstance(node, nodes.For)]
    if not loops:
        raise Unfit
    loop = body[loops[-1]]
    assert isinstance(loop, nodes.For)
    if loop.test or loop.else_ or loop.recursive or not isinstance(loop.target, nodes.Name):
        raise Unfit
    if any(True for _ in loop.find_all((nodes.Break, nodes.Include, nodes.Import))):
        raise Unfit
    items = nodes.Assign(nodes.Name(ITEMS, "store"), loop.iter, lineno=loop.lineno)
    return [*body[: loops[-1]], items], loop, body[loops[-1] + 1 :]


class _Body:
    """The body of the loop, and whether it may run for one item alone."""

    def __init__(
        self,
        environment: jinja2.Environment,
        before: list[nodes.Node],
        loop: nodes.For,
        after: list[nodes.Node],
    ) -> None:
        self._environment = environment
        self._before = before
        self._loop = loop
        self._after = after

    def check(self) -> tuple[bool, frozenset[str]]:
        """Whether the body looks at the item after its own, and the names it sees. Raises Unfit.

        Renames the loop's variable, which stands for another loop once the body runs alone.
        """
        loop, lists = self._loop, _lists(self._loop)
        ahead = _any_looks_ahead(loop.body, lists)
        module = nodes.Template(self._before, lineno=1)
        macros = list(module.find_all(nodes.Macro))
        seen_by_macros = self._free(macros)
        if seen_by_macros & {*lists, "loop"}:
            raise Unfit
        if macros and _stored(self._before) & _stored(self._after):
            raise Unfit  # a macro would go on seeing the first of two values
        if any(found.name == "random" for found in loop.find_all(nodes.Filter)):
            raise Unfit
        seen = self._free([_single(loop)]) | seen_by_macros
        return ahead, frozenset(seen) - {ITEMS, *lists}

    def _free(self, body: Sequence[nodes.Node]) -> set[str]:
        """Names that nodes take from outside."""
        return meta.find_undeclared_variables(module_of(self._environment, list(body)))


def _stored(body: Sequence[nodes.Node]) -> set[str]:
    return {name.name for name in _names(body) if name.ctx == "store"}


def _looks_ahead(node: nodes.Node, lists: frozenset[str]) -> bool:
    """Whether a node of the body asks for what follows its item. Raises Unfit for questions that
    cannot be answered from the item's place, and renames `loop` on the way."""
    if isinstance(node, nodes.For):
        # Inside, `loop` is the inner loop's.
        if any(n.name == "loop" for n in _names(node.else_)):
            raise Unfit
        if any(n.name in lists for n in _names((*node.body, *node.else_))):
            raise Unfit
        return _looks_ahead(node.iter, lists)
    if isinstance(node, nodes.Getattr) and _is_name(node.node, {"loop"}):
        return _loop_attribute(node)
    if isinstance(node, nodes.Getitem) and _is_name(node.node, lists):
        return _neighbour(node)
    if isinstance(node, nodes.Name) and node.name in {"loop", *lists}:
        raise Unfit
    return _any_looks_ahead(node.iter_child_nodes(), lists)


def _any_looks_ahead(some: Iterable[nodes.Node], lists: frozenset[str]) -> bool:
    """`_looks_ahead` of each, also of those after one that does."""
    ahead = [_looks_ahead(node, lists) for node in some]
    return any(ahead)


def _names(some: Sequence[nodes.Node]) -> list[nodes.Name]:
    return list(nodes.Template(list(some), lineno=1).find_all(nodes.Name))


def _loop_attribute(node: nodes.Getattr) -> bool:
    if node.attr not in _CAUSAL | _AHEAD:
        raise Unfit
    assert isinstance(node.node, nodes.Name)
    node.node.name = _LOOP
    return node.attr in _AHEAD


def _neighbour(node: nodes.Getitem) -> bool:
    """`messages[0]`, or the message beside the loop's own.

    Any other constant place may lie behind the loop's own, or not be there yet.
    """
    place, step = node.arg, 0
    if isinstance(place, nodes.Const) and type(place.value) is int and place.value == 0:
        return False
    if isinstance(place, (nodes.Add, nodes.Sub)) and isinstance(place.right, nodes.Const):
        if place.right.value != 1:
            raise Unfit
        step = 1 if isinstance(place, nodes.Add) else -1
        place = place.left
    if not (isinstance(place, nodes.Getattr) and _is_name(place.node, {"loop"})):
        raise Unfit
    base = {"index0": 0, "index": 1}.get(place.attr)
    if base is None or base + step > 1:
        raise Unfit
    _loop_attribute(place)
    return base + step > 0


def _is_name(node: nodes.Node, names: Collection[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _single(loop: nodes.For) -> nodes.For:
    """The loop over pairs of an item and its place."""
    target = nodes.Tuple([loop.target, nodes.Name(_LOOP, "store")], "store", lineno=loop.lineno)
    items = nodes.Name(ITEMS, "load", lineno=loop.lineno)
    return nodes.For(target, items, loop.body, [], None, False, lineno=loop.lineno)
