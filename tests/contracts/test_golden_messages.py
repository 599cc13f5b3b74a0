"""The bytes of every message: whoever changes them breaks a rolling upgrade and every journal, and must mean to.

A change that only appends a field with a default keeps old bytes decodable; update the golden bytes then.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, get_args, get_origin

import msgspec
import pytest

from shared import kv_groups
from shared.bus.codec import Undecodable, decode, encode
from shared.ids import (
    ArenaId,
    Attempt,
    ClusterName,
    DetokenizerId,
    EngineId,
    GatewayId,
    GrammarKey,
    Incarnation,
    InstanceId,
    LeaseId,
    LoraId,
    ModelName,
    NodeId,
    RequestId,
    RowsName,
    SequenceId,
)
from shared.messages import (
    coordinator,
    detokenizer,
    encoder,
    federation,
    gateway,
    generation,
    kv_events,
    kvstore,
    lifecycle,
    model_card,
    scheduler,
    supervisor,
    tokenizer,
    worker,
)
from shared.messages.dialects import Dialect
from tests.contracts.golden import GOLDEN

R, A, E = RequestId("r1"), Attempt(2), EngineId("engine-1")
SAMPLING = generation.SamplingOptions(seed=7, temperature=0.5, logit_bias=((3, 1.5),), logprobs=2)
STOPPING = generation.StopConditions(max_tokens=16, stop=("\n",), stop_token_ids=(5,))
LOGPROBS = generation.TokenLogprobs(9, -0.25, ((9, -0.25), (4, -2.0)))
RANKED = generation.TokenLogprobs(9, -0.25, (), 1)
CARD = model_card.ModelCard(
    name=ModelName("demo"),
    max_model_len=2048,
    vocab_size=2048,
    eos_token_ids=(2,),
    dtype="float32",
    created=1,
    pooling=model_card.PoolingCard(
        pooling="last",
        normalize=True,
        size=4,
        matryoshka=(2, 4),
        labels=("x",),
        activation="sigmoid",
        whole=True,
        step_tag_id=9,
        token_ids=(7,),
        activated=False,
    ),
    loras=(model_card.LoraCard(name=ModelName("poet"), id=LoraId(bytes(16)), rank=8),),
)
GENERATION = generation.Generation(
    request=R,
    attempt=A,
    gateway=GatewayId("gateway-1"),
    model=ModelName("demo"),
    tokens=b"\1\0\0\0",
    prompt_length=1,
    block_hashes=b"",
    sampling=SAMPLING,
    stopping=STOPPING,
)
EMBEDS = generation.PromptEmbeds(dtype="bfloat16", size=2, rows=b"\x80\x3f\0\0")
NODE, HASH = NodeId("node-1"), bytes(range(16))
LAYOUT = kvstore.KvLayout(model="m", dtype="float32", layers=2, kv_heads=4, head_dim=8)
OWNER = kvstore.LeaseOwner(InstanceId("engine-1"), Incarnation(1))
SOURCE = kv_events.KvSource(instance=InstanceId("engine-1"), model=ModelName("demo"), node=NODE)
BUCKETS = lifecycle.BucketCounts((1, 0), 0.5)
ENGINE_REPORT = lifecycle.EngineReport(
    model=CARD,
    waiting=1,
    running=2,
    max_waiting=3,
    max_running=4,
    blocks_total=5,
    blocks_free=6,
    steps=7,
    tokens=8,
    health=lifecycle.EngineHealth(suspect="no answer", ejections=2, faults=5),
    latency=lifecycle.LatencySums(9, 0.5, 10, 0.25),
    recompute=lifecycle.RecomputeReport(block_bytes=4096, block_seconds=0.5, load_seconds=0.25),
    step_times=lifecycle.StepTimesReport(decodes=lifecycle.StepTimeFit(8.0, 64.0, 0.5, 0.25, 0.125)),
    lora_refusals=(model_card.LoraRefusal(ModelName("pirate"), "/a", "r = 0", True),),
    paused="new",
    figures=lifecycle.RequestFigures(
        queue=BUCKETS, prefill=BUCKETS, decode=BUCKETS, inference=BUCKETS, step_tokens=BUCKETS
    ),
    preemptions=3,
    speculated=4,
    loaded_tokens=2,
)
KV_GROUPS = (kv_groups.KvCacheGroup(layers=2), kv_groups.KvCacheGroup(layers=2, window=24))
WORKER_REPORT = lifecycle.WorkerReport(
    engine=E,
    rank=0,
    world_size=1,
    model=CARD,
    num_blocks=9,
    device="cpu",
    kv_groups=KV_GROUPS,
    state_records=kv_groups.StateRecords(pages=7, alone=True),
    experts=lifecycle.ExpertReport((lifecycle.LayerExpertLoad(3, (120, 80)),), 2, 9),
)
LOGPROB_TEXT = gateway.LogprobText("a", b"a", -0.5, 9)

STREAM_OPENING = gateway.StreamOpening(
    stream="chatcmpl-1", key="alice", kind="chat", body=b"{}", choices=1, seed=7, arrival=1.5
)

MESSAGES: list[Any] = [
    tokenizer.Tokenize(
        request=R,
        attempt=A,
        gateway=GatewayId("gateway-1"),
        model=ModelName("demo"),
        prompt=tokenizer.ChatPrompt(messages=b"[]"),
        sampling=SAMPLING,
        stopping=STOPPING,
    ),
    tokenizer.Encode(tokenizer.TextPrompt("hi")),
    tokenizer.Encode(tokenizer.TokenPrompt(b"\1\0\0\0")),
    tokenizer.Decode(b"\1\0\0\0"),
    tokenizer.EncodeReply(b"\1\0\0\0", ("a",)),
    tokenizer.DecodeReply("hi"),
    tokenizer.TokenizerRefusal("no", "prompt"),
    coordinator.Route(GENERATION),
    coordinator.Withdraw(R, A),
    coordinator.PlacementMade(
        coordinator=InstanceId("coordinator-1"),
        engine=EngineId("engine-1"),
        detokenizer=DetokenizerId("detokenizer-1"),
        model=ModelName("demo"),
        prompt=bytes(range(16)),
        prompt_blocks=3,
        blocks=4,
        reused=2,
        on_device=1,
        decode_on=EngineId("engine-2"),
    ),
    scheduler.GenerateRequest(GENERATION, DetokenizerId("detokenizer-1")),
    scheduler.Cancel(R, A, DetokenizerId("detokenizer-1")),
    scheduler.StopMatched(R, A),
    scheduler.TokenBatchLost(DetokenizerId("detokenizer-1")),
    scheduler.Probe(R, A),
    scheduler.ProbeReply("running", 3),
    scheduler.StepFinished(
        epoch=Incarnation(1),
        step=2,
        sampled=(scheduler.SampledTokens(SequenceId(0), (9,), (LOGPROBS,)),),
        timing=scheduler.StepTiming(wait=0.0, prepare=0.125, forward=0.25, sample=0.5),
        scored=(scheduler.SequencePromptLogprobs(SequenceId(1), 1, (RANKED,)),),
        failed=(scheduler.SequenceFailed(SequenceId(2), "it takes too long", "refused"),),
        pooled=(scheduler.SequencePooled(SequenceId(3), b"\0\0\x80?"),),
    ),
    scheduler.GenerateRequest(
        GENERATION,
        DetokenizerId("detokenizer-1"),
        decode_on=E,
        handed=scheduler.HandOver(prefilled_by=E, node=NODE, partial=HASH, cached_tokens=16),
        kv_source=NODE,
        predicted_cached=32,
    ),
    scheduler.TransferProgress(rank=1, epoch=Incarnation(1), done=2, failed=(1,), early=(3,)),
    scheduler.StepMissed(worker=InstanceId("engine-1-rank0"), epoch=Incarnation(1), expected=2),
    scheduler.GrammarCompiled(
        epoch=Incarnation(1),
        grammar=generation.Grammar("regex", "a(", after="</think>").key,
        error="regex, character 2: ( is not closed",
    ),
    worker.StepPlan(
        epoch=Incarnation(1),
        step=2,
        released=(SequenceId(1),),
        new=(
            worker.NewSequence(
                sequence=SequenceId(0),
                tokens=b"\1\0\0\0",
                prompt_length=1,
                computed=0,
                blocks=b"\2\0\0\0",
                sampling=SAMPLING,
                grammar=worker.GrammarRef(GrammarKey(HASH), "</think>"),
                pooling=generation.PoolingOptions(pooling="all", dimensions=4, whole=True, step_tag_id=9),
            ),
        ),
        work=(worker.SequenceWork(SequenceId(0), 1, b"", True),),
        transfers=(
            worker.Transfer(
                number=0,
                kind="load",
                arena=ArenaId(5),
                path="a",
                blocks=b"\2\0\0\0",
                slots=b"\7\0\0\0",
                generations=b"\1\0\0\0\0\0\0\0",
            ),
        ),
        compile=(generation.Grammar("regex", "a+", after="</think>"),),
        forget=(GrammarKey(HASH),),
        connector=worker.ConnectorPlan(
            loads=(worker.ConnectorLoad(number=1, run=worker.KvBlockRun("r1-2", 0, b"\2\0\0\0", HASH), awaited=True),),
            save=2,
            saves=(worker.KvBlockRun("r1-2", 1, b"\3\0\0\0", HASH),),
            sends=(worker.ConnectorSend(number=3, request="r1-2"),),
            metadata=b"m",
        ),
        restored=(worker.StateCopy(SequenceId(0), 1),),
        checkpoints=(worker.StateCopy(SequenceId(0), 2),),
    ),
    detokenizer.TokenBatch(
        engine=E,
        epoch=Incarnation(1),
        number=0,
        opened=(
            detokenizer.OpenStream(
                request=R,
                attempt=A,
                gateway=GatewayId("gateway-1"),
                model=ModelName("demo"),
                context=b"\1\0\0\0",
                resumed=0,
                sent_chars=0,
                prompt_tokens=1,
                cached_tokens=0,
            ),
        ),
        entries=(detokenizer.NewTokens(R, A, 0, (9,), "stop"),),
        abandoned=(detokenizer.AbandonStream(R, A),),
        moved=(detokenizer.StreamMoved(R, A, EngineId("engine-2")),),
        scored=(detokenizer.PromptLogprobs(R, A, 1, (RANKED,)),),
        pooled=(detokenizer.PooledPrompt(R, A, b"\0\0\x80?"),),
    ),
    gateway.RequestQueued(R, A),
    gateway.RequestPlaced(R, A, E, DetokenizerId("detokenizer-1")),
    gateway.RequestPlaced(R, A, E, DetokenizerId("detokenizer-1"), EngineId("engine-2")),
    gateway.RequestRejected(request=R, attempt=A, kind="invalid_request", message="no", field="prompt"),
    gateway.RequestFailed(R, A, "gone", "alone", 7, False, True),
    gateway.Deltas(
        detokenizer=DetokenizerId("detokenizer-1"),
        epoch=Incarnation(1),
        number=0,
        opened=(gateway.StreamOpened(R, A, 1, 0, None, E, 0.5),),
        deltas=(gateway.Delta(R, A, 0, (9,), "a", "stop", None, (gateway.PositionLogprobs(LOGPROB_TEXT, ()),)),),
        scored=(gateway.PromptLogprobsDelta(R, A, 1, (gateway.PositionLogprobs(LOGPROB_TEXT, (), 3),)),),
        pooled=(gateway.PooledDelta(R, A, b"\0\0\x80?"),),
    ),
    lifecycle.Lifecycle(
        service="scheduler",
        instance=InstanceId("engine-1"),
        incarnation=Incarnation(1),
        phase="ready",
        pid=1,
        host="h",
        started=1.5,
        engine=ENGINE_REPORT,
        worker=WORKER_REPORT,
        sleep=lifecycle.SleepReport(2, CARD),
    ),
    lifecycle.Lifecycle(
        service="kvstore",
        instance=InstanceId("kvstore-1"),
        incarnation=Incarnation(1),
        phase="ready",
        pid=1,
        host="h",
        started=1.5,
        store=lifecycle.StoreReport(
            node=NODE,
            slots=8,
            committed=3,
            reserved=1,
            pinned=2,
            bytes_used=4096,
            bytes_total=8192,
            hits=5,
            misses=6,
            lower_hits=4,
            transfer="10.0.0.7:7700",
            prefetched=2,
            links=(kvstore.LinkReport(source=NODE, bytes_per_second=1.5, latency=0.25),),
            endpoints=(kvstore.TransferEndpoint("tcp", "10.0.0.7:7701"),),
            tiers=(
                lifecycle.TierReport(name="ssd", present=True, blocks=7, bytes_used=8, bytes_total=9, direct=True),
                lifecycle.TierReport(name="redis", present=False, hits=1, problem="it does not answer"),
            ),
        ),
    ),
    lifecycle.Lifecycle(
        service="tokenizer",
        instance=InstanceId("tokenizer-1"),
        incarnation=Incarnation(1),
        phase="ready",
        pid=1,
        host="h",
        started=1.5,
        tokenizer=lifecycle.TokenizerReport(
            model=ModelName("demo"), dialect=Dialect("hermes", "qwen3", ("enable_thinking",))
        ),
    ),
    lifecycle.Drain(),
    lifecycle.Undrain(),
    supervisor.Scale("engines", 2),
    supervisor.ScaleResult(("engine-2",), ()),
    supervisor.ScaleRefusal("no"),
    supervisor.RankAssignment((supervisor.EngineRanks(EngineId("engine-1"), "10.0.0.1:4300"),)),
    supervisor.RankStatus(1, (supervisor.EngineRanks(EngineId("engine-1"), "10.0.0.1:4300"),), ()),
    kvstore.Attach(LAYOUT, ModelName("demo")),
    kvstore.Find(layout="f", owner=OWNER, lease=LeaseId(4), hashes=HASH, deadline=0.25, source=NODE),
    kvstore.Reserve(layout="f", owner=OWNER, lease=LeaseId(4), hashes=HASH, parents=bytes(16), tokens=b"\x10"),
    kvstore.Commit(layout="f", owner=OWNER, lease=LeaseId(4)),
    kvstore.Release(layout="f", owner=OWNER, lease=LeaseId(4), drop=HASH),
    kvstore.AttachReply("f", ArenaId(5), "f.kv", 8, 10.0),
    kvstore.KvStoreRefusal("no"),
    kvstore.FindReply(arena=ArenaId(5), slots=b"\7\0\0\0", generations=b"\1\0\0\0\0\0\0\0", from_lower=1),
    kvstore.ReserveReply(arena=ArenaId(5), slots=b"\7\0\0\0", generations=b"\1\0\0\0\0\0\0\0"),
    kvstore.CommitReply(1),
    kv_events.KvEvents(source=SOURCE, epoch=Incarnation(1), number=0, stored=HASH, removed=HASH, cleared=True),
    kv_events.KvDumpRequest(InstanceId("coordinator-1")),
    kv_events.KvDump(source=SOURCE, epoch=Incarnation(1), number=-1, part=0, parts=1, hashes=HASH),
    lifecycle.NameClaim(Incarnation(1)),
    lifecycle.NameHolder(Incarnation(1), 7, "h"),
    gateway.UsageReport(
        gateway=GatewayId("gateway-1"),
        incarnation=Incarnation(1),
        keys=(gateway.KeyUsage(key="alice", requests=3, tokens=70, open=1, requests_left=2.5),),
    ),
    gateway.ReadMetrics(),
    gateway.MetricsPage(b"a 1.0\n"),
    scheduler.OutlierReport("9 requests failed"),
    gateway.KeepStream(GatewayId("gateway-1"), Incarnation(1), STREAM_OPENING),
    gateway.StreamsGrown(
        GatewayId("gateway-1"), (gateway.StreamOpened(R, A, 1, 0, None, E),), (gateway.Delta(R, A, 0, (9,), "a"),)
    ),
    gateway.ForgetStream(GatewayId("gateway-1"), "chatcmpl-1"),
    gateway.TakeStream(GatewayId("gateway-2"), Incarnation(2), "chatcmpl-1", "alice"),
    gateway.StreamCopy(STREAM_OPENING, (), (gateway.Delta(R, A, 0, (9,), "a", "stop"),), True),
    gateway.StreamUnknown(),
    coordinator.RequestEnded(R, 9),
    supervisor.HostReport(
        node=NodeId("n"), address="10.0.0.2", incarnation=Incarnation(1), instances=(InstanceId("n-engine-1"),)
    ),
    supervisor.PlannerDecision(
        at=1.5,
        observed_rate=2.5,
        predicted_rate=3.5,
        backlog=4,
        prompt_tokens=5.5,
        cached_tokens=6.5,
        output_tokens=7.5,
        observed_ttft=None,
        observed_itl=0.5,
        ttft_correction=1.25,
        itl_correction=0.75,
        forecast_ttft=0.25,
        forecast_itl=0.125,
        suffices=True,
        pools=(supervisor.PoolDecision(role="decode", present=1, wanted=3, target=2, reason="cool-down"),),
        acts=True,
        profile="none",
        profile_note="n",
    ),
    kvstore.Prefetch(layout="f", source=NODE, hashes=HASH),
    federation.ClusterStatus(
        cluster=ClusterName("eu"),
        address="10.0.0.1:7222",
        gateway=GatewayId("gateway-1"),
        incarnation=Incarnation(1),
        since=1.5,
        sent=2.5,
        models=(federation.ModelRoom(ModelName("demo"), HASH, 3, 8),),
        drained=True,
        switched=0.5,
    ),
    federation.ClusterRequest(
        ClusterName("eu"),
        "10.0.0.1:7222",
        tokenizer.Tokenize(
            request=R,
            attempt=A,
            gateway=GatewayId("gateway-1"),
            model=ModelName("demo"),
            prompt=tokenizer.TextPrompt("hi"),
            sampling=generation.SamplingOptions(seed=7),
            stopping=generation.StopConditions(),
        ),
    ),
    federation.SwitchCluster(True, 1.5, 30.0),
    lifecycle.Standby(),
    coordinator.PullPrefills(E, 4096),
    lifecycle.LifecycleRequest(),
    lifecycle.HeartbeatInterval(4.0),
    tokenizer.Encode(tokenizer.PairPrompt("hi", "there")),
    kv_events.ResetPrefixCache(),
    kv_events.PrefixCacheReset(5),
    gateway.AbortRequests(("chatcmpl-1",)),
    gateway.RequestsAborted(("chatcmpl-1",)),
    tokenizer.Encode(tokenizer.EmbedsPrompt(EMBEDS)),
    coordinator.Route(msgspec.structs.replace(GENERATION, prompt_embeds=EMBEDS)),
    tokenizer.Encode(tokenizer.ChatPrompt(messages=b"[]", embeds=(EMBEDS,))),
    coordinator.Route(
        msgspec.structs.replace(GENERATION, prompt_embeds=msgspec.structs.replace(EMBEDS, runs=((3, 1),)))
    ),
    supervisor.Scale("engines", 2, ModelName("demo")),
    lifecycle.Lifecycle(
        service="detokenizer",
        instance=InstanceId("detokenizer-1"),
        incarnation=Incarnation(1),
        phase="ready",
        pid=1,
        host="h",
        started=1.5,
        detokenizer=lifecycle.DetokenizerReport(model=ModelName("demo")),
    ),
    gateway.ReadOverview(100),
    gateway.GatewayOverview(
        (
            gateway.ResponseOverview(
                id="chatcmpl-1",
                model="m",
                kind="chat",
                started=1.5,
                state="running",
                engines=(E,),
                sequences=1,
                prompt_tokens=7,
                tokens=3,
                attempts=1,
            ),
        ),
        1,
        (gateway.LatencyCounts("m", "ttft", (0.1,), (2, 1), 0.5, "key"),),
        (
            gateway.EndedResponse(
                id="cmpl-2", model="m", started=1.5, ended=2.5, outcome="finished", prompt_tokens=7, tokens=3
            ),
        ),
    ),
    gateway.ReadSpans("cmpl-1"),
    gateway.SpansFound("0a", (gateway.SpanFound(name="queue", begun=1.5, ended=None, attributes={"engine": "e"}),)),
    scheduler.PauseGeneration("all"),
    scheduler.ResumeGeneration(),
    scheduler.ReadPauseState(),
    scheduler.PauseState("new", 3),
    scheduler.SleepEngine(1),
    scheduler.WakeEngine(),
    scheduler.ReadSleepState(),
    scheduler.SleepState(2, 1),
    scheduler.ReadPicture(),
    scheduler.EnginePicture(
        blocks=scheduler.BlockMap(total=5, free=1, cached=1, loading=1, every=1, cells=bytes(range(5))),
        block_size=16,
        max_batch_tokens=512,
        steps=(
            scheduler.StepPicture(
                step=7,
                seconds=0.25,
                prefill_tokens=32,
                decode_tokens=3,
                prefills=1,
                decodes=2,
                drafted=1,
                accepted=1,
                timing=scheduler.StepTiming(wait=0.0, prepare=0.125, forward=0.25, sample=0.5),
            ),
        ),
        waiting=(
            scheduler.SequencePicture(
                request=R,
                phase="waiting",
                arrival=1.5,
                priority=0,
                prompt_tokens=7,
                computed_tokens=0,
                output_tokens=0,
                cached_tokens=0,
                blocks=0,
            ),
        ),
        queued=1,
    ),
    supervisor.StrikeProcess(InstanceId("engine-1"), "pause", 2.0),
    supervisor.ProcessStruck(7),
    supervisor.StrikeRefusal("no"),
    worker.SleepRank(1),
    worker.WakeRank(Incarnation(5)),
    kvstore.FindAny(layout="f", owner=OWNER, lease=LeaseId(4), hashes=HASH),
    kvstore.FindAnyReply(b"\1"),
    encoder.EncodeInput(b"GIF"),
    encoder.EncoderRows(generation.PromptEmbeds(dtype="float16", size=1, rows=b"\0<")),
    encoder.EncoderRefusal("no"),
    lifecycle.Lifecycle(
        service="encoder",
        instance=InstanceId("encoder-1"),
        incarnation=Incarnation(1),
        phase="ready",
        pid=1,
        host="h",
        started=1.5,
        encoder=encoder.EncoderReport(model=ModelName("demo"), hits=2, encoded=1),
    ),
    gateway.PromptKept(request=R, attempt=A, blocks=2, engine=E, node=NODE),
    scheduler.ReleaseKept(R),
    generation.KeptPrompt(E, R, NODE),
    encoder.EncoderRows(
        generation.PromptEmbeds(dtype="float16", size=1, rows=b"\0<" * 6, runs=((0, 6),), grids=((1, 2, 3),))
    ),
    encoder.EncoderRows(
        generation.PromptEmbeds(dtype="float16", size=1, rows=b"\0<" * 2, runs=((0, 2),), mutual=(True,))
    ),
    encoder.EncoderRows(
        generation.PromptEmbeds(
            dtype="float16",
            size=1,
            rows=b"\0<",
            runs=((0, 1), (1, 3)),
            media=(None, generation.MediaRows(RowsName(HASH), 3, InstanceId("encoder-1"), "/dev/shm/r")),
        )
    ),
    encoder.RenewRows((RowsName(HASH),)),
    encoder.ReadRows(RowsName(HASH), 7),
    encoder.RowsPiece(b"rows"),
    gateway.RowsMissing(R),
    encoder.EncoderRows(
        generation.PromptEmbeds(dtype="float16", size=1, rows=b"\0<" * 2, runs=((0, 2),), encoded=True)
    ),
    model_card.AudioModel(
        row_size=4,
        rows=100,
        sample_rate=16_000,
        window_s=2,
        begin=8,
        end=7,
        no_timestamps=12,
        languages=(("en", 9),),
        tasks=(("transcribe", 10),),
        previous=11,
        suppressed=(1,),
        suppressed_first=(2,),
        max_first_timestamp=50,
    ),
    worker.PingRank(),
    encoder.EncodeInput(b"\0" * 6, frames=encoder.FrameGroup(1, 1, 4)),
    tokenizer.Encode(
        tokenizer.ChatPrompt(
            messages=b"[]",
            embeds=(generation.PromptEmbeds(dtype="float16", size=1, rows=b"\0<", grids=((1, 1, 1),), offsets=(3,)),),
            videos=(tokenizer.VideoParts((0,), (0.5,)),),
        )
    ),
    model_card.VideoModel(positions_per_second=2.0),
    model_card.SoundModel(64, 16_000, 30, model_card.TranscriptionChat(window_s=30, languages=(("de", "German"),))),
    model_card.EncoderDecoderModel(row_size=64, rows=1024, start=2, forced_first=0),
    encoder.EncodeInput(b"\0" * 4, written=encoder.WrittenTokens(b"\x02\0\0\0\x01\0\0\0", 1)),
    encoder.TokenTimes((0.5,)),
    encoder.EncoderRows(
        generation.PromptEmbeds(
            dtype="float16", size=1, rows=b"\0<" * 2, runs=((0, 3),), texts=((1, (12,)), (3, (13, 300)))
        )
    ),
    encoder.ForgetRows(),
    tokenizer.ReadTokenizerInfo(),
    tokenizer.TokenizerInfo(b"{}"),
    gateway.PromptsHeld(InstanceId("tokenizer-1"), ((R, A),)),
    model_card.CrossImageModel(token=300, row_size=64, rows=80),
    tokenizer.Encode(tokenizer.InfillPrompt("a", "b")),
]


def name(message: Any) -> str:
    return f"{type(message).__module__.rpartition('.')[2]}.{type(message).__name__}"


def labels() -> list[str]:
    return [f"{i:02d} {name(m)}" for i, m in enumerate(MESSAGES)]


@pytest.mark.parametrize("number", range(len(MESSAGES)), ids=labels())
def test_a_message_has_the_bytes_that_it_had(number: int) -> None:
    message = MESSAGES[number]
    assert encode(message).hex() == GOLDEN[labels()[number]]
    assert decode(bytes.fromhex(GOLDEN[labels()[number]]), type(message)) == message


def _structs_within(value: Any) -> set[type[msgspec.Struct]]:
    found: set[type[msgspec.Struct]] = set()
    if isinstance(value, msgspec.Struct):
        found.add(type(value))
        for field in value.__struct_fields__:
            found |= _structs_within(getattr(value, field))
    elif isinstance(value, tuple):
        for item in value:
            found |= _structs_within(item)
    return found


def test_every_message_is_among_them() -> None:
    modules = (
        coordinator,
        detokenizer,
        encoder,
        federation,
        gateway,
        generation,
        kv_events,
        kv_groups,
        kvstore,
        lifecycle,
        scheduler,
        supervisor,
        tokenizer,
        worker,
    )
    declared = {
        cls
        for module in modules
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, msgspec.Struct) and cls.__module__ == module.__name__
    }
    shown: set[type] = set()
    for message in MESSAGES:
        shown |= _structs_within(message)
    assert {c.__name__ for c in declared - shown} == set()


def test_every_message_is_frozen_and_an_array_on_the_wire() -> None:
    for message in MESSAGES:
        for cls in _structs_within(message):
            config = cls.__struct_config__
            assert config.frozen, cls
            assert config.array_like, cls


@pytest.mark.parametrize("number", range(len(MESSAGES)), ids=labels())
def test_a_cut_or_foreign_payload_is_undecodable(number: int) -> None:
    message = MESSAGES[number]
    payload = encode(message)
    with pytest.raises(Undecodable):
        decode(payload[:-1], type(message))
    with pytest.raises(Undecodable):
        decode(msgspec.msgpack.encode({"not": "ours"}), type(message))


def test_unions_tell_their_members_apart() -> None:
    unions: list[Any] = [
        coordinator.PlacementNotice,
        gateway.GatewayMessage,
        gateway.GatewayRequest,
        gateway.GatewayReply,
        scheduler.SchedulerControl,
        scheduler.SchedulerQuestion,
        scheduler.WorkerResult,
    ]
    unions += [
        tokenizer.TokenizerRequest,
        tokenizer.TokenizerReply,
        encoder.EncoderReply,
        encoder.RowsNotice,
        lifecycle.InstanceControl,
        supervisor.ScaleReply,
        kvstore.KvStoreQuestion,
        kvstore.KvStoreReply,
    ]
    for union in unions:
        assert get_origin(union) is types.UnionType
        members = [m for m in MESSAGES if type(m) in get_args(union)]
        assert {type(m) for m in members} == set(get_args(union))
        for message in members:
            assert decode(encode(message), union) == message
