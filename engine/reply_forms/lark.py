"""Grammars written in llguidance's form of Lark."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from agentcache.engine.grammar import WHITE_SPACE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.engine.segments import Cutter

__all__ = ["Lark"]


class Lark:
    """Collects the rules of one grammar. Control tokens in its texts are the tokens themselves."""

    def __init__(self, cutter: Cutter) -> None:
        self._cutter = cutter
        self._rules: dict[str, str] = {}

    def text(self, literal: str) -> str:
        """An expression for exactly this text; empty for the empty text."""
        return " ".join(
            json.dumps(segment.text, ensure_ascii=False)
            if segment.special_id is None
            else f"<[{segment.special_id}]>"
            for segment in self._cutter.cut(literal).segments
        )

    def rule(self, body: str, attributes: str = "") -> str:
        """A rule with this body; equal ones are one."""
        name = self._rules.setdefault(f"{attributes}: {body}", f"r{len(self._rules)}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON that a schema allows; any object where it says nothing."""
        told = dict(schema) or {"type": "object"}
        told.setdefault("x-guidance", {"whitespace_pattern": WHITE_SPACE})
        return self.rule(f"%json {json.dumps(told)}")

    def up_to(self, close: str) -> str:
        """Any text that ends in `close`, where that stands for the first time."""
        segments = self._cutter.cut(close).segments
        if segments[0].special_id is not None:
            return f"/(?s:.*)/ {self.text(close)}"
        return self.rule("/(?s:.*)/", f"[suffix={json.dumps(close, ensure_ascii=False)}]")

    def source(self, start: str) -> str:
        """The whole grammar, of which `start` is the first expression."""
        rules = [f"start: {start}", *(f"{name}{body}" for body, name in self._rules.items())]
        return "\n".join(rules) + "\n"
