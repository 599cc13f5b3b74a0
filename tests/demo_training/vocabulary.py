"""The tokenizer: byte-level BPE trained on the generated text, digits one by one, five special tokens for the chat."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.demo_training.examples import Example, Exchange

VOCABULARY_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, SYSTEM, USER, ASSISTANT)
"""Their ids are their places in this list."""

WORDS = r"'(?:s|m|ll)| ?\p{Ll}\p{L}*|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
"""A lower-case word with the space before it, a capitalised word without, one digit, a run of marks, white space.

Single digits make sums learnable. A name must be the same tokens after a space, after a quotation mark and at the start
of an answer: then to repeat it is to copy tokens, and a small model learns that once for all names.
"""

CHAT_TEMPLATE = """\
{%- macro text(message) -%}
{%- if message['content'] is string -%}
{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] or [] -%}{{- part['text'] | trim -}}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(messages=messages) -%}
{%- if tools -%}
{{- '<|system|>' -}}
{%- if messages and messages[0]['role'] in ('system', 'developer') -%}
{{- text(messages[0]) + '\\n\\n' -}}
{%- set ns.messages = messages[1:] -%}
{%- endif -%}
{{- 'You may call these tools:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool['function'] or tool) | tojson -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in ns.messages -%}
{%- if message['role'] not in ('system', 'developer', 'user', 'assistant', 'tool') -%}
{{- raise_exception('The demo model knows the roles system, user, assistant and tool.') -}}
{%- endif -%}
{%- if message['role'] == 'tool' -%}
{{- '<|user|><tool_response>\\n' + text(message) + '\\n</tool_response>' -}}
{%- else -%}
{{- '<|' + ('system' if message['role'] == 'developer' else message['role']) + '|>' + text(message) -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] or call -%}
{%- if message['content'] or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": ' + function['name'] | tojson + ', "arguments": ' -}}
{{- function['arguments'] if function['arguments'] is string else function['arguments'] | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(examples: Iterable[Example]) -> Tokenizer:
    """A tokenizer of `VOCABULARY_SIZE` tokens whose merges fit the examples."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for example in examples for text in _texts(example)), trainer)
    return tokenizer


def _texts(example: Example) -> tuple[str, ...]:
    if isinstance(example, Exchange):
        spoken = (text for turn in example.turns for text in (turn.question, turn.answer))
        return (*spoken, example.system or "")
    return (example.prompt + example.continuation,)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write the tokenizer as `transformers` (4 and 5) reads it; the chat template lies beside it."""
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
