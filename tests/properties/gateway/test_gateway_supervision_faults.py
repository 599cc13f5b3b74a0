"""Whatever is lost, doubled, delayed or killed: each request ends once, and no token is lost or doubled."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.effects import AttemptRetry, CancelAttempt, DispatchAttempt, ProbeEngine
from services.gateway.core.open_request import RetryPolicy
from services.gateway.core.supervisor import RequestSupervisor
from shared.ids import Attempt, DetokenizerId, EngineId, Incarnation, RequestId
from shared.messages.coordinator import Withdraw
from shared.messages.gateway import (
    Delta,
    Deltas,
    RequestFailed,
    RequestPlaced,
    RequestQueued,
    RequestRejected,
    StreamOpened,
)
from shared.messages.scheduler import ProbeReply
from shared.messages.tokenizer import Tokenize
from shared.packing import unpack
from tests.unit.gateway.core.test_supervisor import first_message, life

LENGTH = 6
ENGINES = (EngineId("engine-1"), EngineId("engine-2"))
DETOKENIZERS = (DetokenizerId("detokenizer-1"), DetokenizerId("detokenizer-2"))
POLICY = RetryPolicy(placement_s=3.0, queue_s=60.0, request_s=500.0, attempts=3, attempts_in_all=6)


def text_of(position: int) -> str:
    return f"<{position}>"


class Run:
    """An attempt on an engine: it says token `position` next."""

    def __init__(self, message: Tokenize, engine: EngineId, detokenizer: DetokenizerId) -> None:
        self.request, self.attempt = message.request, message.attempt
        self.engine, self.detokenizer = engine, detokenizer
        self.position = len(unpack(message.resume))
        expected = "".join(text_of(i) for i in range(self.position))
        assert unpack(message.resume) == list(range(self.position))
        assert message.sent_chars == len(expected)


class RingWithFaults:
    """Owns a supervision, an honest ring around it, and a network that is not to be trusted."""

    def __init__(self) -> None:
        self.supervision = RequestSupervisor(POLICY)
        self.now = 0.0
        self.opened = 0
        self.to_tokenizer: list[Tokenize] = []
        self.queue: list[Tokenize] = []
        self.runs: dict[tuple[RequestId, Attempt], Run] = {}
        self.wire: list[Any] = []
        self.asked: list[ProbeEngine] = []
        self.numbers = dict.fromkeys(DETOKENIZERS, 0)
        self.epochs = dict.fromkeys(DETOKENIZERS, 1)
        self.got: dict[RequestId, list[int]] = {}
        self.text: dict[RequestId, str] = {}
        self.ends: dict[RequestId, list[str]] = {}

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Delta():
                    assert not self.ends[effect.request], "something followed the end"
                    self.got[effect.request] += effect.tokens
                    self.text[effect.request] += effect.text
                    if effect.finish is not None:
                        self.ends[effect.request].append("finished")
                case RequestRejected():
                    assert not self.ends[effect.request], "something followed the end"
                    self.ends[effect.request].append("rejected")
                case DispatchAttempt():
                    self.to_tokenizer.append(effect.tokenize)
                case CancelAttempt():
                    for key in [k for k in self.runs if k[0] == effect.cancel.request]:
                        if key[1] <= effect.cancel.attempt and self.runs[key].engine == effect.engine:
                            del self.runs[key]
                case Withdraw():
                    self.queue = [
                        m
                        for m in self.queue
                        if (m.request, m.attempt) > (effect.request, effect.attempt) or m.request != effect.request
                    ]
                case ProbeEngine():
                    self.asked.append(effect)
                case StreamOpened() | AttemptRetry():
                    pass

    # Clients.

    def open(self) -> None:
        request = RequestId(f"r{self.opened}")
        self.opened += 1
        self.got[request], self.text[request], self.ends[request] = [], "", []
        self.perform(self.supervision.open(first_message(request), self.now))

    def leave(self, pick: int) -> None:
        request = RequestId(f"r{self.opened - 1 - pick}")
        if request in self.supervision:
            self.perform(self.supervision.close(request, self.now))
            self.ends[request].append("left")

    # The ring, honest.

    def tokenize(self, fate: str) -> None:
        message = self.to_tokenizer.pop(0)
        match fate:
            case "route":
                self.queue.append(message)
            case "undelivered":
                self.perform(self.supervision.undelivered(message, self.now))
            case "failed":
                self.wire.append(RequestFailed(message.request, message.attempt, "no coordinator"))
            case "rejected":
                kind: Any = "overloaded"
                self.wire.append(
                    RequestRejected(request=message.request, attempt=message.attempt, kind=kind, message="full")
                )

    def place(self, where: int, say_queued: bool) -> None:
        message = self.queue.pop(0)
        engine, detokenizer = ENGINES[where % 2], DETOKENIZERS[where // 2]
        if say_queued:
            self.wire.append(RequestQueued(message.request, message.attempt))
        self.wire.append(RequestPlaced(message.request, message.attempt, engine, detokenizer))
        self.runs[message.request, message.attempt] = Run(message, engine, detokenizer)

    def step(self) -> None:
        """Every run says one token; one message for each detokenizer."""
        for detokenizer in DETOKENIZERS:
            deltas, opened = [], []
            for key, run in list(self.runs.items()):
                if run.detokenizer != detokenizer:
                    continue
                position = run.position
                run.position += 1
                opened.append(StreamOpened(run.request, run.attempt, 3, 0))
                finish: Any = "length" if run.position == LENGTH else None
                deltas.append(Delta(run.request, run.attempt, position, (position,), text_of(position), finish))
                if finish:
                    del self.runs[key]
            if deltas:
                self.publish(detokenizer, tuple(opened), tuple(deltas))

    def publish(self, detokenizer: DetokenizerId, opened: Any, deltas: Any) -> None:
        number = self.numbers[detokenizer]
        self.numbers[detokenizer] += 1
        epoch = Incarnation(self.epochs[detokenizer])
        self.wire.append(Deltas(detokenizer=detokenizer, epoch=epoch, number=number, opened=opened, deltas=deltas))

    def probe(self, fate: Any) -> None:
        ask = self.asked.pop(0)
        answer: Any = fate
        if fate == "answer":
            run = self.runs.get((ask.probe.request, ask.probe.attempt))
            answer = ProbeReply("running", run.position) if run else ProbeReply("unknown", 0)
        self.perform(self.supervision.record_probe_reply(ask.probe.request, ask.probe.attempt, answer, self.now))

    # The network, not so.

    def transport(self, pick: int, fate: str) -> None:
        """In order or late, once or twice or never."""
        message = self.wire[pick % len(self.wire)] if fate == "double" else self.wire.pop(pick % len(self.wire))
        if fate != "lose":
            self.perform(self.supervision.handle(message, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.supervision.tick(self.now))

    def kill_engine(self, which: int) -> None:
        which %= 2
        for key in [key for key, run in self.runs.items() if run.engine == ENGINES[which]]:
            del self.runs[key]
        end = self.supervision.instance_gone if self.opened % 2 else self.supervision.instance_silent
        self.perform(end(life("scheduler", ENGINES[which]), "away", self.now))

    def kill_detokenizer(self, which: int) -> None:
        which %= 2
        detokenizer = DETOKENIZERS[which]
        self.numbers[detokenizer], self.epochs[detokenizer] = 0, self.epochs[detokenizer] + 1
        self.perform(self.supervision.instance_gone(life("detokenizer", detokenizer), "failed", self.now))

    def kill_coordinator(self, _: int) -> None:
        self.queue.clear()
        self.perform(self.supervision.instance_gone(life("coordinator", "c"), "failed", self.now))

    # What must hold.

    def no_token_is_lost_or_doubled(self) -> None:
        for request, got in self.got.items():
            assert got == list(range(len(got)))
            assert self.text[request] == "".join(text_of(i) for i in got)

    def each_request_is_open_or_has_one_end(self) -> None:
        for request, ends in self.ends.items():
            assert len(ends) == (0 if request in self.supervision else 1)
            if ends == ["finished"]:
                assert len(self.got[request]) == LENGTH

    # How it goes on.

    def round(self, chance: Random, trouble: float) -> None:
        """Everything moves on by one; with probability `trouble` each message, question or process has bad luck."""

        def fate(*bad: str, good: str) -> str:
            return chance.choice(bad) if chance.random() < trouble else good

        while self.to_tokenizer:
            self.tokenize(fate("lost", "undelivered", "failed", "rejected", good="route"))
        while self.queue:
            self.place(chance.randrange(4), chance.random() < trouble)
        self.step()
        for _ in range(len(self.wire)):
            pick = chance.randrange(4) if chance.random() < trouble else 0
            if chance.random() >= trouble / 2:  # or it comes late
                self.transport(pick, fate("double", "lose", good="deliver"))
        while self.asked:
            self.probe(fate("nobody there", "no answer in time", good="answer"))
        if chance.random() < trouble / 4:
            chance.choice([self.kill_engine, self.kill_detokenizer, self.kill_coordinator, self.leave])(
                chance.randrange(4)
            )
        self.wait(chance.choice([0.05, 0.3, 2.5]))
        self.check()

    def check(self) -> None:
        self.no_token_is_lost_or_doubled()
        self.each_request_is_open_or_has_one_end()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), trouble=st.sampled_from([0.02, 0.1, 0.4]))
def test_every_request_ends_once_and_no_token_is_lost_or_doubled(seed: int, trouble: float) -> None:
    ring, chance = RingWithFaults(), Random(seed)
    for _ in range(40):
        if ring.opened < 8 and chance.random() < 0.3:
            ring.open()
        ring.round(chance, trouble)
    for _ in range(400):
        ring.round(chance, 0.0)
    assert len(ring.supervision) == 0, "from when all went well on, every request should have come to its end"
