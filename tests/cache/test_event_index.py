"""An index outside, which knows nothing but the events, tells beforehand what a request reuses."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from testkit.models import micro_runtime
from testkit.tiers import COMPOSITIONS, Crowd, make_tiered, wander

from agentcache.events import Event, Events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.cache import Match
    from agentcache.runtime import Runtime
    from agentcache.session import Session


@dataclass
class Run:
    """One run of tokens; `held` says per layer kind from where on its data covers it, and where
    that lies."""

    parent: int
    start: int
    tokens: tuple[int, ...]
    salt: str | None
    held: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Index:
    """All runs a cache has, by number, as told by plain JSON values.

    kinds: the layer kinds of the model. window: tokens that its sliding attention sees.
    """

    def __init__(self, kinds: Sequence[str], window: int = 0) -> None:
        self.kinds = tuple(kinds)
        self.window = window
        self.runs: dict[int, Run] = {}
        self.roots: dict[str, int] = {}
        self.heard: dict[str, int] = {}

    def hear(self, event: dict[str, Any]) -> None:
        """Take a change in."""
        name, key = event["name"], event.get("key", -1)
        self.heard[name] = self.heard.get(name, 0) + 1
        if name == "insert":
            if "namespace" in event:
                self.roots[event["namespace"]] = event["parent"]
            start, salt = event.get("start", 0), event.get("salt")
            run = Run(event["parent"], start, tuple(event["tokens"]), salt)
            assert key not in self.runs, "a number was used again"
            assert run.end == event["boundary"]
            self.runs[key] = run
        elif name == "split":
            lower, at = self.runs[key], event["boundary"]
            cut = at - lower.start
            self.runs[event["parent"]] = Run(
                lower.parent, lower.start, lower.tokens[:cut], lower.salt
            )
            lower.parent, lower.start, lower.salt = event["parent"], at, None
            lower.tokens = lower.tokens[cut:]
        elif name in ("file", "demote", "load_back"):
            held, kind = self.runs[key].held, event["kind"]
            before = held[kind][1] if kind in held else 0
            assert before == {"demote": 1, "load_back": 2}.get(name, before), event
            assert name != "file" or before != 1, "filed where it was"
            held[kind] = event.get("start", 0), event.get("tier", 1)
        elif name == "evict":
            del self.runs[key].held[event["kind"]]
        elif name == "remove":
            assert all(run.parent != key for run in self.runs.values()), "something hangs below"
            del self.runs[key]

    def predict(
        self, namespace: str, tokens: Sequence[int], limit: int, salts: dict[int, str]
    ) -> tuple[int, int, int]:
        """(boundary, boundary with what can be loaded, tokens known) of a request."""
        path: list[Run] = []
        at, known = self.roots.get(namespace, -1), 0
        while True:
            found = self._below(at, tokens[known:], salts.get(known), salts, known)
            if found is None:
                break
            at, same = found
            path.append(self.runs[at])
            known += same
            if same < len(self.runs[at].tokens):
                break
        boundary = loadable = 0
        for run in path:
            for p in range(run.start + 1, min(run.end, known, limit) + 1):
                tiers = [self._tier(run, kind, p) for kind in self.kinds]
                if all(tier == 1 for tier in tiers):
                    boundary = loadable = p
                elif all(tiers):
                    loadable = p
        return boundary, loadable, known

    def _below(
        self, at: int, ahead: Sequence[int], salt: str | None, salts: dict[int, str], known: int
    ) -> tuple[int, int] | None:
        """The run that goes on with the tokens ahead, and how many of them are its own."""
        for key, run in self.runs.items():
            if run.parent != at or run.salt != salt or not ahead or run.tokens[0] != ahead[0]:
                continue
            same = 1
            while (
                same < min(len(run.tokens), len(ahead))
                and run.tokens[same] == ahead[same]
                and known + same not in salts
            ):
                same += 1
            return key, same
        return None

    def _tier(self, run: Run, kind: str, p: int) -> int:
        """Where the data lies that lets a kind go on at p; 0 for nowhere."""
        if kind not in run.held:
            return 0
        start, tier = run.held[kind]
        fits = {"full": True, "state": p == run.end, "swa": start <= max(0, p + 1 - self.window)}
        return tier if fits[kind] else 0


def watch(crowd: Crowd, index: Index) -> list[tuple[int, int, int]]:
    """Compare each match of the cache with what the index had said; returns what was found."""
    tree, found = crowd.cache.tree, []
    original = tree.match

    def match(start: Any, tokens: Any, limit: int, salts: Any = ()) -> Match:
        by_position = {at: digest.hex() for at, digest in salts if at < len(tokens)}
        predicted = index.predict(b"tests".hex(), tokens.tolist(), limit, by_position)
        result = original(start, tokens, limit, salts)
        assert predicted == (result.boundary, result.loadable, result.known_len)
        found.append(predicted)
        return result

    tree.match = match  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("lower_pages", [0, 16, 60])
def test_index_made_of_events_alone_predicts_every_boundary(name: str, lower_pages: int) -> None:
    events = Events()
    crowd = Crowd(
        make_tiered(
            num_pages=30,
            lower_pages=lower_pages,
            page_size=4,
            swa_page=3,
            num_rows=3,
            events=events,
            **COMPOSITIONS[name],
        ),
        checks=False,
    )
    index = Index([str(rule.kind) for rule in crowd.cache.tree.rules], window=5)
    events.subscribe(lambda event: index.hear(event.to_json()))
    found, rng = watch(crowd, index), random.Random(lower_pages)
    while len(found) < 500:
        wander(crowd, rng, 20)
        crowd.cache.clear() if rng.random() < 0.05 else None
    reused = [boundary for boundary, *_ in found if boundary]
    assert len(reused) > 50
    assert len(set(reused)) > 5
    wanted = {"insert", "split", "file", "remove"} | (
        {"demote", "load_back"} if lower_pages else set()
    )
    if name not in ("full", "state", "swa"):
        wanted.add("evict")
    assert wanted <= set(index.heard)
    crowd.end()
    assert not index.runs


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_index_forgets_what_was_condemned_whoever_still_reads_it(name: str) -> None:
    events = Events()
    crowd = Crowd(make_tiered(num_pages=30, events=events, **COMPOSITIONS[name]), checks=False)
    index = Index([str(rule.kind) for rule in crowd.cache.tree.rules], window=5)
    events.subscribe(lambda event: index.hear(event.to_json()))
    found, rng = watch(crowd, index), random.Random(3)
    while len(found) < 300:
        wander(crowd, rng, 10)
        if nodes := list(crowd.cache.tree.nodes()):
            crowd.cache.condemn(rng.choice(nodes))
    assert sum(boundary > 0 for boundary, *_ in found) > 30
    crowd.end()
    assert not index.runs


def test_index_that_joins_late_is_told_of_what_comes_after() -> None:
    events = Events()
    crowd = Crowd(make_tiered(events=events, state_pages=1))
    wander(crowd, random.Random(1), 30)
    seen: list[Event] = []
    events.subscribe(seen.append)
    wander(crowd, random.Random(2), 30)
    assert {"insert", "file"} <= {event.name for event in seen}


def session_turn(runtime: Runtime, session: Session, rng: random.Random) -> list[int]:
    """The prompt of a next turn: the history with something new, or an edit of it."""
    history = session.ids.tolist()
    if history and rng.random() < 0.3:
        history = history[: rng.randint(0, len(history))]
    return [*history, *(rng.randint(5, 8) for _ in range(rng.randint(1, 24)))]


def test_index_predicts_the_cached_tokens_of_calls() -> None:
    """Sessions that go on, edit, fork, rewind and close, while memory is short."""
    rng = random.Random(7)
    with micro_runtime(budget="700KiB", page_size=4) as runtime:
        index = Index(["full", "state"])
        runtime.events.subscribe(lambda event: index.hear(event.to_json()))
        tenants = [None, "a"]
        sessions = [(tenant, runtime.session(tenant=tenant)) for tenant in tenants]
        hits = 0
        for _ in range(110):
            at = rng.randrange(len(sessions))
            tenant, session = sessions[at]
            what = rng.random()
            if what < 0.12 and len(sessions) < 6:
                sessions.append((tenant, session.fork()))
            elif what < 0.2 and session.stats()["turns"]:
                session.rewind(rng.randint(0, session.stats()["turns"]))
            elif what < 0.28:
                session.close()
                sessions[at] = (tenant, runtime.session(tenant=tenant))
            else:
                prompt = session_turn(runtime, session, rng)
                if len(prompt) > 150:
                    session.rewind(0)
                    continue
                namespace = runtime.namespace(tenant).digest().hex()
                predicted, *_ = index.predict(namespace, prompt, len(prompt) - 1, {})
                turn = session.generate(prompt, max_new_tokens=rng.randint(0, 3))
                assert turn.usage.cached_tokens == predicted
                hits += predicted > 0
        assert hits > 25
        assert runtime.stats()["evictions"]["state"] > 10
        assert {"split", "evict", "remove", "open", "move", "close"} <= set(index.heard)
        runtime.clear()
        assert not index.runs
