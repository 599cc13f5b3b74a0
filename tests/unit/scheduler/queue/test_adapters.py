"""Adapters have slots: those without one wait for it in their order, and hold up nobody who needs none."""

from __future__ import annotations

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import LorasChanged, SendPlan, SendToGateway, WorkersReady
from services.scheduler.core.limits import EngineLimits
from shared.ids import EngineId, Incarnation, LoraId, ModelName
from shared.messages.gateway import RequestRejected
from shared.messages.model_card import LoraRefusal
from shared.messages.worker import StepPlan
from tests.support.engines.checking_worker import LORAS as KNOWN
from tests.support.engines.checking_worker import HonestWorker, card, generate

A, B, C, _ = KNOWN


class Engine:
    def __init__(self, max_loras: int) -> None:
        self.core = EngineCore(EngineId("e"), Incarnation(1), EngineLimits(run_ahead=0, plan_late=False))
        self.worker = HonestWorker(64)
        self.plans: list[StepPlan] = []
        self.refused: list[RequestRejected] = []
        self.started: list[LoraId | None] = []
        """The adapters of the sequences, in the order in which they began."""
        self.send(WorkersReady(card(), 64, max_loras=max_loras))

    def send(self, event: object) -> None:
        for output in self.core.handle(event, 0.0):  # type: ignore[arg-type]
            if isinstance(output, SendPlan):
                self.plans.append(output.plan)
                self.started += [new.lora for new in output.plan.new]
            elif isinstance(output, SendToGateway) and isinstance(output.message, RequestRejected):
                self.refused.append(output.message)

    def ask(self, name: str, lora: LoraId | None, tokens: int = 3) -> None:
        self.send(generate(name, [4, 5, 6, ord(name[0]) % 20], lora=lora, max_tokens=tokens, ignore_eos=True))

    def run(self) -> None:
        while self.plans:
            self.send(self.worker.step(self.plans.pop(0)))


def test_a_plan_never_has_more_adapters_than_slots() -> None:
    engine = Engine(max_loras=1)
    for name, lora in (("a", A), ("b", B), ("c", A), ("d", None), ("e", C)):
        engine.ask(name, lora)
    engine.run()
    assert engine.started == [A, None, B, A, C]
    assert engine.core.idle


def test_what_has_a_slot_does_not_pass_what_waits_for_one() -> None:
    engine = Engine(max_loras=2)
    engine.ask("a", A, tokens=12)
    engine.ask("b", B, tokens=2)
    for name in "cdef":
        engine.ask(name, C if name == "c" else A)
    engine.run()
    assert engine.started == [A, B, C, A, A, A]
    report = engine.core.report()
    assert report is not None
    assert set(report.loras) == {A, C}


def test_an_adapter_that_the_workers_do_not_have_is_refused() -> None:
    engine = Engine(max_loras=2)
    engine.ask("a", LoraId(b"x" * 16))
    (refused,) = engine.refused
    assert refused.field == "model"
    assert "is not served by this engine" in refused.message


def test_an_adapter_that_is_gone_is_forgotten_behind_its_last_sequence() -> None:
    engine = Engine(max_loras=1)
    served = engine.core.report()
    assert served is not None
    engine.ask("a", A, tokens=6)
    engine.ask("b", A, tokens=2)  # waits
    left = tuple(each for each in served.model.loras if each.id != A)
    refusal = LoraRefusal(ModelName("x"), "/x", "no")
    engine.send(LorasChanged(left, (refusal,)))
    engine.ask("c", A)
    assert [each.field for each in engine.refused] == ["model"]
    forgotten: list[tuple[int, LoraId]] = []
    while engine.plans:
        plan = engine.plans.pop(0)
        forgotten += [(len(engine.core.requests), each) for each in plan.forget_loras]
        engine.send(engine.worker.step(plan))
    assert engine.started == [A, A]
    assert forgotten == []
    engine.ask("d", B, tokens=1)
    (plan,) = engine.plans
    assert plan.forget_loras == (A,)
    report = engine.core.report()
    assert report is not None
    assert (report.model.loras, report.lora_refusals) == (left, (refusal,))
    assert A not in report.loras


def test_an_adapter_that_comes_back_is_not_forgotten() -> None:
    engine = Engine(max_loras=1)
    whole = card().loras
    engine.send(LorasChanged(whole[1:]))
    engine.send(LorasChanged(whole))
    engine.ask("a", A, tokens=1)
    (plan,) = engine.plans
    assert plan.forget_loras == ()
