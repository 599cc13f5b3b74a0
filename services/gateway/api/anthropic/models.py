"""The models that are served, in the shape of Anthropic's API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def model_page(models: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the one page that there is. `models`: as OpenAI's API shows them."""
    data = [model_info(model) for model in models]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def model_info(model: dict[str, Any]) -> dict[str, Any]:
    """Returns one of them. The context is all that prompt and answer may have together."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }
