"""Tiny checkpoints of Llama 3.2 Vision's kind, whose layers across attend to an image's rows, and what `transformers`
makes of the same weights."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoTokenizer,
    MllamaConfig,
    MllamaForCausalLM,
    MllamaForConditionalGeneration,
    MllamaImageProcessorPil,
    MllamaProcessor,
    MllamaTextConfig,
)

from shared.messages.generation import PromptEmbeds
from tests.support.models.embedded_prompts import prompt_embeds
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_models import POSITIONS, VOCABULARY, TinyModel, randomize
from tests.support.paths import DEMO_MODEL

ACROSS = (1, 4)
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "cross_attention_layers": list(ACROSS),
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
SIDE = 28
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 14,
    "max_num_tiles": 4,
    "intermediate_layers_indices": [0, 1],
    "vision_output_dim": 96,
    "initializer_range": 0.2,
}
TILE_ROWS = 5
"""Four patches, and one of the whole tile."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}<|image|>"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""The models' own, without tools and system messages."""
_SPECIAL = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>")


class MllamaImages(ImageModel):
    """See `ImageModel`; an image has one token."""

    @torch.inference_mode()
    def rows(self, image: bytes, several: bool = False) -> Tensor:
        """[tiles · rows, hidden] of the tiles that it has."""
        made = self.processor.image_processor(Image.open(io.BytesIO(image)), return_tensors="pt")
        tiles = made.pop("num_tiles")[0][0]
        states = self.reference.model.vision_model(**made).last_hidden_state
        rows: Tensor = self.reference.model.multi_modal_projector(states)[0, 0, :tiles].flatten(0, 1)
        return rows

    @torch.inference_mode()
    def logits(self, messages: list[dict[str, Any]], images: list[bytes], output: list[int]) -> Tensor:
        """[tokens, words] those that each token of `output` is drawn from; they see what the prompt's last does."""
        inputs = self.ids_and_rows(messages, images)
        prompt, mask = inputs["input_ids"], inputs["cross_attention_mask"]
        inputs["input_ids"] = torch.cat((prompt, torch.tensor([output[:-1]])), 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["cross_attention_mask"] = torch.cat((mask, mask[:, -1:].expand(-1, len(output) - 1, -1, -1)), 1)
        found: Tensor = self.reference(**inputs).logits[0, prompt.shape[1] - 1 :]
        return found

    def beside(self, messages: list[dict[str, Any]], images: list[bytes]) -> tuple[list[int], PromptEmbeds | None]:
        """A chat as an engine gets it."""
        ids: list[int] = self.ids_and_rows(messages, images)["input_ids"][0].tolist()
        if not images:
            return ids, None
        rows = [self.rows(each) for each in images]
        places = [place for place, each in enumerate(ids) if each == self.reference.config.image_token_index]
        whole = prompt_embeds(torch.cat(rows))
        return ids, PromptEmbeds(
            dtype=whole.dtype,
            size=whole.size,
            rows=whole.rows,
            runs=tuple((place, len(each)) for place, each in zip(places, rows, strict=True)),
            encoded=True,
        )


def make_mllama(folder: Path, *, sees: bool = False) -> TinyModel:
    """Writes one for texts. `sees`: within a model that takes images, too."""
    torch.manual_seed(11)
    if sees:
        return TinyModel("mllama", folder, _written(folder, TEXT, VOCABULARY))
    model: Any = MllamaForCausalLM._from_config(MllamaTextConfig(**TEXT), attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None
    return TinyModel("mllama", folder, model)


def make_mllama_images(folder: Path, seed: int = 0) -> MllamaImages:
    """Writes one with the demo model's tokenizer and a processor. Its library's reference has tokens before the first
    image see none, as Meta's code has it."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    if tokenizer.bos_token is None:
        tokenizer.add_special_tokens({"bos_token": "<|eot_id|>"})
    tokenizer.chat_template = TEMPLATE
    image = tokenizer.convert_tokens_to_ids("<|image|>")
    torch.manual_seed(seed)
    reference = _written(folder, {**TEXT, "vocab_size": image}, image)
    images: Any = MllamaImageProcessorPil(size={"height": SIDE, "width": SIDE}, max_image_tiles=4)
    processor: Any = MllamaProcessor(images, tokenizer, chat_template=TEMPLATE)
    processor.save_pretrained(folder)
    for layer in (reference.model.language_model.layers[number] for number in ACROSS):
        layer.register_forward_pre_hook(_note_masked, with_kwargs=True)
        layer.cross_attn.register_forward_hook(_without_masked)
        layer.cross_attn.owner = [layer]
    return MllamaImages(folder, reference, processor)


def _written(folder: Path, text: dict[str, Any], image: int) -> Any:
    """Gates of layers across are open, unlike those of a new model."""
    config = MllamaConfig(vision_config=VISION, text_config=text, image_token_index=image)
    model: Any = MllamaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    randomize(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate"):
                weight.fill_(0.8)
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None
    return model


def _note_masked(layer: Any, _inputs: object, given: dict[str, Any]) -> None:
    layer.seeing = given.get("full_text_row_masked_out_mask")


def _without_masked(module: Any, _inputs: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (layer,) = module.owner
    if layer.seeing is None:
        return output
    return (output[0] * layer.seeing[:, 0], *output[1:])
