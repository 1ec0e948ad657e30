"""One call of a session: its prompt to the engine, and what comes back to a turn."""

from __future__ import annotations

import asyncio
import copy
import threading
from functools import partial
from typing import TYPE_CHECKING

from agentcache.engine.request import EngineResult, RequestSpec
from agentcache.errors import InvalidRequest, PromptTooLong
from agentcache.session.host import Host, tell_place
from agentcache.session.miss import explain_miss
from agentcache.session.options import CallOptions, check_options, grammar_of, sampling_of
from agentcache.session.recording import key_of, record_turn
from agentcache.session.streams import TurnStream
from agentcache.session.turn import Turn
from agentcache.tree.key import Salt

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.engine.chat import Message
    from agentcache.engine.loop import Submission
    from agentcache.session.history import History
    from agentcache.session.prompts import Prompt
    from agentcache.sessions.registry import SessionRecord
    from agentcache.tree.radix_tree import Salts
    from agentcache.types import IntArray

__all__ = ["Calls"]


class Calls:
    """Runs the calls of one session; stateless beside its record, so for any thread or task.

    `make` gives a call's prompt and may raise. It runs on the caller's thread, for async callers on
    another one: a long list takes a while to render. Time to first token counts from before it.
    """

    def __init__(
        self, host: Host, record: SessionRecord[History], *, is_unnamed: bool = False
    ) -> None:
        self._host = host
        self._record = record
        self._is_unnamed = is_unnamed

    def run(
        self, make: Callable[[], Prompt], options: CallOptions, stream: bool
    ) -> Turn | TurnStream:
        if self._host.recorder is not None:
            self._host.recorder.wait(key_of(self._record))
        turns = TurnStream() if stream else None
        submission = self._submit(make, options, turns, self._host.clock.now())
        if turns is not None:
            turns.attach(submission.future, submission.cancel)
            return turns
        try:
            turn: Turn = submission.future.result()
        except BaseException:
            submission.cancel()
            raise
        return turn

    async def arun(
        self, make: Callable[[], Prompt], options: CallOptions, stream: bool
    ) -> Turn | TurnStream:
        recorder, key = self._host.recorder, key_of(self._record)
        if recorder is not None and not recorder.is_ready(key):
            await asyncio.to_thread(recorder.wait, key)
        turns = TurnStream() if stream else None
        submission = await self._asubmit(make, options, turns)
        if turns is not None:
            turns.attach(submission.future, submission.cancel)
            return turns
        try:
            turn: Turn = await asyncio.wrap_future(submission.future)
        except BaseException:
            submission.cancel()
            raise
        return turn

    async def _asubmit(
        self, make: Callable[[], Prompt], options: CallOptions, stream: TurnStream | None
    ) -> Submission:
        """`_submit` off the event loop. Who stops waiting for it has cancelled the call as well."""
        begun_at = self._host.clock.now()
        made: list[Submission] = []
        is_left = threading.Event()

        def submit() -> Submission:
            submission = self._submit(make, options, stream, begun_at)
            made.append(submission)
            if is_left.is_set():
                submission.cancel()
            return submission

        try:
            return await asyncio.to_thread(submit)
        except BaseException:
            is_left.set()  # the thread goes on, and sees this or has put its submission there
            for submission in made:
                submission.cancel()
            raise

    def _submit(
        self,
        make: Callable[[], Prompt],
        options: CallOptions,
        stream: TurnStream | None,
        begun_at: float,
    ) -> Submission:
        """Make the prompt and queue the call."""
        check_options(options)
        prompt = make()
        if stream is not None:
            stream.expect(self._host.prompts.reply_reader(prompt))
        record, tip = self._record, prompt.tip
        replay = self._replay_ids(prompt, options)
        self._check_len(prompt, replay, options)
        verify, exact = options.get("verify"), options.get("exact")
        exact = self._host.exact if exact is None else exact
        spec = RequestSpec(
            prompt=prompt.ids,
            namespace=self._host.namespace(record.tenant, record.shared_head, exact).digest(),
            exact=exact,
            tenant=record.tenant,
            sampling=sampling_of(options, self._host.max_len - len(prompt.ids)),
            begun_at=begun_at,
            finish=partial(self._finish, prompt),
            structural=prompt.structural,
            passing=prompt.passing,
            after=tip.ref if tip is not None else None,
            salts=_salts(prompt, record),
            known_len=prompt.known_len,
            replay=replay,
            stepwise=options.get("stepwise", False),
            return_logits=options.get("return_logits", False),
            verify=self._host.verify if verify is None else verify,
            grammar=grammar_of(options),
            priority=record.priority,
            session=record.id,
            emit=None if stream is None else stream.emit,
        )
        return self._host.submit(spec)

    def _replay_ids(self, prompt: Prompt, options: CallOptions) -> IntArray | None:
        replay = options.get("replay")
        if replay is None:
            if options.get("stepwise"):
                raise InvalidRequest("stepwise=True says how to absorb replay=; give a replay too")
            return None
        return self._host.prompts.replay_ids(replay, prompt, self._host.end_id)

    def _check_len(self, prompt: Prompt, replay: IntArray | None, options: CallOptions) -> None:
        """A reply may end early where the model's limit is, but it has to be able to begin."""
        least = int(options.get("max_new_tokens", 256) != 0)
        total = len(prompt.ids) + (least if replay is None else len(replay))
        if total > self._host.max_len:
            raise PromptTooLong(total, self._host.max_len)

    def _finish(self, prompt: Prompt, result: EngineResult) -> Turn:
        """Make the turn and move the session on. On the engine thread."""
        host = self._host
        reply = host.prompts.read_reply(prompt, result.text)
        message = reply.message
        history = self._history(prompt, result, message)
        if self._is_unnamed:
            host.recent.add(self._record.tenant, prompt, history)
        tip, leaving = self._record.advance(prompt.tip, prompt.shared_len, history, result.ref)
        host.marks.leave(*leaving)
        if tip is not None:
            tell_place(host, self._record, result.ref)
        self._record.count(result.usage.prompt_tokens, result.usage.cached_tokens)
        turn = Turn(
            ids=result.ids,
            text=result.text,
            message=message,
            finish_reason=result.finish_reason,
            tip=None if tip is None else tip.number,
            index=1 if tip is None else tip.index,
            usage=result.usage,
            explain=partial(explain_miss, prompt, result.match, host.prompts, host.tokenizer),
            verify=result.verify,
            logits=result.logits,
            logprobs=result.logprobs,
            malformed_calls=reply.malformed,
        )
        if host.recorder is not None:
            host.recorder.add(record_turn(self._record, prompt, history, turn))
        return turn

    def _history(self, prompt: Prompt, result: EngineResult, message: Message) -> History:
        """The trajectory after the turn; a reply cut by a stop string ends where its text does."""
        prompts = self._host.prompts
        frontier = result.ref.frontier.node.end
        if result.finish_reason == "prefill":
            return prompts.extend(prompt, result.ids, frontier, None)
        reply = result.ids
        if result.stop_string is not None:
            reply = prompts.cut_ids(reply, result.text)
        return prompts.extend(prompt, reply, frontier, copy.deepcopy(dict(message)))


def _salts(prompt: Prompt, record: SessionRecord[History]) -> Salts:
    """What keeps the tail behind a shared head to the session's own tenant."""
    if not record.shared_head:
        return ()
    return ((prompt.head_len, Salt(at=prompt.head_len, tenant=record.tenant).digest()),)
