"""Messages to detokenizers fit the bus, whatever their requests hold."""

from __future__ import annotations

import msgspec

from services.scheduler.core.events import SendTokens
from services.scheduler.core.results.outbox import TokenStreams
from services.scheduler.core.sequence import QueueKey, Sequence
from shared.ids import EngineId, Incarnation
from shared.messages.detokenizer import TokenBatch
from tests.support.engines.checking_worker import generate
from tests.support.engines.single_engine import PROMPT

MAX_PAYLOAD = 8 << 20
LONG = tuple(chr(0x1F600 + number) * 1024 for number in range(16))
"""As much as one request may have, in the widest characters."""


def test_openings_of_many_requests_with_long_stop_strings_are_sent_in_several_messages() -> None:
    streams = TokenStreams(EngineId("e"), Incarnation(1))
    for number in range(129):
        stop = LONG if number < 128 else ("short",)
        generated = generate(f"r{number}", PROMPT, stop=stop)
        sequence = Sequence(generated, QueueKey(0, 0.0, number), 99, frozenset(), 16)
        streams.open(sequence, 0, queued=0.0)
    streams.disown(sequence.detokenizer, sequence.generation.request, sequence.generation.attempt)
    outputs = streams.flush()
    batches: list[TokenBatch] = [output.batch for output in outputs if isinstance(output, SendTokens)]
    assert len(batches) == len(outputs) > 1
    assert [batch.number for batch in batches] == list(range(len(batches)))
    assert [opened.request for batch in batches for opened in batch.opened] == [f"r{n}" for n in range(129)]
    assert max(len(msgspec.msgpack.encode(batch)) for batch in batches) < MAX_PAYLOAD
    assert [len(batch.abandoned) for batch in batches] == [0] * (len(batches) - 1) + [1]
