"""What a model's files and a rendered prompt show of tool calls and thoughts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from services.detokenizer.core.vocabularies import text_vocabulary
from services.tokenizer.core.chat_template import ChatTemplates, dialect_of
from services.tokenizer.core.encoder import PromptEncoder, adapt_grammar, thinking_state
from services.tokenizer.core.template_files import read_templates
from services.tokenizer.core.vocabulary import Vocabulary
from shared.ids import Attempt, GatewayId, ModelName, RequestId
from shared.messages.coordinator import Route
from shared.messages.dialects import Dialect, Thinking
from shared.messages.generation import Generation, Grammar, SamplingOptions, StopConditions
from shared.messages.tokenizer import ChatPrompt, Encode, EncodeReply, TextPrompt, Tokenize, TokenPrompt
from shared.models.tokenizer_files import load_tokenizer, special_ids
from shared.packing import unpack
from tests.support.models import tiny_tokenizers
from tests.support.paths import CHAT_TEMPLATES, DEMO_MODEL


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("chatml", Dialect()),
        ("gemma3", Dialect()),
        ("llama3", Dialect("llama3_json")),
        ("mistral", Dialect("mistral")),
        ("qwen3", Dialect("hermes", "qwen3", ("enable_thinking",))),
    ],
)
def test_a_template_shows_what_its_model_speaks(name: str, dialect: Dialect) -> None:
    assert dialect_of({"default": (CHAT_TEMPLATES / f"{name}.jinja").read_text()}) == dialect


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("{{ tools }}<tool_call>\n<function=", Dialect("qwen3_xml")),
        ("{{ tools }}<tool_call>{{ name }}<arg_key>", Dialect("glm45")),
        ("{{ tools }}<minimax:tool_call>\n<invoke name=...<think>\n", Dialect("minimax_m2", "qwen3")),
        ("{{ tools }}<beginning_of_sentence><tool_calls>", Dialect("minimax")),
        ("{{ tools }}{{ id }}<|tool_call_argument_begin|>", Dialect("kimi_k2")),
        ("{{ tools }}<think></think>{{ id }}<|tool_call_argument_begin|>", Dialect("kimi_k2", "kimi_k2")),
        ("{{ tools }}function<｜tool▁sep｜>{{ name }}\n```json\n</think>", Dialect("deepseek_v3", "qwen3")),
        ("{{ tools }}{{ name }}<｜tool▁sep｜>{{ arguments }}<think>", Dialect("deepseek_v31", "qwen3")),
        (
            "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>{{ thinking }}<|end|>…<|call|>",
            Dialect("openai", "openai_gptoss"),
        ),
        ("{{ tools }}<|tool_call|>Here is my thought process:", Dialect("granite", "granite")),
        ("<|header_start|>{{ tools }}exact format: [func_name1(param1=value1)", Dialect("llama4_pythonic")),
        ("{{ tools }}put it in the format of [func_name1(params_name1=params_value1)]", Dialect("pythonic")),
        ('{{ tools }}{"name": function name, "parameters": dictionary of argument name', Dialect("llama3_json")),
        ("{{ tools }}[TOOL_CALLS][THINK][/THINK]", Dialect("mistral", "mistral")),
        ("no t-o-o-l-s <tool_call>", Dialect()),
        ("{% if reasoning_effort == 'high' %}", Dialect(controls=("reasoning_effort",))),
    ],
)
def test_marks_decide(template: str, dialect: Dialect) -> None:
    assert dialect_of({"default": template}) == dialect


def test_a_template_for_tools_goes_before_the_default_one() -> None:
    assert dialect_of({"default": "plain", "tool_use": "{{ tools }}<tool_call>"}) == Dialect("hermes")
    assert dialect_of({}) == Dialect()


def encoding_of(folder: Path) -> PromptEncoder:
    files = load_tokenizer(folder)
    return PromptEncoder(Vocabulary(files), ChatTemplates(read_templates(files)), files.special_tokens)


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder = tiny_tokenizers.write_model(tmp_path_factory.mktemp("thinker"), tiny_tokenizers.byte_level())
    (folder / "chat_template.jinja").write_text((CHAT_TEMPLATES / "qwen3.jinja").read_text())
    return encoding_of(folder)


SEEDED, NO_STOPS = SamplingOptions(seed=0), StopConditions()


def generation(
    encoding: PromptEncoder,
    messages: list[Any],
    grammar: Grammar | None = None,
    sampling: SamplingOptions = SEEDED,
    stopping: StopConditions = NO_STOPS,
    **chat: Any,
) -> Generation:
    prompt = ChatPrompt(messages=json.dumps(messages).encode(), **chat)
    return routed(encoding, prompt, grammar=grammar, sampling=sampling, stopping=stopping)


def routed(encoding: PromptEncoder, prompt: ChatPrompt | TokenPrompt, **options: Any) -> Generation:
    """What becomes of a chat whose output is parsed."""
    message = Tokenize(
        request=RequestId("r"),
        attempt=Attempt(1),
        gateway=GatewayId("gateway-1"),
        model=ModelName("m"),
        prompt=prompt,
        keep_markup=True,
        **{"sampling": SEEDED, "stopping": NO_STOPS, **options},
    )
    outcome = encoding.route(message, prompt)
    assert isinstance(outcome, Route), outcome
    assert outcome.generation.keep_markup
    return outcome.generation


def test_a_chat_of_token_ids_is_read_as_the_chat_that_they_came_from(
    encoding: PromptEncoder, harmony: PromptEncoder
) -> None:
    for each, chat in (
        (encoding, generation(encoding, ASKED, template_kwargs={"enable_thinking": False})),
        (harmony, generation(harmony, ASKED)),
    ):
        same = routed(each, TokenPrompt(chat.tokens))
        assert (same.thinking, same.stopping) == (chat.thinking, chat.stopping)


HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}{{ tools }}"
    "{% if thinking %}<|channel|>analysis{% endif %}{% if call %}<|call|>{% endif %}<|start|>assistant"
)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    made = tiny_tokenizers.byte_level()
    tokenizer = type(made).from_str(made.to_str())
    tokenizer.add_special_tokens(["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"])
    folder = tiny_tokenizers.write_model(tmp_path_factory.mktemp("harmony"), tokenizer)
    (folder / "chat_template.jinja").write_text(HARMONY)
    return encoding_of(folder)


def ids(encoding: PromptEncoder, text: str) -> tuple[int, ...]:
    reply = encoding.answer(Encode(TextPrompt(text, add_special_tokens=False)))
    assert isinstance(reply, EncodeReply)
    return tuple(unpack(reply.tokens))


def test_outputs_in_channels_end_with_a_call(harmony: PromptEncoder) -> None:
    """Whatever the model's configuration says of stop tokens."""
    assert harmony.dialect == Dialect("openai", "openai_gptoss")
    call, end = ids(harmony, "<|call|><|return|>")
    assert generation(harmony, ASKED).stopping.stop_token_ids == (call, end)
    more = generation(harmony, ASKED, stopping=StopConditions(stop_token_ids=(5, end)))
    assert more.stopping.stop_token_ids == (5, end, call)
    assert generation(harmony, ASKED, stopping=StopConditions(ignore_eos=True)).stopping.stop_token_ids == ()
    begun: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert generation(harmony, ASKED).thinking is None
    assert generation(harmony, [*ASKED, {"role": "assistant", "content": "It"}], **begun).thinking == "closed"


def test_reasoning_in_channels_has_a_budget(harmony: PromptEncoder) -> None:
    sampling = generation(harmony, ASKED, sampling=SamplingOptions(seed=0, thinking_budget=5)).sampling
    marks = (ids(harmony, "<|channel|>analysis<|message|>"), ids(harmony, "<|end|>"))
    assert (sampling.thinking_start, sampling.thinking_end) == marks


ASKED = [{"role": "user", "content": "What does <think> mean? </think>"}]


def test_a_prompt_shows_where_its_thoughts_stand(encoding: PromptEncoder) -> None:
    assert encoding.dialect == Dialect("hermes", "qwen3", ("enable_thinking",))
    assert generation(encoding, ASKED).thinking is None
    assert generation(encoding, ASKED, template_kwargs={"enable_thinking": False}).thinking == "closed"
    go_on: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    begun = [*ASKED, {"role": "assistant", "content": "It means"}]
    assert generation(encoding, begun, **go_on).thinking == "closed"


def test_marks_at_the_very_end_count() -> None:
    assert thinking_state("<|assistant|>\n<think>\n") == "open"
    assert thinking_state("<think>\n\n</think>\n\n") == "closed"
    assert thinking_state("[THINK]") == "open"
    assert thinking_state("what is <think>?<|assistant|>") is None


def test_text_has_no_thoughts(encoding: PromptEncoder) -> None:
    prompt = TextPrompt("<think>")
    message = Tokenize(
        request=RequestId("r"),
        attempt=Attempt(1),
        gateway=GatewayId("gateway-1"),
        model=ModelName("m"),
        prompt=prompt,
        sampling=SamplingOptions(seed=0),
        stopping=StopConditions(),
    )
    routed = encoding.route(message, prompt)
    assert isinstance(routed, Route)
    assert routed.generation.thinking is None


GRAMMARS = [
    (Grammar("json", '{"type": "integer"}', "</think>"), "5"),
    (Grammar("regex", "[0-9]", "</think>"), "5"),
    (Grammar("choice", '["5", "6"]', "</think>"), "5"),
    (Grammar("grammar", 'root ::= "5"', "</think>"), "5"),
    (
        Grammar(
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "const_string", "value": "5"}}',
            "</think>",
        ),
        "5",
    ),
]


@pytest.mark.parametrize(("grammar", "fits"), GRAMMARS, ids=lambda value: getattr(value, "kind", ""))
def test_a_grammar_waits_for_thoughts_that_will_end_and_for_no_others(grammar: Grammar, fits: str) -> None:
    assert adapt_grammar(grammar, "open") == grammar
    closed = adapt_grammar(grammar, "closed")
    assert closed is not None
    assert (closed.text, closed.after) == (grammar.text, "")
    either = adapt_grammar(grammar, None)
    assert either is not None
    assert (either.kind, either.after) == ("structural_tag", "")
    compiled = xgrammar.Grammar.from_structural_tag(either.text)
    for text in (fits, f"<think>Hm, 4?</think>\n\n{fits}", f"<think></think>{fits}"):
        assert _is_grammar_accept_string(compiled, text)
    for text in ("Hm", "<think>5", "Hm</think>5"):
        assert not _is_grammar_accept_string(compiled, text)


@pytest.mark.parametrize("thinking", [None, "open", "closed"])
def test_a_grammar_from_the_start_stays(thinking: Thinking | None) -> None:
    for text in ("5", "no json"):
        grammar = Grammar("json", text)
        assert adapt_grammar(grammar, thinking) == grammar
    assert adapt_grammar(Grammar("json", "{", "</think>"), None) == Grammar("json", "{", "</think>"), (
        "its compiler will say"
    )


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_marks_that_are_special_tokens_stay_for_who_reads_them(kind: str) -> None:
    make = getattr(tiny_tokenizers, kind)
    tokenizer = type(made := make(strip=True) if kind == "byte_fallback" else make()).from_str(made.to_str())
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>", "<|other|>"])
    vocabulary = text_vocabulary(tokenizer, special_ids(tokenizer))
    ids = tokenizer.encode("<tool_call>Hello<|other|></tool_call>", add_special_tokens=False).ids

    def shown(**how: Any) -> str:
        stream = vocabulary.open([], begins=True, **how)
        return "".join([*map(stream.push, ids), stream.flush()]).replace(" ", "")

    assert shown(skip_special_tokens=True) == "Hello"
    assert shown(skip_special_tokens=True, keep_markup=True) == "<tool_call>Hello</tool_call>"
    assert shown(skip_special_tokens=False) == "<tool_call>Hello<|other|></tool_call>"


def test_the_demo_model_says_what_it_speaks() -> None:
    assert encoding_of(DEMO_MODEL).dialect == Dialect("hermes")
