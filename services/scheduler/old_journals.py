"""Former names of events, messages and outputs, so that decisions recorded under them are decided again all the same.

A journal of version 1 was written before messages were renamed (docs/adr/0015): its events are given today's names
before they are decoded, and today's outputs are given the former ones before their digests are compared.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shared.messages.generation import Grammar

RENAMED: dict[str, str] = {
    "Abandon": "AbandonStream",
    "AskStore": "SendStoreRequest",
    "Attached": "AttachReply",
    "Committed": "CommitReply",
    "DetokenizerLost": "TokenBatchLost",
    "Failed": "RequestFailed",
    "Found": "FindReply",
    "Generate": "GenerateRequest",
    "GiveUp": "EndProcess",
    "NotServed": "KvStoreRefusal",
    "NotTaken": "HandOverRefused",
    "PassOn": "SendHandOver",
    "Placed": "RequestPlaced",
    "Rejected": "RequestRejected",
    "Relay": "ForwardControl",
    "Reserved": "ReserveReply",
    "StoreAnswered": "StoreReplied",
    "StoreHere": "StoreReady",
    "TellGateway": "SendToGateway",
    "Transferred": "TransferProgress",
}
"""Classes of events, outputs and tagged messages: the name in journals of version 1, and today's."""

RENAMED_FIELDS: dict[str, str] = {"answer": "reply", "question": "request", "role": "kind", "site": "role"}
"""Fields of events and outputs that are no messages, and of `EngineStart`: the former name, and today's."""

MESSAGE_FIELDS = frozenset({"answer", "generate", "message", "question", "release", "transfers"})
"""Fields (by their former names) of events and outputs that hold a tagged message."""

TRACE_IN_GENERATION, TRACE_IN_OPEN_STREAM = 15, 13
"""Where version 1 had a field for the client's trace context, which was carried along and never read."""
GENERATION_FIELDS = 18
"""Of `Generation` in version 1, the trace context not counted; later fields are left out of what is compared."""
OPENED_IN_BATCH = 3
NEW_IN_PLAN, FORGET_IN_PLAN, GRAMMAR_IN_NEW, GRAMMAR_IN_REPLY = 3, 7, 8, 2
"""Where plans and replies name grammars; `forget` is new in version 3, and so is what is behind it."""
POOLED_IN_BATCH, POOLING_IN_GENERATION = 8, 22
"""Where messages say of vectors, since version 5."""
SAMPLING_IN_NEW, SAMPLING_IN_GENERATION = 5, 7
LORA_IN_NEW, LORA_IN_GENERATION, FORGET_LORAS_IN_PLAN, EXTRA_ARGS_IN_SAMPLING, VALUE_DIM_IN_LAYOUT = 10, 23, 9, 17, 6
"""Where messages say of adapters, of logits processors' arguments, and of parts of a block that differ in size, since
version 6."""
RESTORED_IN_PLAN, EMBEDS_IN_NEW, EMBEDS_IN_GENERATION = 10, 11, 24
"""Where messages say of checkpoints of states, and of embeddings in place of tokens, since version 7."""
RUNS_IN_EMBEDS, TRACE_BEHIND_GENERATION, TRACE_BEHIND_OPEN_STREAM = 3, 25, 15
"""Where embeddings say of which tokens they are, and messages have the context of their trace, since version 8."""
GRIDS_IN_EMBEDS, KEEP_IN_GENERATION = 4, 26
"""Where embeddings say how tokens lie in images, and requests that their prompts are kept, since version 9."""
MEDIA_IN_EMBEDS, ENCODED_IN_NEW = 6, 12
"""Where embeddings say where rows are kept, and new sequences of rows beside their prompts, since version 10."""
POOLING_IN_NEW, STEP_TAG_IN_POOLING = 9, 4
"""Where messages say which tokens end the steps that are judged, since version 11."""
GENERATE_REQUEST_FIELDS = FIND_FIELDS = 7
"""Entries of `GenerateRequest` and `Find` in version 1, the tag included; later ones were appended."""
REQUEST_PLACED_FIELDS = 6
"""Entries of `RequestPlaced` in version 1, the tag included; later ones were appended."""
LAYOUT_FIELDS = 5
"""Of `KvLayout` up to version 3."""
REQUEST_FAILED_FIELDS = 4
"""Entries of `RequestFailed` in version 1, the tag included; later ones were appended."""

_FORMER = {today: former for former, today in RENAMED.items()}
_FORMER_FIELDS = {today: former for former, today in RENAMED_FIELDS.items()}

_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode


class JournalNames:
    """Names as they are in journals of this version: nothing is translated. Names of other versions are a subclass."""

    def start(self, about: bytes) -> bytes:
        """The header's `EngineStart` as today's code decodes it."""
        return about

    def event(self, name: str, content: bytes) -> tuple[str, bytes]:
        """A recorded event under today's name, as today's code decodes it."""
        return name, content

    def output(self, name: str, content: bytes) -> tuple[str, bytes]:
        """One of today's outputs under the name and with the bytes that the journal would have."""
        return name, content


class JournalVersion10(JournalNames):
    """Version 10: no prompt was judged step by step."""

    def output(self, name: str, content: bytes) -> tuple[str, bytes]:
        """Plans without their newest field; other outputs as they are: what is pooled is never handed over."""
        if name != "SendPlan":
            return name, content
        output = _decode(content)
        for new in output["plan"][NEW_IN_PLAN]:
            for pooling in new[POOLING_IN_NEW : POOLING_IN_NEW + 1]:
                if isinstance(pooling, list):
                    del pooling[STEP_TAG_IN_POOLING:]
        return name, _encode(output)


class JournalVersion9(JournalVersion10):
    """Version 9: all rows of a prompt were in its messages, in place of its tokens."""

    def output(self, name: str, content: bytes) -> tuple[str, bytes]:
        """Plans and hand-overs without their newest fields; other outputs as they are."""
        if name not in ("SendPlan", "SendHandOver"):
            return name, content
        output = _decode(super().output(name, content)[1])
        for each in _embeds(output):
            del each[MEDIA_IN_EMBEDS:]
        if name == "SendPlan":
            for new in output["plan"][NEW_IN_PLAN]:
                del new[ENCODED_IN_NEW:]
        return name, _encode(output)


class JournalVersion8(JournalVersion9):
    """Version 8: positions of tokens had one axis, and no prompt was kept."""

    def output(self, name: str, content: bytes) -> tuple[str, bytes]:
        """Plans and hand-overs without their newest fields; other outputs as they are."""
        if name not in ("SendPlan", "SendHandOver"):
            return name, content
        output = _decode(super().output(name, content)[1])
        if name == "SendHandOver":
            del output["generate"][1][KEEP_IN_GENERATION:]
        for each in _embeds(output):
            del each[GRIDS_IN_EMBEDS:]
        return name, _encode(output)


def _embeds(output: Any) -> list[list[Any]]:
    """Those in a plan or a hand-over."""
    if "plan" in output:
        found = [each for new in output["plan"][NEW_IN_PLAN] for each in new[EMBEDS_IN_NEW : EMBEDS_IN_NEW + 1]]
    else:
        found = output["generate"][1][EMBEDS_IN_GENERATION : EMBEDS_IN_GENERATION + 1]
    return [each for each in found if isinstance(each, list)]


class JournalVersion7(JournalVersion8):
    """Version 7: embeddings stood in place of all tokens of a prompt, or of none, and no request was traced."""

    def output(self, name: str, content: bytes) -> tuple[str, bytes]:
        """Plans, tokens and hand-overs without their newest fields; other outputs as they are."""
        if name not in ("SendPlan", "SendTokens", "SendHandOver"):
            return name, content
        output = _decode(super().output(name, content)[1])
        if name == "SendTokens":
            for opened in output["batch"][OPENED_IN_BATCH]:
                del opened[TRACE_BEHIND_OPEN_STREAM:]
            return name, _encode(output)
        if name == "SendHandOver":
            del output["generate"][1][TRACE_BEHIND_GENERATION:]
        for each in _embeds(output):
            del each[RUNS_IN_EMBEDS:]
        return name, _encode(output)


class JournalVersion6(JournalVersion7):
    """Version 6: every prompt was of tokens, and no model had states that were kept."""

    def output(self, name: str, content: bytes) -> tuple[str, bytes]:
        """Plans and hand-overs without their newest fields; other outputs as they were in version 7."""
        if name not in ("SendPlan", "SendHandOver"):
            return super().output(name, content)
        output = _decode(super().output(name, content)[1])
        if name == "SendPlan":
            del output["plan"][RESTORED_IN_PLAN:]
            for new in output["plan"][NEW_IN_PLAN]:
                del new[EMBEDS_IN_NEW:]
        else:
            del output["generate"][1][EMBEDS_IN_GENERATION:]
        return name, _encode(output)


class JournalVersion5(JournalVersion6):
    """Version 5: nobody had an adapter or a logits processor, and keys were as large as values."""

    def output(self, name: str, content: bytes) -> tuple[str, bytes]:
        """Plans, hand-overs and requests for arenas without their newest fields; other outputs as they are."""
        if name not in ("SendPlan", "SendHandOver", "SendStoreRequest"):
            return super().output(name, content)
        output = _decode(super().output(name, content)[1])
        if name == "SendPlan":
            del output["plan"][FORGET_LORAS_IN_PLAN:]
            for new in output["plan"][NEW_IN_PLAN]:
                del new[LORA_IN_NEW:]
                del new[SAMPLING_IN_NEW][EXTRA_ARGS_IN_SAMPLING:]
        elif name == "SendHandOver":
            generation = output["generate"][1]
            del generation[LORA_IN_GENERATION:]
            del generation[SAMPLING_IN_GENERATION][EXTRA_ARGS_IN_SAMPLING:]
        elif output["request"][0] == "Attach":
            del output["request"][1][VALUE_DIM_IN_LAYOUT:]
        return name, _encode(output)


class JournalVersion4(JournalVersion5):
    """Version 4: no prompt became a vector."""

    def output(self, name: str, content: bytes) -> tuple[str, bytes]:
        """Plans, tokens and hand-overs without their fields about vectors; other outputs as they are."""
        if name not in ("SendPlan", "SendTokens", "SendHandOver"):
            return super().output(name, content)
        output = _decode(super().output(name, content)[1])
        if name == "SendTokens":
            del output["batch"][POOLED_IN_BATCH:]
        elif name == "SendPlan":
            for new in output["plan"][NEW_IN_PLAN]:
                del new[GRAMMAR_IN_NEW + 1 :]
        else:
            del output["generate"][1][POOLING_IN_GENERATION:]
        return name, _encode(output)


class JournalVersion3(JournalVersion4):
    """Version 3: layouts of KV blocks say no block size, as all had 16 tokens."""

    def output(self, name: str, content: bytes) -> tuple[str, bytes]:
        """A request for an arena without the newest field of its layout; other outputs as they were in version 4."""
        if name != "SendStoreRequest":
            return super().output(name, content)
        output = _decode(super().output(name, content)[1])
        if output["request"][0] == "Attach":
            del output["request"][1][LAYOUT_FIELDS:]
        return name, _encode(output)


class JournalVersion2(JournalVersion3):
    """Version 2: workers and plans had whole grammars where they have keys today (docs/adr/0020). Owns the grammars
    that were compiled, to put them back into plans."""

    def __init__(self) -> None:
        self._grammars: dict[bytes, Any] = {}

    def event(self, name: str, content: bytes) -> tuple[str, bytes]:
        """What was compiled, by its key; other events as they are."""
        if name != "GrammarCompiled":
            return name, content
        event = _decode(content)
        grammar = event[GRAMMAR_IN_REPLY]
        event[GRAMMAR_IN_REPLY] = key = msgspec.convert(grammar, Grammar).key
        self._grammars[key] = grammar
        return name, _encode(event)

    def output(self, name: str, content: bytes) -> tuple[str, bytes]:
        """A plan with whole grammars, and without its newest fields; other outputs as they are."""
        if name != "SendPlan":
            return super().output(name, content)
        output = _decode(super().output(name, content)[1])
        del output["plan"][FORGET_IN_PLAN:]
        for new in output["plan"][NEW_IN_PLAN]:
            if new[GRAMMAR_IN_NEW] is not None:
                new[GRAMMAR_IN_NEW] = self._grammars[new[GRAMMAR_IN_NEW][0]]
        return name, _encode(output)


class JournalVersion1(JournalVersion2):
    """Names of version 1. Owns the trace contexts that its requests came with, to put them back into what follows."""

    def __init__(self) -> None:
        super().__init__()
        self._traces: dict[tuple[str, int], str | None] = {}

    def start(self, about: bytes) -> bytes:
        """The header with today's fields."""
        return _encode(_renamed_fields(_decode(about), RENAMED_FIELDS))

    def event(self, name: str, content: bytes) -> tuple[str, bytes]:
        """The event with today's names; the trace context of a request is kept, and left out."""
        event = _decode(content)
        if isinstance(event, list):
            self._to_today(event)
        else:
            for field in MESSAGE_FIELDS & event.keys():
                self._to_today(event[field])
            event = _renamed_fields(event, RENAMED_FIELDS)
        return super().event(RENAMED.get(name, name), _encode(event))

    def output(self, name: str, content: bytes) -> tuple[str, bytes]:
        """The output with its former names, and with the trace context of its request."""
        output = _renamed_fields(_decode(super().output(name, content)[1]), _FORMER_FIELDS)
        for field in MESSAGE_FIELDS & output.keys():
            self._to_former(output[field])
        for opened in output["batch"][OPENED_IN_BATCH] if "batch" in output else ():
            opened.insert(TRACE_IN_OPEN_STREAM, self._traces.get((opened[0], opened[1])))
        return _FORMER.get(name, name), _encode(output)

    def _to_today(self, message: Any) -> None:
        """Changes one message, a MessagePack array, in place; None (no answer came) and untagged ones stay."""
        if not isinstance(message, list) or not isinstance(message[0], str):
            return
        message[0] = RENAMED.get(message[0], message[0])
        if message[0] == "GenerateRequest":
            generation = message[1]
            self._traces[generation[0], generation[1]] = generation.pop(TRACE_IN_GENERATION)

    def _to_former(self, message: Any) -> None:
        if message[0] == "RequestPlaced":
            del message[REQUEST_PLACED_FIELDS:]
        if message[0] == "RequestFailed":
            del message[REQUEST_FAILED_FIELDS:]
        if message[0] == "Find":
            del message[FIND_FIELDS:]
        if message[0] == "GenerateRequest":
            del message[GENERATE_REQUEST_FIELDS:]
            generation = message[1]
            del generation[GENERATION_FIELDS:]
            generation.insert(TRACE_IN_GENERATION, self._traces.get((generation[0], generation[1])))
        message[0] = _FORMER.get(message[0], message[0])


def _renamed_fields(value: Any, names: dict[str, str]) -> Any:
    """Maps under other keys, those within them too; arrays hold messages, whose fields have no names on the wire."""
    if not isinstance(value, dict):
        return value
    return {names.get(key, key): _renamed_fields(inner, names) for key, inner in value.items()}


def names_of(version: int) -> JournalNames:
    """How a journal of this version spells what today's code knows under other names."""
    match version:
        case 1:
            return JournalVersion1()
        case 2:
            return JournalVersion2()
        case 3:
            return JournalVersion3()
        case 4:
            return JournalVersion4()
        case 5:
            return JournalVersion5()
        case 6:
            return JournalVersion6()
        case 7:
            return JournalVersion7()
        case 8:
            return JournalVersion8()
        case 9:
            return JournalVersion9()
        case 10:
            return JournalVersion10()
        case _:
            return JournalNames()
