"""Replies of a schema as objects: what follows the model in `with_structured_output`."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.runnables import RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from agentcache import InvalidRequest

if TYPE_CHECKING:
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.runnables import Runnable
    from pydantic import BaseModel

__all__ = ["structured_output"]


def structured_output(
    model: BaseChatModel, schema: dict[str, Any] | type, method: str, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """The model with a grammar, and a parser behind it.

    Raises InvalidRequest for a method that is none, or a schema that says nothing.
    """
    if not schema:
        raise InvalidRequest("the schema is empty; give a pydantic class, a TypedDict or a dict")
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    llm: Runnable[LanguageModelInput, AIMessage]
    parser: Any
    if method == "function_calling":
        tool = convert_to_openai_tool(schema)
        name = tool["function"]["name"]
        llm = model.bind_tools([schema], tool_choice=name, **_told(tool, method))
        if is_class:
            parser = PydanticToolsParser(tools=[cast("Any", schema)], first_tool_only=True)
        else:
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    elif method in ("json_schema", "json_mode"):
        json_schema = convert_to_json_schema(schema)
        wanted: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            name = json_schema.get("title") or "reply"
            wanted = {"type": "json_schema", "json_schema": {"name": name, "schema": json_schema}}
        llm = model.bind(response_format=wanted, **_told(json_schema, method))
        parser = JsonOutputParser()
        if is_class:
            parser = PydanticOutputParser(pydantic_object=cast("type[BaseModel]", schema))
    else:
        raise InvalidRequest(
            f"method is {method!r}; there are json_schema, function_calling and json_mode"
        )
    return _with_raw(llm, parser) if include_raw else llm | parser


def _told(schema: dict[str, Any], method: str) -> dict[str, Any]:
    """What traces show of the schema."""
    return {
        "ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema},
    }


def _with_raw(llm: Runnable[Any, AIMessage], parser: BaseOutputParser[Any]) -> Runnable[Any, Any]:
    """The reply, what it was parsed into, and the error if it could not be."""
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
