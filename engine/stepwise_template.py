"""A chat template run message by message, so that a longer list renders only what is new.

A template is cut at its main loop over the messages. What stands before and after the loop runs in
every rendering; what the loop wrote for a message is kept. That is right only where nothing but the
message, its place and values that are compared can reach the loop's body, so `StepwiseTemplate.of`
reads the template and gives None for every one that uses more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import jinja2
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace
from transformers.utils.chat_template_utils import _compile_jinja_template

from agentcache.engine.template_cut import ITEMS, Unfit, cut_template, module_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FunctionType

__all__ = ["Run", "StepwiseRenderer", "StepwiseTemplate"]

_COMPARED = 12
"""Renderings of a template that are made whole too, to see that both are the same."""

_PURE_GLOBALS = frozenset({"namespace", "dict", "range", "raise_exception"})
_PLAIN_TYPES = (str, int, float, bool, type(None), list, tuple, dict, Undefined, Macro)
_MOST_SCHEMAS = 256
_MOST_RUNS = 4
"""Runs kept per chat: a template may look otherwise with a reply header, or after a question."""


_Spaces = dict[str, dict[str, Any]]
"""Attributes of namespaces, by the namespace's name."""


@dataclass(slots=True)
class Run:
    """Steps of a loop that were taken from the same start.

    inputs: values the body can see, by name. start: its namespaces at the beginning. steps: items,
    what the loop wrote for each, and the namespaces after it; replaced as one, so that others may
    read it at any time.
    """

    inputs: dict[str, Any]
    start: _Spaces
    steps: tuple[list[Any], list[str], list[_Spaces]] = field(default=([], [], []))


@dataclass(frozen=True, slots=True)
class _Place:
    """What a body may ask of its loop."""

    index: int
    index0: int
    first: bool
    last: bool
    previtem: Any
    nextitem: Any


class StepwiseRenderer:
    """Renders as a tokenizer does, but only what is new, with the templates that allow it.

    Messages have to be dicts of plain JSON values, with reasoning under all names it goes by.

    `whole` renders a list as the tokenizer does. The first renderings are compared with it, and a
    template that once comes out otherwise is never run stepwise again.
    """

    def __init__(self, source: Any, kwargs: Mapping[str, Any], whole: Callable[..., str]) -> None:
        self._source = source
        self._kwargs = kwargs
        self._whole = whole
        self._templates: dict[str, StepwiseTemplate | None] = {}
        self._compared: dict[str, int] = {}

    def template(self, source: str) -> StepwiseTemplate | None:
        """A template cut, or None where it has to be run whole."""
        if source not in self._templates:
            environment = _compile_jinja_template(source).environment
            self._templates[source] = StepwiseTemplate.of(environment, source)
        return self._templates[source]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        runs: list[Run],
        *,
        reply_prompt: bool,
    ) -> str | None:
        """What the tokenizer's template writes; None where only `whole` can tell."""
        source = self._source.get_chat_template(None, tools)
        template = self.template(source)
        if template is None:
            return None
        variables = {
            **self._source.special_tokens_map,
            **self._kwargs,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": reply_prompt,
        }
        text = template.render(variables, runs)
        compared = self._compared.get(source, 0)
        if compared < _COMPARED and text is not None:
            self._compared[source] = compared + 1
            if text != self._whole(messages, tools, reply_prompt=reply_prompt):
                self._templates[source] = None
                return None
        return text


class StepwiseTemplate:
    """One template, cut. Any number of threads may use it, each with runs of its own."""

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        """Raises Unfit."""
        self._undefined = environment.undefined
        cut = cut_template(environment, source)
        self._looks_ahead, self._seen, self._lists = cut.looks_ahead, cut.seen, cut.lists
        own = environment.overlay()
        own.filters = {**environment.filters, "tojson": _Remembered(environment.filters["tojson"])}
        self._before = own.from_string(module_of(own, cut.before))
        self._body = own.from_string(module_of(own, cut.body))
        self._after = own.from_string(module_of(own, cut.after))

    @classmethod
    def of(cls, environment: jinja2.Environment, source: str) -> StepwiseTemplate | None:
        """The template cut, or None where that might change what it writes."""
        try:
            return cls(environment, source)
        except (Unfit, jinja2.TemplateError):
            return None

    def render(self, variables: Mapping[str, Any], runs: list[Run]) -> str | None:
        """What the template writes; `runs` are used and added to.

        The messages that `runs` were filled with have to be the same objects. None where a value
        could hide a state of its own. Raises whatever the template raises.
        """
        context = self._before.new_context(dict(variables))
        pieces = list(self._before.root_render_func(context))
        values = dict(context.get_all())
        items = values[ITEMS]
        spaces = {name: v for name, v in values.items() if isinstance(v, Namespace)}
        seen = {name: values[name] for name in self._seen if name in values}
        if not isinstance(items, list) or not _is_plain(seen, spaces):
            return None
        inputs = {name: value for name, value in seen.items() if name not in spaces}
        run = _run_for(runs, inputs, _state(spaces))
        try:
            pieces += self._steps(run, items, values, spaces)
        except Unfit:
            return None
        ending = self._after.new_context(values)
        pieces += self._after.root_render_func(ending)
        return "".join(pieces)

    def _steps(
        self, run: Run, items: list[Any], values: dict[str, Any], spaces: Mapping[str, Namespace]
    ) -> list[str]:
        """The loop's text for each item, from the first one that is not known on."""
        stable = len(items) - self._looks_ahead
        items_before, texts_before, states_before = run.steps
        known = min(len(items_before), stable)
        if not all(map(is_, items[:known], items_before)):
            known = 0
        texts, states = texts_before[:known], states_before[:known]
        _restore(spaces, states[-1] if states else run.start)
        watched = {name: _Watched(values[name]) for name in self._lists if name in values}
        for index in range(known, len(items)):
            texts.append(self._step(items, index, {**values, **watched}))
            states.append(_state(spaces))
        if stable > len(items_before):
            run.steps = items[:stable], texts[:stable], states[:stable]
        return texts

    def _step(self, items: list[Any], index: int, values: dict[str, Any]) -> str:
        last = index + 1 == len(items)
        place = _Place(
            index + 1,
            index,
            index == 0,
            last,
            items[index - 1] if index else self._undefined("there is no previous item"),
            self._undefined("there is no next item") if last else items[index + 1],
        )
        values[ITEMS] = [(items[index], place)]
        context = self._body.new_context(values, shared=True)
        return "".join(self._body.root_render_func(context))


class _Remembered:
    """A filter that writes a tool's schema once. Schemas are never changed."""

    def __init__(self, write: Callable[..., str]) -> None:
        self._write = write
        self._written: dict[Any, tuple[Any, str]] = {}

    def __call__(self, value: Any, *args: Any, **how: Any) -> str:
        if not (isinstance(value, dict) and ("parameters" in value or "function" in value)):
            return self._write(value, *args, **how)
        key = (id(value), repr(args), repr(sorted(how.items())))
        known = self._written.get(key)
        if known is not None and known[0] is value:
            return known[1]
        text = self._write(value, *args, **how)
        if len(self._written) >= _MOST_SCHEMAS:
            self._written.clear()
        self._written[key] = (value, text)
        return text


class _Watched(list[Any]):
    """A list that a body may ask for what comes before its item, but not for its end."""

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, int) or place < 0:
            raise Unfit
        return super().__getitem__(place)


def _run_for(runs: list[Run], inputs: dict[str, Any], start: _Spaces) -> Run:
    """The run that began like this, or a new one, moved to the end of the list.

    Other threads may do the same with the list: it is replaced as one, so that one may lose the
    run that another adds, and has to render it again, but none sees it half changed.
    """
    known = tuple(runs)
    found = (run for run in known if _same_spaces(run.start, start) and _same(run.inputs, inputs))
    run = next(found, None) or Run(inputs, start)
    if not known or known[-1] is not run:
        runs[:] = [*(other for other in known if other is not run), run][-_MOST_RUNS:]
    return run


def _same_spaces(a: _Spaces, b: _Spaces) -> bool:
    """Whether namespaces begin with the same values."""
    return a.keys() == b.keys() and all(_same(space, b[name]) for name, space in a.items())


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two runs see equal values under the same names."""
    return a.keys() == b.keys() and all(_equal(value, b[name]) for name, value in a.items())


def _equal(a: Any, b: Any) -> bool:
    """Whether values are written alike. Macros are the template's own, made anew each time; values
    that are equal under other types, such as 1 and True, may be written otherwise."""
    if a is b:
        return True
    if isinstance(a, Macro):
        return isinstance(b, Macro) and _code(a) is _code(b)
    if isinstance(a, Undefined):
        return type(a) is type(b)
    return bool(a == b) and repr(a) == repr(b)


def _code(macro: Macro) -> object:
    """What is the same for each making of one macro."""
    return cast("FunctionType", macro._func).__code__


def _is_plain(inputs: Mapping[str, Any], spaces: Mapping[str, Namespace]) -> bool:
    """Whether no value can hold a state that is not seen, as a `joiner` does."""
    attributes = [v for space in spaces.values() for v in _attributes(space).values()]
    return all(
        isinstance(value, _PLAIN_TYPES) or name in spaces or name in _PURE_GLOBALS
        for name, value in inputs.items()
    ) and all(isinstance(value, _PLAIN_TYPES) for value in attributes)


def _attributes(space: Namespace) -> dict[str, Any]:
    attributes: dict[str, Any] = object.__getattribute__(space, "_Namespace__attrs")
    return attributes


def _state(spaces: Mapping[str, Namespace]) -> _Spaces:
    return {name: dict(_attributes(space)) for name, space in spaces.items()}


def _restore(spaces: Mapping[str, Namespace], state: Mapping[str, Mapping[str, Any]]) -> None:
    for name, space in spaces.items():
        own = _attributes(space)
        own.clear()
        own.update(state[name])
