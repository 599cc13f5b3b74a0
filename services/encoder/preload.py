"""Imports what an encoder needs, for processes that are forked afterwards. Touches no device and leaves no thread."""

from __future__ import annotations

from collections.abc import Sequence

import transformers.modeling_utils  # noqa: F401 towers import it as they load

from services.encoder import actor, audio_tower, image_decoder, prompt_tower, sound_tower, tower  # noqa: F401


def preload(flags: Sequence[str]) -> None:
    """All of it is imported with this module. `flags` are a worker's, beside which encoders are forked."""
