"""`LLM` of a T5: what `transformers` generates of the same prompts, and behind a beginning that the caller gives."""

from pathlib import Path

import pytest

from services.offline import LLM, InvalidRequest, SamplingParams
from tests.support.models.tiny_encoder_decoders import POSITIONS, make_encoder_decoder

PROMPTS = ["The quick brown fox jumps over the lazy dog", "Hello there, how are you today?", "one two three four"]


def test_it_answers_as_the_library_does(tmp_path: Path) -> None:
    model = make_encoder_decoder(tmp_path, "flan-t5", seed=3)
    greedy = SamplingParams(temperature=0.0, max_tokens=None)
    with LLM(str(model.path), progress=False) as llm:
        outputs = llm.generate([*PROMPTS, model.ids("five six")], greedy)
        for output, prompt in zip(outputs, [*PROMPTS, "five six"], strict=True):
            wanted = model.generated(model.ids(prompt), POSITIONS - 1)
            assert list(output.outputs[0].token_ids) == wanted
        begun = {"encoder_prompt": PROMPTS[0], "decoder_prompt": {"prompt_token_ids": [9, 8, 7]}}
        (output,) = llm.generate(begun, greedy)
        wanted = model.generated(model.ids(PROMPTS[0]), POSITIONS - 4, (*model.start, 9, 8, 7))
        assert list(output.outputs[0].token_ids) == wanted
        with pytest.raises(InvalidRequest, match="encoder_prompt and decoder_prompt are"):
            llm.generate({"encoder_prompt": "a", "prompt": "b"})
