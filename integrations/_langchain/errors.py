"""Errors that LangChain has a name for."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from langchain_core.exceptions import ContextOverflowError

from agentcache import PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ContextOverflow", "translated"]


class ContextOverflow(PromptTooLong, ContextOverflowError):
    """Messages longer than the model allows: an error of LangChain's and of this package's."""


@contextmanager
def translated() -> Iterator[None]:
    """Raise what LangChain has a name for under both names."""
    try:
        yield
    except PromptTooLong as error:
        raise ContextOverflow(error.num_tokens, error.limit) from error
