"""`baton batch` on a running stack."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.cluster.stack import RunningStack


async def batch_of(stack: RunningStack, lines: Sequence[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """The bodies of the answers to a batch's lines, by `custom_id`; all of them are answered."""
    given, answered = folder / "lines.jsonl", folder / "answers.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = await asyncio.to_thread(stack.baton, "batch", str(given), "-o", str(answered), "--base-url", stack.url)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in answered.read_text().splitlines()]
    assert [each["response"]["status_code"] for each in answers] == len(lines) * [200]
    return {each["custom_id"]: each["response"]["body"] for each in answers}
