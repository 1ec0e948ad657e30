"""Two tools that a chat runs itself, so that the embedded agent has something to call."""

from __future__ import annotations

import ast
import json
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["SCHEMAS", "run_tool"]

_OPERATIONS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_MOST_CHARS = 200
_HEIGHTS = {
    "aconcagua": "6961",
    "elbrus": "5642",
    "etna": "3403",
    "everest": "8849",
    "fuji": "3776",
    "kilimanjaro": "5895",
    "matterhorn": "4478",
    "olympus": "2918",
    "vesuvius": "1281",
    "zugspitze": "2962",
}


@dataclass(frozen=True, slots=True)
class _Tool:
    description: str
    parameter: str
    run: Callable[[str], str]


def _calculate(expression: str) -> str:
    """The value of sums, differences, products and quotients, to two places."""
    if len(expression) > _MOST_CHARS:
        raise ValueError("the expression is too long")
    value = round(_value(ast.parse(expression, mode="eval").body), 2)
    return str(int(value)) if value == int(value) else str(value)


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.BinOp(left, op, right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op, operand) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(operand))
    raise ValueError("only numbers and + - * / can be computed")


def _height(mountain: str) -> str:
    """In metres above the sea."""
    height = _HEIGHTS.get(mountain.lower())
    if height is None:
        raise ValueError("not found")
    return height


_TOOLS = {
    "calculator": _Tool("Compute an arithmetic expression.", "expression", _calculate),
    "height": _Tool("Height of a mountain in metres.", "name", _height),
}

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.description,
            "parameters": {
                "type": "object",
                "properties": {tool.parameter: {"type": "string"}},
                "required": [tool.parameter],
            },
        },
    }
    for name, tool in _TOOLS.items()
]
"""The tools in OpenAI's form."""


def run_tool(function: Mapping[str, Any]) -> str:
    """The result of a call, given its name and arguments; what went wrong begins with "error: ".

    >>> run_tool({"name": "calculator", "arguments": '{"expression": "12 + 7"}'})
    '19'
    >>> run_tool({"name": "height", "arguments": {"name": "Nowhere"}})
    'error: not found'
    """
    tool = _TOOLS.get(function["name"])
    if tool is None:
        return f"error: there is no tool {function['name']}"
    try:
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        return tool.run(str(arguments[tool.parameter]))
    except ZeroDivisionError:
        return "error: division by zero"
    except SyntaxError:
        return "error: that is no expression"
    except (KeyError, TypeError):
        return f"error: {function['name']} takes {tool.parameter}"
    except (ValueError, RecursionError, OverflowError) as error:
        return f"error: {error}"
