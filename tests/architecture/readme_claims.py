"""What README.md says, and the tests by which it is true: each sentence, table row and command has some.

A sentence is named by its first words. Commands and snippets are executed by tests/integration/deploy/test_readme.py
as they stand there; what starts a stack of another layout is shown here, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tests.support.paths import REPOSITORY

README = REPOSITORY / "README.md"
_HERE = "tests/architecture/test_readme.py"
_RUN = "tests/integration/deploy/test_readme.py"
_UP = "tests/integration/deploy/test_up.py"
_COMMANDS = "tests/integration/deploy/test_baton_command.py"
_DEATHS = "tests/faults/test_deaths.py::test_streams_survive_a_kill"
_RESUMED = "tests/faults/test_gateway_deaths.py::test_resumable_streams_go_on_with_the_same_text"
_SEVERAL = "tests/integration/cluster/test_several_models.py"
_SET_UP = "tests/unit/deploy/test_set_up.py"
_MODELS = "tests/unit/demo_training/test_model.py"

SENTENCES: Mapping[str, tuple[str, ...]] = {
    "Baton serves large language models as small actors": (
        "tests/contracts/test_openai_sdk.py",
        "tests/integration/shared_stacks/test_whole_stack.py",
    ),
    "Gateway, tokenizer, coordinator, scheduler, workers": (
        "tests/architecture/test_layers.py",
        f"{_COMMANDS}::test_scale_starts_and_stops_processes",
    ),
    "You can kill any of them in the middle": (
        _DEATHS,
        "tests/faults/test_chaos.py::test_no_stream_is_lost_or_altered_and_nothing_stays_held",
    ),
    "If the gateway that holds its connection dies": (_RESUMED,),
    "Baton is written in Python, in modules of": ("tests/architecture/test_house.py",),
    "You need Python 3.11 or newer and make.": (f"{_HERE}::test_python_is_the_one_that_the_package_asks_for",),
    "The first call creates `.venv`": (
        f"{_HERE}::test_make_up_installs_and_then_is_baton_up",
        f"{_SET_UP}::test_what_is_installed_without_a_driver_brings_no_cuda_and_its_size_is_said_before",
    ),
    "Where there is no NVIDIA driver": (f"{_SET_UP}::test_a_build_with_cuda_is_replaced_by_one_without",),
    "`make up` starts a nats-server with credentials": (
        f"{_UP}::test_nobody_says_or_hears_what_the_bus_does_not_permit",
        f"{_RUN}::test_the_start_says_where_to_look",
    ),
    "Ctrl-C lets the open requests finish": (
        "tests/integration/deploy/test_supervisor.py",
        f"{_COMMANDS}::test_down_ends_the_stack_and_what_it_left_can_be_read",
    ),
    "Or with a client, here OpenAI's own": (f"{_RUN}::test_the_snippets_do_what_they_say",),
    "The demo model is a Llama of 4 M parameters": (
        f"{_MODELS}::test_it_has_about_four_million_parameters_in_bf16",
        f"{_MODELS}::test_the_shipped_table_tells_of_every_kind_and_is_what_readers_are_shown",
    ),
    "To serve another one": (
        "tests/integration/shared_stacks/test_whole_stack.py::test_answers_are_those_of_transformers",
        f"{_SEVERAL}::test_both_answer_at_the_same_time_what_each_says_alone",
        f"{_HERE}::test_what_a_model_may_be_called_is_told_apart",
    ),
    "Operations are a NATS micro service": (
        f"{_COMMANDS}::test_any_nats_program_can_operate_the_stack_with_what_nats_env_says",
        "tests/integration/deploy/test_admin_service.py::test_the_service_is_discovered_like_any_other",
    ),
    "`--nats-url URL` uses your own NATS server": (
        "tests/integration/deploy/test_supervisor.py",
        "tests/integration/deploy/test_bus_tls.py",
    ),
    "[docs/what_works.md](docs/what_works.md) has it": ("tests/architecture/test_documents.py",),
    "[docs/features.md](docs/features.md) lists": ("tests/architecture/test_feature_matrix.py",),
    "Every sentence and command here": (_HERE, _RUN),
    "[docs/troubleshooting.md](docs/troubleshooting.md) says": (
        "tests/architecture/test_documents.py::test_every_message_that_is_explained_is_said_by_the_code",
    ),
    "[ARCHITECTURE.md](ARCHITECTURE.md) leads": ("tests/architecture/test_documents.py",),
}
"""By the first words of each sentence of prose."""

ROWS: Mapping[str, tuple[str, ...]] = {
    "Models": (
        "tests/integration/worker/test_worker_backend.py",
        "tests/integration/worker/test_latent_attention.py",
        "tests/integration/worker/test_state_spaces.py",
        "tests/integration/worker/test_encoders.py",
        "tests/integration/cluster/test_images.py",
        "tests/integration/cluster/test_images_in_place.py",
        "tests/integration/cluster/test_omni.py",
        "tests/integration/offline/test_videos.py",
        "tests/integration/offline/test_sounds.py",
        "tests/integration/clients/test_audio.py",
        "tests/integration/clients/test_encoder_decoders.py",
        "tests/integration/worker/test_library_models.py",
        "tests/integration/worker/test_gguf.py",
        "tests/integration/worker/test_quantized_checkpoints.py",
        "tests/integration/worker/test_lora.py",
    ),
    "Devices": (
        "tests/unit/worker/ops/native/test_linear.py::test_every_level_of_instructions_computes_the_same_function",
        "tests/unit/worker/ops/native/test_build.py::test_without_a_compiler_the_reason_is_told",
        f"{_HERE}::test_the_levels_of_instructions_are_those_that_are_compiled",
        "tests/unit/worker/sim/test_backend.py",
        "tests/unit/worker/ops/triton/test_attention.py",
    ),
    "API": (
        "tests/contracts/test_openai_sdk.py",
        "tests/integration/shared_stacks/test_responses.py",
        "tests/integration/shared_stacks/test_embeddings.py",
        "tests/actors/gateway/test_batches.py",
        "tests/integration/shared_stacks/test_vllms_api.py",
        "tests/integration/shared_stacks/test_anthropic.py",
        "tests/actors/gateway/test_ollama.py",
        "tests/actors/gateway/test_cohere.py",
        "tests/integration/shared_stacks/test_sglang.py",
    ),
    "Output": (
        "tests/integration/shared_stacks/test_guided_decoding.py",
        "tests/integration/shared_stacks/test_tool_calls.py",
        "tests/unit/gateway/parsing/test_dialects.py",
    ),
    "Engine": (
        "tests/actors/scheduler/test_scheduler_and_worker.py",
        "tests/unit/scheduler/planning/test_prefill.py",
        "tests/integration/worker/test_speculation.py",
        "tests/integration/cluster/test_engines_of_several_ranks.py::test_greedy_output_is_the_reference_s",
        "tests/integration/worker/test_data_parallel.py",
    ),
    "KV cache": (
        "tests/integration/shared_stacks/test_shared_prefixes.py",
        "tests/faults/test_kv_deaths.py::test_a_prefix_outlives_every_engine_and_the_store",
        "tests/integration/kvstore/test_ssd_tier.py",
        "tests/integration/kvstore/test_redis_tier.py",
        "tests/integration/kvstore/test_stores_on_two_nodes.py",
        "tests/actors/scheduler/test_hand_over.py",
    ),
    "Keys": (
        "tests/integration/cluster/test_api_keys.py",
        "tests/unit/coordinator/core/test_fair_queueing.py",
    ),
    "Failures": (
        _DEATHS,
        _RESUMED,
        "tests/faults/test_hung_processes.py",
        "tests/faults/test_bus_outage.py",
        "tests/faults/test_kv_deaths.py::test_streams_survive_the_death_of_redis",
        "tests/unit/deploy/chaos/test_faults.py",
    ),
    "Watching": (
        "tests/actors/gateway/test_console.py",
        "tests/integration/shared_stacks/test_whole_stack.py::test_every_service_answers_prometheus",
        "tests/integration/cluster/test_traces.py",
        "tests/integration/bench/test_hops.py::test_every_hop_of_a_token_and_of_a_request_is_measured",
    ),
    "Planning": (
        "tests/unit/deploy/simulation/test_simulation.py",
        "tests/integration/deploy/test_tune.py",
        "tests/faults/test_planner.py",
    ),
    "Elsewhere": (
        "tests/integration/offline/test_generation.py",
        "tests/unit/deploy/test_containers.py",
        "tests/integration/cluster/test_plugin_packages.py",
    ),
}
"""By the first cell of each row of the table."""

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "--port 9000 --engines 2": (f"{_RUN}::test_the_start_says_where_to_look",),
    "--model /path/to/llama": (
        "tests/integration/shared_stacks/test_whole_stack.py::test_answers_are_those_of_transformers",
    ),
    "--prefill 2 --decode 1 --tp-decode 2": (
        "tests/integration/cluster/test_features_together.py"
        "::test_prompts_that_are_handed_over_and_a_decoding_engine_that_dies",
    ),
    "--engines 2 --kvstore-memory 4GiB": ("tests/integration/shared_stacks/test_shared_prefixes.py",),
    "--tp 2 --pp 2": (
        "tests/integration/cluster/test_engines_of_several_ranks.py::test_greedy_output_is_the_reference_s",
        "tests/unit/deploy/cli/up/test_choices.py",
    ),
}
"""By the arguments of each `make up ARGS="…"`: what runs such a stack."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.])\s+(?=[A-Z`\[])")


def blocks(language: str) -> list[str]:
    """What stands between the fences of a language, in order."""
    return [text for name, text in _FENCE.findall(README.read_text(encoding="utf-8")) if name == language]


def commands() -> list[str]:
    """The shell commands of all blocks, a command that goes on over several lines as one, without remarks."""
    lines = "".join(blocks("bash")).splitlines()
    joined: list[str] = []
    for line in lines:
        if joined and joined[-1].count("'") % 2:
            joined[-1] += "\n" + line
        else:
            joined.append(re.sub(r"\s+#.*$", "", line))
    return joined


def sentences() -> Iterator[str]:
    """Of prose: neither code nor tables nor headings."""
    prose = _FENCE.sub("", README.read_text(encoding="utf-8"))
    for paragraph in prose.split("\n\n"):
        if paragraph.strip() and not paragraph.lstrip().startswith(("#", "|")):
            yield from _SENTENCE.split(" ".join(paragraph.split()))


def rows() -> list[str]:
    """The first cells of the table."""
    return [cell for cell in re.findall(r"^\| ([^|]+) \|", README.read_text(encoding="utf-8"), re.MULTILINE) if cell]


def layouts() -> list[str]:
    """The arguments of each `make up` with some, in blocks and in prose."""
    return re.findall(r'make up ARGS="([^"]+)"', README.read_text(encoding="utf-8"))
