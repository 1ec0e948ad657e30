"""What a handle tells of its session reaches the place where it stands in the cache."""

from __future__ import annotations

import numpy as np
import pytest
from testkit.models import micro_config, tokenizer

from agentcache.clock import ManualClock
from agentcache.config import CacheConfig
from agentcache.engine.append_log import TokenLog
from agentcache.engine.tiny_hybrid import build
from agentcache.runtime import Runtime
from agentcache.session.history import History
from agentcache.session.prompts import Prompt
from agentcache.sessions.refs import SessionRef
from agentcache.sessions.registry import Tip
from agentcache.tree.node import Cursor, Node


def test_idle_tells_when_the_session_is_due_and_until_when_it_counts() -> None:
    clock = ManualClock(100.0)
    config = CacheConfig(budget="8MiB")
    with Runtime(build(micro_config()), tokenizer(), cache=config, clock=clock) as runtime:
        session = runtime.session("waiting")
        session.generate([5, 6, 7, 8, 9], max_new_tokens=2)

        def told() -> list[tuple[float | None, float | None]]:
            nodes = runtime.on_engine(lambda: [n for n in runtime.cache.tree.nodes() if n.refs])
            return [(node.due, node.expires) for node in nodes]

        assert told() == [(None, 700.0)], "after one turn nobody knows when it is back"
        session.idle()
        assert told() == [(None, 700.0)]
        session.idle(expect="30s")
        assert told() == [(130.0, 160.0)]


@pytest.mark.parametrize(("head", "known"), [(5, 9), (7, 5), (3, 3), (0, 0)])
def test_path_of_a_head_that_ends_elsewhere_is_known_to_the_shorter_one(
    head: int, known: int
) -> None:
    ids = np.arange(1, 13, dtype=np.int32)
    ref = SessionRef(Cursor.at(Node(0, ids, None, 12)), ())
    tip = Tip(1, 1, History(TokenLog(ids), frontier=12, head_len=5), ref, None)
    prompt = Prompt(ids, tip, 9, (), (), head_len=head)
    assert prompt.known_len == known
