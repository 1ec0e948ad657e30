"""OpenAI's form of a chat call: read into what a session takes, written from what it returns.

Shared by the adapters that speak it; knows of no framework and of no HTTP. What is read is checked:
InvalidField and UnsupportedField name the field at fault, as in `messages[3].content`.

    call = read_call(body, call_grammar=rt.chat_format.tool_call_grammar)
    with rt.session(read_session_id(body.get("session_id"), "session_id")) as session:
        turn = session.complete(call.messages, tools=call.tools, **call.options)
    message = call.form.message(turn)                        # role, content, tool_calls, ...
    finish = finish_reason_of(turn, message)
    usage = usage_of(turn.usage)

Streaming goes through `call.form.reader()`, whose pieces add up to the same message.
"""

from agentcache.integrations._openai.errors import ErrorShape, error_of
from agentcache.integrations._openai.fields import (
    MAX_DEPTH,
    MAX_ID_BYTES,
    InvalidField,
    UnsupportedField,
    check_value,
    read_session_id,
)
from agentcache.integrations._openai.forms import Delta, FormReader, Piece, ReplyForm
from agentcache.integrations._openai.messages import read_messages, read_tools
from agentcache.integrations._openai.params import Call, CallGrammar, read_call
from agentcache.integrations._openai.replies import finish_reason_of, logprobs_of, usage_of

__all__ = [
    "MAX_DEPTH",
    "MAX_ID_BYTES",
    "Call",
    "CallGrammar",
    "Delta",
    "ErrorShape",
    "FormReader",
    "InvalidField",
    "Piece",
    "ReplyForm",
    "UnsupportedField",
    "check_value",
    "error_of",
    "finish_reason_of",
    "logprobs_of",
    "read_call",
    "read_messages",
    "read_session_id",
    "read_tools",
    "usage_of",
]
