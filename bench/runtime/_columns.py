"""Who serves the calls: a runtime with session handles, or stock code with kept cache objects.

Beside them, what a call needs at least, found from the ids alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from agentcache.tree.key import common_prefix_len

if TYPE_CHECKING:
    from _sessions import Step

    from agentcache.runtime import Runtime
    from agentcache.session import Session
    from agentcache.types import IntArray

__all__ = ["Column", "Kept", "Needed", "Ours", "Served"]


@dataclass(frozen=True, slots=True)
class Served:
    """One call: its prompt in ids, the prompt tokens computed, and CPU seconds of the process."""

    prompt: IntArray
    computed_tokens: int
    seconds: float


class Column(Protocol):
    """Serves the calls of a scenario in their order."""

    def run(self, step: Step, prompt: IntArray) -> Served:
        """Compute the prompt, then the reply token by token."""
        ...


class Ours:
    """One runtime and a session handle per session; the prompts are made from messages.

    tools: what the first call of a session brings.
    """

    def __init__(self, runtime: Runtime, tools: tuple[dict[str, Any], ...]) -> None:
        self._runtime = runtime
        self._tools = list(tools)
        self._sessions: dict[str, Session] = {}

    def run(self, step: Step, prompt: IntArray | None = None) -> Served:
        """`prompt`, where it is known, has to be what the messages make."""
        for id in step.closed:
            self._sessions.pop(id).close()
        begin = time.process_time()
        session = self._sessions.get(step.session)
        tools = self._tools if session is None else None
        session = session or self._runtime.session(step.session)
        turn = session.chat(step.new, tools=tools, replay=step.reply, stepwise=True)
        self._runtime.on_engine(lambda: None)  # what is filed after the reply counts as well
        seconds = time.process_time() - begin
        self._sessions[step.session] = session
        made = session.ids[: turn.usage.prompt_tokens].copy()
        assert prompt is None or np.array_equal(made, prompt)
        return Served(made, turn.usage.computed_tokens, seconds)


class Kept:
    """A stock model with its stock cache, one object kept per session.

    It goes on from what it kept where the prompt extends that, else it starts over. keeps: whether
    anything is kept; without it every call computes its whole prompt.
    """

    def __init__(self, model: Any, *, keeps: bool = True) -> None:
        self._model = model
        self._keeps = keeps
        self._kept: dict[str, tuple[IntArray, Any]] = {}
        self.peak_bytes = 0

    def run(self, step: Step, prompt: IntArray) -> Served:
        """See `Column`."""
        for id in step.closed:
            self._kept.pop(id, None)
        begin = time.process_time()
        known, cache = self._kept.pop(step.session, (prompt[:0], None))
        start = len(known)
        if cache is None or start >= len(prompt) or common_prefix_len(known, prompt) < start:
            start, cache = 0, DynamicCache(config=self._model.config)
        with torch.inference_mode():
            self._forward(prompt[start:], cache)
            for at in range(len(step.reply) - 1):
                self._forward(step.reply[at : at + 1], cache)
        seconds = time.process_time() - begin
        if self._keeps:
            self._kept[step.session] = np.concatenate([prompt, step.reply[:-1]]), cache
            self.peak_bytes = max(self.peak_bytes, self.held_bytes())
        return Served(prompt, len(prompt) - start, seconds)

    def held_bytes(self) -> int:
        """Bytes of the storages of all kept tensors; a view counts its whole storage once."""
        storages: dict[int, int] = {}
        for _, cache in self._kept.values():
            for layer in cache.layers:
                for tensor in _tensors(vars(layer)):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def _forward(self, tokens: IntArray, cache: Any) -> int:
        ids = torch.from_numpy(tokens).long()[None]
        out = self._model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, in dicts and lists of it too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class Needed:
    """What a call has to compute at least, after the calls it was told of.

    With states where conversations can be resumed: at the end of every earlier prompt and turn, and
    of the head that all share. With a state at every token: no cache can compute less.
    """

    def __init__(self, head: IntArray) -> None:
        self._head = head
        self._known: list[IntArray] = []
        self._ends: set[tuple[int, bytes]] = set()

    def state_ends(self, prompt: IntArray) -> int:
        """Tokens left to compute if states stand at the ends."""
        fits = (
            length
            for length, key in self._ends
            if length < len(prompt) and prompt[:length].tobytes() == key
        )
        return len(prompt) - max(fits, default=0)

    def any_token(self, prompt: IntArray) -> int:
        """Tokens left to compute if a state stands at every token."""
        shared = max((common_prefix_len(prompt, known) for known in self._known), default=0)
        return len(prompt) - min(shared, len(prompt) - 1)

    def add(self, prompt: IntArray, reply: IntArray) -> None:
        """A call that was served; the last id of its reply is not computed."""
        whole = np.concatenate([prompt, reply[:-1]])
        self._known.append(whole)
        ends = [len(prompt), len(whole)]
        if common_prefix_len(prompt, self._head) == len(self._head):
            ends.append(len(self._head))
        self._ends.update((end, whole[:end].tobytes()) for end in ends)
