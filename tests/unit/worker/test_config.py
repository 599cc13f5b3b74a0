"""The worker's settings: what is so unless told otherwise, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.worker.config import WorkerConfig
from services.worker.models.pooling.pooler_config import PoolerSettings
from shared.config import ConfigError, load_config


def told(*argv: str) -> WorkerConfig:
    return load_config("worker", WorkerConfig, ["--model=m", "--engine=e", *argv], environment={})


def test_decodes_are_captured_and_nine_tenths_of_a_gpu_taken_unless_told_otherwise() -> None:
    config = told()
    assert (config.enforce_eager, config.gpu_memory_utilization, config.kv_cache_dtype) == (False, 0.9, "auto")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--gpu-memory-utilization=0", "gpu_memory_utilization = '0'"),
        ("--gpu-memory-utilization=1.1", "gpu_memory_utilization = '1.1'"),
        ("--kv-cache-dtype=int4", "kv_cache_dtype = 'int4'"),
        ("--ops=cuda", "ops = 'cuda'"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(argv: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        told(argv)


PARALLEL, FILES = "--enable-expert-parallel", "--expert-load-dir=loads"
EPLB = [PARALLEL, "--enable-eplb"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([PARALLEL, "--device=sim"], "enable_expert_parallel: the simulated device has no experts"),
        ([FILES, "--device=sim"], "expert_load_dir: the simulated device has no experts"),
        (["--enable-eplb", FILES], "enable_eplb: needs enable_expert_parallel"),
        (["--all2all-backend=low_latency"], "all2all_backend = low_latency: needs data_parallel_size of 2 or more"),
        ([PARALLEL, "--eplb-config={}"], "eplb_config = {}: needs enable_eplb"),
        ([*EPLB, '--eplb-config={"window_size": 0}'], r"\.window_size"),
        ([*EPLB, '--eplb-config={"use_async": true}'], "known are window_size, step_interval, num_redundant_experts"),
        (
            [*EPLB, "--num-redundant-experts=2", '--eplb-config={"num_redundant_experts": 2}'],
            "num_redundant_experts: is in eplb_config, too",
        ),
        ([PARALLEL, FILES, "--num-redundant-experts=2"], "num_redundant_experts = 2: needs enable_eplb"),
    ],
)
def test_experts_that_would_not_be_placed_so_are_refused(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        told(*argv)


@pytest.mark.parametrize(
    ("config", "flags", "settings"),
    [
        (
            {"pooling_type": "STEP", "step_tag_id": 12, "returned_token_ids": [1, 2], "use_activation": False},
            [],
            PoolerSettings("step", 12, (1, 2), use_activation=False),
        ),
        ({"tok_pooling_type": "STEP"}, ["--pooling-step-tag-id=7"], PoolerSettings("step", 7)),
        ({"seq_pooling_type": "CLS", "normalize": True}, [], PoolerSettings("cls", normalize=True)),
        ({"tok_pooling_type": "ALL"}, [], PoolerSettings(all_tokens=True)),
        ({"softmax": True}, ["--pooling-type=last"], PoolerSettings("last", use_activation=True)),
    ],
)
def test_vllms_pooler_config_is_the_settings_that_it_names(
    config: dict[str, Any], flags: list[str], settings: PoolerSettings
) -> None:
    assert told(f"--pooler-config={json.dumps(config)}", *flags).pooler() == settings


@pytest.mark.parametrize(
    ("config", "flags", "said"),
    [
        ('{"pooling_type": "STEP"', [], "pooler_config = .*: "),
        ('{"dimensions": 64}', [], "; known are pooling_type, .*, returned_token_ids"),
        ('{"step_tag_id": "12"}', [], r"\.step_tag_id"),
        ('{"pooling_type": "FIRST"}', [], "pooling_type FIRST is not allowed; LAST, MEAN, CLS, .*, STEP are"),
        ('{"seq_pooling_type": "STEP"}', [], "seq_pooling_type STEP is not allowed; LAST"),
        ('{"seq_pooling_type": "ALL"}', [], "seq_pooling_type ALL is not allowed; LAST"),
        ('{"pooling_type": "LAST", "tok_pooling_type": "STEP"}', [], "pooling_type and tok_pooling_type say the same"),
        ('{"use_activation": true, "softmax": false}', [], "use_activation and softmax say the same"),
        ('{"pooling_type": "MEAN"}', ["--pooling-type=last"], "pooling_type: pooler_config says pooling_type, too"),
        ('{"step_tag_id": 1}', ["--pooling-step-tag-id=1"], "pooling_step_tag_id: pooler_config says step_tag_id"),
    ],
)
def test_a_pooler_config_that_cannot_be_followed_is_refused(config: str, flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        told(f"--pooler-config={config}", *flags)


SHARING = ["--enable-sp", "--world-size=2"]
GROUP = [PARALLEL, "--data-parallel-size=2", "--rendezvous=file:///r"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--data-parallel-size=2", "--rendezvous=file:///r"], "data_parallel_size = 2: needs enable_expert_parallel"),
        ([PARALLEL, "--data-parallel-size=2"], "rendezvous: must be set with data_parallel_size = 2"),
        ([*GROUP, "--data-parallel-rank=2"], "data_parallel_rank = 2: must be below data_parallel_size = 2"),
        ([*GROUP, "--device=cuda"], "device = cuda: not possible with"),
        (
            [*GROUP, '--speculative={"method":"draft","model":"d"}'],
            "speculative: method draft: not possible",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        told(*argv)


@pytest.mark.features("data parallel", "pipeline parallel", refused=True)
def test_engines_of_a_group_have_one_stage() -> None:
    with pytest.raises(ConfigError, match="pp = 2: not possible with data_parallel_size = 2"):
        told(*GROUP, "--world-size=2", "--pp=2")


@pytest.mark.features("data parallel", "KV connector", refused=True)
def test_engines_of_a_group_have_no_connector() -> None:
    with pytest.raises(ConfigError, match="kv_connector = shared-memory: not possible with data_parallel_size = 2"):
        told(*GROUP, "--kv-connector=shared-memory")


def test_rows_that_would_not_be_shared_are_refused() -> None:
    for argv, said in (
        (["--sp-min-token-num=8"], "sp_min_token_num = 8: needs enable_sp"),
        (["--enable-sp"], "enable_sp: needs two tensor-parallel ranks or more"),
        (["--enable-sp", "--world-size=2", "--pp=2", "--rendezvous=file:///r"], "enable_sp: needs two tensor-parallel"),
        (["--enable-sp", "--world-size=2", "--device=sim"], "enable_sp: the simulated device has no rows"),
        ([*GROUP, *SHARING, "--sp-min-token-num=8"], "sp_min_token_num = 8: not possible with data_parallel_size = 2"),
        (
            [*GROUP, *SHARING, "--all2all-backend=low_latency"],
            "enable_sp and all2all_backend = low_latency: not possible with data_parallel_size = 2",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            told(*argv)
    assert told(*SHARING, "--rendezvous=file:///r").shared_rows == told(*GROUP, *SHARING).shared_rows == 1


@pytest.mark.features("context parallel", "tensor parallel", refused=True)
@pytest.mark.features("context parallel", "pipeline parallel", refused=True)
@pytest.mark.features("context parallel", "expert parallel", refused=True)
@pytest.mark.features("context parallel", "data parallel", refused=True)
@pytest.mark.features("context parallel", "sequence parallel", refused=True)
@pytest.mark.features("context parallel", "KV connector", refused=True)
def test_what_ranks_that_share_prompts_do_not_have_is_refused() -> None:
    size = "prefill_context_parallel_size = 2"
    two = ["--prefill-context-parallel-size=2", "--rendezvous=file:///r"]
    for argv, said in (
        ([], f"{size}: world_size, which is 1, must be a multiple of it"),
        (["--world-size=4"], f"2 tensor-parallel ranks: not possible with {size}"),
        (["--world-size=4", "--pp=2"], f"pp = 2: not possible with {size}"),
        (["--world-size=2", PARALLEL], f"enable_expert_parallel: not possible with {size}"),
        (["--world-size=2", FILES], f"expert_load_dir: not possible with {size}"),
        (["--world-size=2", "--data-parallel-size=2"], f"data_parallel_size = 2: not possible with {size}"),
        (["--world-size=2", "--kv-connector=shared-memory"], f"kv_connector = shared-memory: not possible with {size}"),
        (["--world-size=2", "--device=sim"], f"device = sim: not possible with {size}"),
        (["--world-size=2", "--enable-sp"], "enable_sp: needs two tensor-parallel"),
    ):
        with pytest.raises(ConfigError, match=said):
            told(*two, *argv)
    assert told(*two, "--world-size=2").context_rows is not None
    assert told("--world-size=2", "--rendezvous=file:///r").context_rows is None


def test_experts_move_as_vllm_s_object_says() -> None:
    wanted = {"window_size": 50, "step_interval": 200, "num_redundant_experts": 4, "log_balancedness": True}
    found = told(*EPLB, f"--eplb-config={json.dumps(wanted)}").expert_settings("e")
    assert (found.window, found.interval, found.redundant, found.logs_balance) == (50, 200, 4, True)
    assert found.moves
    assert not told(*EPLB, '--eplb-config={"step_interval": 0}').expert_settings("e").moves
    assert not told(PARALLEL).expert_settings("e").moves
