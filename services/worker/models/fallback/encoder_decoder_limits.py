"""What models with an encoder are not combined with: each is an error when a rank starts. Knows no `transformers`."""

from __future__ import annotations

from services.worker.models.config import ModelError


def check_encoder_decoder(name: str, asked: dict[str, object], instead: str = "") -> None:
    """`asked`: settings that do not go together with the model's layers that attend to an encoder's rows, each true
    where it is set. `instead`: what to say that is served. Raises ModelError."""
    for setting, value in asked.items():
        if value:
            raise ModelError(f"{setting}: not allowed for {name}, whose decoder attends to an encoder's rows{instead}")
