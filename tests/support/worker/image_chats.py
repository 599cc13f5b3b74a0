"""Chats with images, as an engine gets them and as the library does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from shared.messages.generation import PromptEmbeds
from tests.support.models.embedded_prompts import prompt_embeds
from tests.support.models.tiny_images import ImageModel, image_part, logits_behind, shown, text_part
from tests.support.worker.plan_driver import Driver, Sequence

_BOTH_WAYS = "use_bidirectional_attention"


def _mutual(config: Any) -> bool:
    return config.model_type == "gemma3" or config.get_text_config().to_dict().get(_BOTH_WAYS) == "vision"


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
        """Rows in place of image tokens, whose ids are 0, with the text among those of one image."""
        ids: list[int] = model.ids_and_rows(self.messages, self.images)["input_ids"][0].tolist()
        tokens = model.row_tokens
        if not self.images:
            return ids, None
        places = [place for place, each in enumerate(ids) if each in tokens]
        rows, runs = [model.rows(image, len(self.images) > 1) for image in self.images], list[tuple[int, int]]()
        for own in np.split(places, np.cumsum([len(each) for each in rows])[:-1]):
            runs.append((int(own[0]), int(own[-1] + 1 - own[0])))
        within = {place for first, count in runs for place in range(first, first + count)} - set(places)
        whole = prompt_embeds(torch.cat(rows))
        grids = tuple(model.grid(image) for image in self.images)
        embeds = PromptEmbeds(
            dtype=whole.dtype,
            size=whole.size,
            rows=whole.rows,
            runs=tuple(runs),
            grids=grids if any(grids) else (),
            mutual=len(runs) * (True,) if _mutual(model.reference.config) else (),
            texts=tuple((place, (ids[place],)) for place in sorted(within)),
        )
        return [0 if each in tokens else each for each in ids], embeds

    def logits(self, model: ImageModel, output: list[int]) -> torch.Tensor:
        """[tokens, words] those that each token of `output` is drawn from, by the library."""
        return logits_behind(model.reference, model.ids_and_rows(self.messages, self.images), output)

    def expected(self, model: ImageModel, output: int, said: list[int] | None = None) -> list[int]:
        """What the library generates of it. `said`: what somebody holds that to be; one pass shows whether each token
        is the likeliest behind those before it, in a fraction of the time of `generate`. Marks of images among them
        would be read as an image."""
        readable = said and len(said) == output and set(said).isdisjoint(model.row_tokens)
        if readable and said == self.logits(model, said).argmax(-1).tolist():
            return said
        return model.greedy(self.messages, self.images, output)


def expected_of(
    chats: Iterable[ImageChat], model: ImageModel, output: int, sequences: Iterable[Sequence]
) -> list[list[int]]:
    """What the library generates of each; of each comes one of `sequences`, in the same order."""
    return [chat.expected(model, output, each.output) for chat, each in zip(chats, sequences, strict=True)]
