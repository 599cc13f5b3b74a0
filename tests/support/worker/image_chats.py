"""Chats with images, as an engine gets them and as the library does."""

from __future__ import annotations

import torch

from shared.messages.generation import PromptEmbeds
from tests.support.models.embedded_prompts import prompt_embeds
from tests.support.models.tiny_images import ImageModel, image_part, shown, text_part
from tests.support.worker.plan_driver import Driver, Sequence


class ImageChat:
    """One message of texts and images."""

    def __init__(self, *parts: bytes | str) -> None:
        self.images = [part for part in parts if isinstance(part, bytes)]
        content = [image_part(part) if isinstance(part, bytes) else text_part(part) for part in parts]
        self.messages = shown([{"role": "user", "content": content}])

    def add_to(self, driver: Driver, model: ImageModel, output: int) -> Sequence:
        """As a sequence of the driver's."""
        ids, embeds = self.prompt(model)
        return driver.add(ids, output, prompt_embeds=embeds)

    def prompt(self, model: ImageModel) -> tuple[list[int], PromptEmbeds | None]:
        """Rows in place of image tokens, whose ids are 0."""
        ids: list[int] = model.ids_and_rows(self.messages, self.images)["input_ids"][0].tolist()
        token = model.reference.config.image_token_id
        runs: list[tuple[int, int]] = []
        for place, each in enumerate(ids):
            if each == token and runs and sum(runs[-1]) == place:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            elif each == token:
                runs.append((place, 1))
        if not runs:
            return ids, None
        whole = prompt_embeds(torch.cat([model.rows(image) for image in self.images]))
        grids = tuple(model.grid(image) for image in self.images)
        embeds = PromptEmbeds(
            dtype=whole.dtype,
            size=whole.size,
            rows=whole.rows,
            runs=tuple(runs),
            grids=grids if any(grids) else (),
            mutual=len(runs) * (True,) if model.reference.config.model_type == "gemma3" else (),
        )
        return [0 if each == token else each for each in ids], embeds

    def expected(self, model: ImageModel, output: int) -> list[int]:
        """What the library generates of it."""
        return model.greedy(self.messages, self.images, output)
