"""A runner for a tiny model, without the rehearsals of a start: for operations that take a second for each row."""

from __future__ import annotations

from pathlib import Path

import torch

from services.worker.distributed.communicator import SingleRank, SingleStage
from services.worker.executor.device_runner import DeviceRunner
from services.worker.executor.host_runner import HostRunner
from services.worker.executor.runner import RankComponents, RankMemory, RankState
from services.worker.graphs.capture import Capture
from services.worker.graphs.choice import DecodeGraphs
from services.worker.models.loaded_model import DtypeChoice, LoadedModel, LoadSettings, QuantizationChoice
from services.worker.models.model_loader import load_model
from services.worker.ops.interface import CacheDtype, OpsName
from services.worker.platforms.installed import built_in_platform
from services.worker.speculation.draft_model import DraftModelProposer, open_draft_model
from services.worker.speculation.drafter import TargetModel
from services.worker.speculation.proposer import NO_DRAFTS, DraftSettings
from services.worker.speculation.settings import SpeculationSettings
from shared.ids import ModelName


def tiny_runner(
    path: Path,
    ops: OpsName,
    *,
    device: str = "cpu",
    dtype: DtypeChoice = "auto",
    cache: CacheDtype = "auto",
    max_num_seqs: int = 3,
    num_blocks: int = 16,
    capture: Capture | None = None,
    launching: bool = False,
    drafted_by: Path | None = None,
    quantization: QuantizationChoice = "auto",
    state_checkpoints: int = 0,
) -> HostRunner | DeviceRunner:
    """`capture`: decodes are captured with it; None: nothing is. `launching`: as on a GPU. `drafted_by`: a
    model that drafts two tokens, whose decodes are captured, too."""
    loaded = load_model(
        LoadSettings(
            folder=path,
            platform=built_in_platform(device),
            dtype=dtype,
            ops=ops,
            kv_cache_dtype=cache,
            quantization=quantization,
        )
    )
    platform = loaded.settings.platform
    graphs = DecodeGraphs(loaded.decoder, platform, (max_num_seqs,), loaded.max_model_len, features=False)
    parts = RankComponents(
        card=loaded.card(ModelName("tiny")),
        platform=platform,
        decoder=loaded.decoder,
        max_num_seqs=max_num_seqs,
        communicator=SingleRank(),
        pipeline=SingleStage(),
        digest=loaded.digest,
        drafting=NO_DRAFTS if drafted_by is None else DraftSettings(2, False),
    )
    rank = RankState(
        parts,
        RankMemory(num_blocks, state_checkpoints),
        proposer=None if drafted_by is None else _drafts(loaded, drafted_by, num_blocks, max_num_seqs, capture),
        replaying=None if capture is None else graphs.replaying(capture),
    )
    return DeviceRunner(rank) if launching else HostRunner(rank)


def _drafts(
    loaded: LoadedModel, folder: Path, num_blocks: int, max_num_seqs: int, capture: Capture | None
) -> DraftModelProposer:
    platform, length = loaded.settings.platform, loaded.max_model_len
    decoder = loaded.decoder
    target = TargetModel(folder, loaded.config, decoder, decoder.ops, platform.device, loaded.torch_dtype, length, 1)
    with torch.inference_mode():
        drafter = open_draft_model(SpeculationSettings(method="draft", model=str(folder)), target, 2)
    proposer = drafter.proposer(num_blocks, max_num_seqs)
    if capture is not None:
        proposer.replay_by(DecodeGraphs(drafter.decoder, platform, (max_num_seqs,), length, False).replaying(capture))
    return proposer
