"""Claude Code sessions: a JSONL of records that form a tree by `parentUuid`.

The main agent and each sub-agent (side chain) are trajectories of their own. System prompt and
tool schemas are not recorded, so no call is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.errors import TraceError
from agentcache.replay.readers._claude_thread import Node, Thread
from agentcache.replay.readers.base import Format, Notes, Place, Record, Source, Trajectory

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CLAUDE_CODE"]

_TYPES = frozenset(
    {
        "user",
        "assistant",
        "progress",
        "system",
        "summary",
        "file-history-snapshot",
        "queue-operation",
    }
)
_MARKS = frozenset({"uuid", "leafUuid", "messageId"})
_UNRECORDED = "system prompt and tool schemas are not recorded"


def _sniff(data: object) -> bool:
    if not isinstance(data, dict):
        return False
    kind = data.get("type")
    if not isinstance(kind, str):
        return False
    return "sessionId" in data or (kind in _TYPES and bool(_MARKS & data.keys()))


def _read(source: Source, records: Iterator[Record]) -> list[Trajectory]:
    tree: dict[str, Node] = {}
    threads: dict[str, Thread] = {}
    for record in records:
        try:
            node = _node(source, record, tree)
            if node is not None:
                _enter(node, tree, threads)
        except TraceError as error:
            source.reject(error)
    return _trajectories(source, tree, threads)


def _node(source: Source, record: Record, tree: dict[str, Node]) -> Node | None:
    """A record of the tree; None for records beside it (summaries, file snapshots)."""
    place = source.place(record, Notes())
    row = place.mapping(record.data)
    kind = place.key("type").text(row.get("type"))
    if row.get("uuid") is None and kind not in ("user", "assistant"):
        return None
    uuid = place.key("uuid").text(row.get("uuid"))
    parent = row.get("parentUuid")
    parent = None if parent is None else place.key("parentUuid").text(parent)
    node = Node(uuid, parent, row, place, order=len(tree))
    node.agent = _agent(node, tree)
    return node


def _agent(node: Node, tree: dict[str, Node]) -> str:
    """The sub-agent a record belongs to; "" is the main agent."""
    if not node.record.get("isSidechain"):
        return ""
    agent = node.record.get("agentId")
    if agent is not None:
        return node.place.key("agentId").text(agent)
    # Older versions name no agent: a side chain is then known by its first record.
    above = tree.get(node.parent) if node.parent else None
    return above.agent if above is not None and above.agent else node.uuid


def _enter(node: Node, tree: dict[str, Node], threads: dict[str, Thread]) -> None:
    """Add a record to the tree and to its agent's thread."""
    thread = threads.setdefault(node.agent, Thread())
    if node.uuid in tree:
        thread.notes.add("a record stands twice; the second is left out")
        return
    place = node.place
    node.place = Place(place.path, place.line, place.field, thread.notes)
    if node.record["type"] not in _TYPES:
        thread.notes.add(f"records of type {node.record['type'][:40]!r} are taken for no messages")
    if thread.session is None and node.record.get("sessionId") is not None:
        thread.session = place.key("sessionId").text(node.record["sessionId"])
    thread.nodes.append(node)
    tree[node.uuid] = node


def _trajectories(
    source: Source, tree: dict[str, Node], threads: dict[str, Thread]
) -> list[Trajectory]:
    sessions = [thread.session for thread in threads.values() if thread.session is not None]
    session = sessions[0] if sessions else source.stem
    made = []
    for agent, thread in sorted(threads.items()):
        calls = thread.calls(tree, source.reject)
        if not any(node.record["type"] in ("user", "assistant") for node in thread.nodes):
            continue
        thread.notes.add(_UNRECORDED)
        made.append(
            Trajectory(
                f"{session}/{agent}" if agent else session,
                source.shown,
                CLAUDE_CODE.name,
                tuple(calls),
                parent=session if agent else None,
                notes=thread.notes.texts(),
            )
        )
    return made


CLAUDE_CODE = Format("claude-code", _sniff, _read)
