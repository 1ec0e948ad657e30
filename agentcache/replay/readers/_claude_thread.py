"""One agent's records of a Claude Code session, and the calls they show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentcache.errors import TraceError
from agentcache.replay.readers._claude_blocks import merge_answer, user_messages
from agentcache.replay.readers.base import Call, Message, Notes, Place

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Node", "Thread"]


@dataclass(slots=True, eq=False)
class Node:
    """One record of the tree. User records carry messages; assistant ones belong to an answer."""

    uuid: str
    parent: str | None
    record: dict[str, Any]
    place: Place
    order: int
    agent: str = ""
    messages: list[Message] = field(default_factory=list)
    answer: _Answer | None = None


@dataclass(slots=True, eq=False)
class _Answer:
    """One model answer, split over the records that share its message id."""

    nodes: list[Node]
    message: Message


class Thread:
    """The records of the main agent, or of one sub-agent, in file order."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.session: str | None = None
        self.nodes: list[Node] = []

    def calls(self, tree: dict[str, Node], reject: Callable[[TraceError], None]) -> list[Call]:
        """One call per model answer with a prompt; records that cannot be used go to `reject`."""
        self._mend_parents(tree)
        results = self._read_users(reject)
        calls = []
        for answer in self._read_answers(reject):
            try:
                prompt = _prompt(answer, tree, results)
                at = _time(answer.nodes[0])
            except TraceError as error:
                reject(error)
                continue
            if prompt:
                calls.append(Call(prompt, None, answer.message, at, exact=False))
            else:
                self.notes.add("an answer with nothing before it is no model call")
        return calls

    def _mend_parents(self, tree: dict[str, Node]) -> None:
        """Hang records whose parent was not recorded on the message before them."""
        last: Node | None = None
        for node in self.nodes:
            if node.parent is not None and node.parent not in tree:
                node.parent = last.uuid if last else None
                self.notes.add("a parent is not in the file; the message before stands in for it")
            if node.record["type"] in ("user", "assistant"):
                last = node

    def _read_users(self, reject: Callable[[TraceError], None]) -> dict[str, Node]:
        """Fill in the messages of user records; the records of tool results by their call's id."""
        results: dict[str, Node] = {}
        for node in self.nodes:
            if node.record["type"] != "user":
                continue
            try:
                node.messages = user_messages(*_content(node))
            except TraceError as error:
                reject(error)
            for message in node.messages:
                if message["role"] == "tool":
                    results.setdefault(message["tool_call_id"], node)
        return results

    def _read_answers(self, reject: Callable[[TraceError], None]) -> list[_Answer]:
        split: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.record["type"] != "assistant":
                continue
            if node.record.get("isApiErrorMessage"):
                self.notes.add("an error shown in place of an answer is no model call")
                continue
            message = node.record.get("message")
            shared = message.get("id") if isinstance(message, dict) else None
            split.setdefault(shared if isinstance(shared, str) else node.uuid, []).append(node)
        answers = []
        for nodes in split.values():
            try:
                answer = _Answer(nodes, merge_answer([_content(node) for node in nodes]))
            except TraceError as error:
                reject(error)
                continue
            for node in nodes:
                node.answer = answer
            answers.append(answer)
        return answers


def _content(node: Node) -> tuple[object, Place]:
    message = node.place.key("message").mapping(node.record.get("message"))
    return message.get("content"), node.place.key("message.content")


def _time(node: Node) -> float | None:
    stamp = node.record.get("timestamp")
    return None if stamp is None else node.place.key("timestamp").instant(stamp)


def _prompt(
    answer: _Answer, tree: dict[str, Node], results: dict[str, Node]
) -> tuple[Message, ...]:
    """The messages above an answer."""
    prompt: list[Message] = []
    used = {node.uuid for node in answer.nodes}
    for node in _ancestors(answer.nodes[0], tree):
        if node.uuid in used:
            continue
        prompt += node.messages
        if node.answer is None:
            continue
        used.update(part.uuid for part in node.answer.nodes)
        prompt.append(node.answer.message)
        # Results of parallel tool calls hang on different records of the answer, so not all of
        # them are above.
        for result in _results_of(node.answer, results, answer.nodes[0].order):
            used.add(result.uuid)
            prompt += result.messages
    return tuple(prompt)


def _results_of(answer: _Answer, results: dict[str, Node], before: int) -> list[Node]:
    """The recorded results of an answer's tool calls that came `before` a record, in order."""
    found = {
        results[call["id"]].order: results[call["id"]]
        for call in answer.message.get("tool_calls", ())
        if call["id"] in results
    }
    return [found[order] for order in sorted(found) if order < before]


def _ancestors(node: Node, tree: dict[str, Node]) -> list[Node]:
    """The records above one, from the root down; another agent's records are not above."""
    chain: list[Node] = []
    seen = {node.uuid}
    above = tree.get(node.parent) if node.parent else None
    while above is not None and above.agent == node.agent:
        if above.uuid in seen:
            raise node.place.key("parentUuid").error(
                "leads back to the record itself", "the records of a session form a tree"
            )
        seen.add(above.uuid)
        chain.append(above)
        above = tree.get(above.parent) if above.parent else None
    return chain[::-1]
