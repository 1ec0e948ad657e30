"""A chat template run message by message, so that a longer list renders only what is new.

A template is cut at its main loop over the messages. What stands before and after the loop runs in
every rendering; what the loop wrote for a message is kept. That is right only where nothing but the
message, its place and values that are compared can reach the loop's body, so `StepwiseTemplate.of`
reads the template and gives None for every one that uses more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, cast

import jinja2
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace
from transformers.utils.chat_template_utils import _compile_jinja_template

from agentcache.engine.append_log import AppendLog
from agentcache.engine.template_cut import ITEMS, REPLY_PROMPT, Unfit, cut_template, module_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FunctionType

    from jinja2 import nodes

__all__ = ["Passed", "Rendering", "Run", "StepwiseRenderer", "StepwiseTemplate"]

_COMPARED = 12
"""Renderings of a template that are made whole too, to see that both are the same."""

_PURE_GLOBALS = frozenset({"namespace", "dict", "range", "raise_exception"})
_PLAIN_TYPES = (str, int, float, bool, type(None), list, tuple, dict, Undefined, Macro)
_MOST_SCHEMAS = 256
_MOST_RUNS = 4
"""Runs kept per chat: a template may look otherwise with a reply header, or after a question."""


_Spaces = dict[str, dict[str, Any]]
"""Attributes of namespaces, by the namespace's name."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What a loop wrote for one item, and its namespaces after it."""

    text: str
    state: _Spaces


@dataclass(slots=True)
class Run:
    """Steps of a loop that were taken from the same start.

    inputs: values the body can see, by name. start: its namespaces at the beginning. lead: what
    stands before the loop. known: items and their steps, replaced as one, so that others may read
    them at any time.
    """

    inputs: dict[str, Any]
    start: _Spaces
    lead: str = ""
    known: tuple[AppendLog[Any], AppendLog[Step]] = field(
        default_factory=lambda: (AppendLog(), AppendLog())
    )


@dataclass(frozen=True, slots=True, eq=False)
class Rendering:
    """A rendered text. Its beginning, the lead and the steps, others may have in common with it.

    skipped: how many messages stand before that of the first step; None where steps are not one for
    each message that follows.
    """

    lead: str
    steps: AppendLog[Step]
    tail: str
    skipped: int | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join((self.lead, *map(_text_of, self.steps), self.tail))

    def after(self, base: Rendering) -> str | None:
        """What follows the lead and the steps of `base`; None where it may not begin with them."""
        shared = len(base.steps)
        if self.steps.num_shared(base.steps) < shared or self.lead != base.lead:
            return None
        return "".join((*map(_text_of, self.steps[shared:]), self.tail))


_text_of = attrgetter("text")


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
    ) -> Rendering | None:
        """What the tokenizer's template writes; None where only `whole` can tell."""
        passed = self.passed(messages, tools, runs, reply_prompt=reply_prompt)
        return None if passed is None else passed.rendering(reply_prompt)

    def passed(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        runs: list[Run],
        *,
        reply_prompt: bool,
    ) -> Passed | None:
        """The template run up to the end of its loop."""
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
            REPLY_PROMPT: reply_prompt,
        }
        passed = template.passed(variables, runs)
        compared = self._compared.get(source, 0)
        if compared < _COMPARED and passed is not None:
            self._compared[source] = compared + 1
            text = passed.rendering(reply_prompt).text
            if text != self._whole(messages, tools, reply_prompt=reply_prompt):
                self._templates[source] = None
                return None
        return passed


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """A template that was run up to the end of its loop, for one list of messages.

    asked: whether it was run for a list that asks for a reply; None where it does not look at that
    before the end of the loop. skipped: of its renderings.
    """

    lead: str
    steps: AppendLog[Step]
    rest: str
    asked: bool | None
    skipped: int | None
    _after: jinja2.Template
    _values: dict[str, Any]
    _spaces: dict[str, Namespace]

    def fits(self, reply_prompt: bool) -> bool:
        """Whether it can end with, or without, a request for a reply."""
        return self.asked is None or self.asked == reply_prompt

    def rendering(self, reply_prompt: bool) -> Rendering:
        """The whole text. Raises whatever the template raises."""
        state = _state(self._spaces)
        values = dict(self._values)
        if self.asked is None:
            values[REPLY_PROMPT] = reply_prompt
        try:
            context = self._after.new_context(values, shared=True)
            ending = "".join(self._after.root_render_func(context))
        finally:
            _restore(self._spaces, state)
        return Rendering(self.lead, self.steps, self.rest + ending, self.skipped)


class StepwiseTemplate:
    """One template, cut. Any number of threads may use it, each with runs of its own."""

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        """Raises Unfit."""
        self._undefined = environment.undefined
        cut = cut_template(environment, source)
        self._asks_early = cut.asks_early
        self._looks_ahead, self._seen, self._lists = cut.looks_ahead, cut.seen, cut.lists
        own = environment.overlay()
        own.filters = {**environment.filters, "tojson": _Remembered(environment.filters["tojson"])}
        self._before = _compiled(own, cut.before)
        self._body = _compiled(own, cut.body)
        self._after = _compiled(own, cut.after)

    @classmethod
    def of(cls, environment: jinja2.Environment, source: str) -> StepwiseTemplate | None:
        """The template cut, or None where that might change what it writes."""
        try:
            return cls(environment, source)
        except (Unfit, jinja2.TemplateError):
            return None

    def passed(self, variables: Mapping[str, Any], runs: list[Run]) -> Passed | None:
        """The template run up to the end of its loop; `runs` are used and added to.

        The messages that `runs` were filled with have to be the same objects. None where a value
        could hide a state of its own. Raises whatever the template raises.
        """
        context = self._before.new_context(dict(variables))
        lead = "".join(self._before.root_render_func(context))
        values = dict(context.get_all())
        items = values[ITEMS]
        spaces = {name: v for name, v in values.items() if isinstance(v, Namespace)}
        seen = {name: values[name] for name in self._seen if name in values}
        if not isinstance(items, list) or not _is_plain(seen, spaces):
            return None
        inputs = {name: value for name, value in seen.items() if name not in spaces}
        run = _run_for(runs, inputs, _state(spaces))
        if run.lead == lead:
            lead = run.lead
        else:
            run.lead = lead
        try:
            steps, rest = self._steps(run, items, values, spaces)
        except Unfit:
            return None
        asked = variables.get(REPLY_PROMPT) if self._asks_early else None
        messages = variables["messages"]
        skipped = len(messages) - len(items)
        is_each = skipped >= 0 and items == messages[skipped:]
        return Passed(
            lead, steps, rest, asked, skipped if is_each else None, self._after, values, spaces
        )

    def _steps(
        self, run: Run, items: list[Any], values: dict[str, Any], spaces: Mapping[str, Namespace]
    ) -> tuple[AppendLog[Step], str]:
        """The loop's text for each item, from the first one that is not known on; that of an item
        which the next one may change apart."""
        stable = max(0, len(items) - self._looks_ahead)
        items_before, steps_before = run.known
        known = _num_same(items[:stable], items_before)
        steps = steps_before.first(known)
        _restore(spaces, steps[known - 1].state if known else run.start)
        watched = {name: _Watched(values[name]) for name in self._lists if name in values}
        state = steps[-1].state if known else run.start
        taken: list[Step] = []
        for index in range(known, len(items)):
            text = self._step(items, index, {**values, **watched})
            now = _state(spaces)
            state = state if _same_spaces(state, now) else now
            taken.append(Step(text, state))
        steps = steps.extend(taken[: stable - known])
        if stable > len(items_before):
            run.known = items_before.first(known).extend(items[known:stable]), steps
        return steps, "".join(map(_text_of, taken[stable - known :]))

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


def _compiled(environment: jinja2.Environment, part: list[nodes.Node]) -> jinja2.Template:
    """A part of a template. Its globals are one dict, which contexts are made of much faster than
    of the chain of dicts that jinja2 makes."""
    template = environment.from_string(module_of(environment, part))
    template.globals = dict(template.globals)
    return template


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


def _num_same(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading items are the same objects."""
    if all(map(is_, a, b)):
        return min(len(a), len(b))
    return next(i for i, each in enumerate(map(is_, a, b)) if not each)


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
