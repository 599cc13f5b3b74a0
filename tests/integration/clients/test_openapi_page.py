"""Schemathesis reads the OpenAPI page and sends what it describes, and what it does not: no answer is a 5xx, or has
another type or shape than the page says."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from shared.bus.memory_bus import MemoryBus
from tests.support.gateway.fake_services import FakeRing
from tests.support.gateway.gateway_server import gateway_stack

DEADLINE = 240.0
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
ELSEWHERE = (
    *(
        "admin",
        "pause",
        "is_paused",
        "resume",
        "continue_generation",
        "release_memory",
        "sleep",
        "is_sleeping",
        "wake_up",
    ),
    *("flush_cache", "reset_prefix_cache", "scale_elastic_ep", "is_scaling", "abort_requests", "tokenizer_info"),
)
"""What a coordinator answers, or a real tokenizer: there are none here."""
OPTIONS = (
    f"--checks={','.join(CHECKS)}",
    f"--exclude-path-regex=^/({'|'.join(ELSEWHERE)})",
    "--phases=fuzzing",
    "--max-examples=8",
    "--seed=1",
    "--generation-database=none",
    "--suppress-health-check=all",
    "--warnings=off",
    "--no-color",
)


@pytest.mark.extras
@pytest.mark.timeout(DEADLINE + 60)
async def test_schemathesis_finds_nothing(memory_bus: MemoryBus, tmp_path: Path) -> None:
    """The seed is fixed: each run sends the same."""
    ring = FakeRing(memory_bus, longest=4)
    async with gateway_stack(memory_bus, ring=ring, database_file=tmp_path / "database.sqlite") as stack:
        page = f"http://127.0.0.1:{stack.gateway.server.port}/openapi.json"
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            SCHEMATHESIS, "run", page, *OPTIONS, stdout=pipe, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path
        )
        try:
            async with asyncio.timeout(DEADLINE):
                said = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, said
    tested = re.search(r"Tested: +(\d+)", said)
    assert tested is not None, said
    assert int(tested[1]) > 50
