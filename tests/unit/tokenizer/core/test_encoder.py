"""Prompts become the tokens that transformers makes of them, packed and hashed; what is no prompt is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from services.tokenizer.core.chat_template import ChatTemplates
from services.tokenizer.core.encoder import PromptEncoder
from services.tokenizer.core.template_files import read_templates
from services.tokenizer.core.vocabulary import Vocabulary
from shared.blocks import hash_chain
from shared.ids import Attempt, EngineId, GatewayId, ModelName, RequestId
from shared.messages.coordinator import Route
from shared.messages.gateway import RequestRejected
from shared.messages.generation import Generation, PromptEmbeds, SamplingOptions, StopConditions
from shared.messages.tokenizer import (
    ChatPrompt,
    Decode,
    DecodeReply,
    Encode,
    EncodeReply,
    PairPrompt,
    Prompt,
    TextPrompt,
    Tokenize,
    TokenizerRefusal,
    TokenPrompt,
    TruncationSide,
    embeds_placeholder,
)
from shared.models.tokenizer_files import TokenizerUnusable, load_tokenizer, special_ids
from shared.packing import pack, unpack
from tests.support.models import tiny_tokenizers
from tests.support.paths import DEMO_MODEL

CHAT = json.dumps([{"role": "user", "content": "Hello world"}]).encode()


def encoding_of(folder: Path) -> PromptEncoder:
    files = load_tokenizer(folder)
    return PromptEncoder(Vocabulary(files), ChatTemplates(read_templates(files)), files.special_tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.write_model(tmp_path_factory.mktemp("model"), tiny_tokenizers.byte_fallback(strip=True))


@pytest.fixture(scope="module")
def encoding(folder: Path) -> PromptEncoder:
    return encoding_of(folder)


def tokenize(prompt: Prompt, **more: Any) -> Tokenize:
    return Tokenize(
        request=RequestId("r"),
        attempt=Attempt(2),
        gateway=GatewayId("gateway-1"),
        model=ModelName("demo"),
        prompt=prompt,
        sampling=SamplingOptions(seed=7, temperature=0.5),
        stopping=StopConditions(max_tokens=9, stop=("x",)),
        **more,
    )


def routed(encoding: PromptEncoder, prompt: Prompt, **more: Any) -> Generation:
    message = tokenize(prompt, **more)
    outcome = encoding.route(message, message.prompt)
    assert isinstance(outcome, Route)
    return outcome.generation


def refused(encoding: PromptEncoder, prompt: Prompt, **more: Any) -> tuple[str | None, str]:
    message = tokenize(prompt, **more)
    outcome = encoding.route(message, message.prompt)
    assert isinstance(outcome, RequestRejected)
    assert (outcome.request, outcome.attempt, outcome.kind) == (RequestId("r"), Attempt(2), "invalid_request")
    return outcome.field, outcome.message


@pytest.mark.parametrize("text", ["Hello world", " Hello  ", "", "über 😀\n", "<s>[INST] x </s>", "a" * 3000])
@pytest.mark.parametrize("special", [True, False])
def test_text_becomes_the_tokens_that_transformers_makes_of_it(
    folder: Path, encoding: PromptEncoder, text: str, special: bool
) -> None:
    expected = AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=special)
    if expected:
        assert unpack(routed(encoding, TextPrompt(text, special)).tokens) == expected
    else:
        assert refused(encoding, TextPrompt(text, special))[0] == "prompt"


def test_a_pair_becomes_the_tokens_that_transformers_makes_of_it(folder: Path, encoding: PromptEncoder) -> None:
    expected = AutoTokenizer.from_pretrained(folder)("Hello", "big world")["input_ids"]
    assert unpack(routed(encoding, PairPrompt("Hello", "big world")).tokens) == expected
    assert refused(encoding, PairPrompt("Hello", "\ud800"))[0] == "prompt"
    field, text = refused(encoding, PairPrompt("Hello", "a b " * 400), max_model_len=8)
    assert (field, "maximum context length is 8" in text) == ("prompt", True)


@pytest.mark.parametrize("side", get_args(TruncationSide))
def test_a_pair_is_cut_as_transformers_cuts_it(folder: Path, encoding: PromptEncoder, side: TruncationSide) -> None:
    theirs = AutoTokenizer.from_pretrained(folder, truncation_side=side)
    pair = ("Hello big", "world, a big world")
    whole = len(theirs(*pair)["input_ids"])
    for length in range(4, whole + 2):
        expected = theirs(*pair, truncation="longest_first", max_length=length)["input_ids"]
        found = routed(encoding, PairPrompt(*pair), truncate_prompt_tokens=length, truncation_side=side)
        assert unpack(found.tokens) == expected


def test_each_text_of_a_pair_has_a_bound_of_its_own(encoding: PromptEncoder) -> None:
    """Counted before special tokens; of a character that is several tokens all are left out, or none."""

    def found(text: str, bound: int | None) -> bytes:
        return routed(encoding, PairPrompt("x", text, None, bound)).tokens

    assert found("Hello big world", 11) == found("Hello big world", None)
    assert found("Hello big world", 1) == found("Hello", None)
    assert found("x😀", 3) == found("x", None)
    assert routed(encoding, PairPrompt("Hello big", "x", 1)).tokens == routed(encoding, PairPrompt("Hello", "x")).tokens
    assert refused(encoding, PairPrompt("x", "\ud800", None, 9))[0] == "prompt"
    alone = routed(encoding, TextPrompt("Hello big", text_tokens=1)).tokens
    assert alone == routed(encoding, TextPrompt("Hello")).tokens


@pytest.mark.parametrize("family", ["byte-level", "sentencepiece", "demo model"])
def test_a_chat_becomes_the_tokens_that_transformers_makes_of_it(family: str, tmp_path: Path) -> None:
    if family == "demo model":
        if not (DEMO_MODEL / "tokenizer.json").is_file():
            pytest.skip("the demo model is not there")
        folder = DEMO_MODEL
    else:
        tiny = tiny_tokenizers.byte_level() if family == "byte-level" else tiny_tokenizers.byte_fallback(strip=True)
        folder = tiny_tokenizers.write_model(tmp_path, tiny)
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(json.loads(CHAT), add_generation_prompt=True)["input_ids"]
    assert unpack(routed(encoding_of(folder), ChatPrompt(messages=CHAT)).tokens) == expected


def test_a_request_is_passed_on_whole_with_its_tokens_packed_and_hashed(encoding: PromptEncoder) -> None:
    prompt, resume = list(range(10, 30)), list(range(50, 65))
    generation = routed(
        encoding,
        TokenPrompt(pack(prompt)),
        resume=pack(resume),
        sent_chars=11,
        skip_special_tokens=False,
        priority=3,
        arrival=12.5,
        cache_salt="salt",
        avoid=(EngineId("engine-2"),),
    )
    hashes = b"".join(hash_chain(pack(prompt + resume), "salt", 16))
    assert len(hashes) == 2 * 16
    assert generation == Generation(
        request=RequestId("r"),
        attempt=Attempt(2),
        gateway=GatewayId("gateway-1"),
        model=ModelName("demo"),
        tokens=pack(prompt + resume),
        prompt_length=20,
        block_hashes=hashes,
        sampling=SamplingOptions(seed=7, temperature=0.5),
        stopping=StopConditions(max_tokens=9, stop=("x",)),
        sent_chars=11,
        skip_special_tokens=False,
        priority=3,
        arrival=12.5,
        cache_salt="salt",
        avoid=(EngineId("engine-2"),),
    )


def test_blocks_of_a_request_without_prefix_caching_have_no_names(encoding: PromptEncoder) -> None:
    generation = routed(encoding, TokenPrompt(pack(range(10, 80))), prefix_caching=False)
    assert (generation.block_hashes, generation.prefix_caching) == (b"", False)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TokenPrompt(b""), "prompt"),
        (TokenPrompt(b"\1\0\0"), "prompt"),
        (TokenPrompt(pack([1, 2**32 - 1])), "prompt"),
        (TextPrompt("", add_special_tokens=False), "prompt"),
        (TextPrompt("a\ud800b"), "prompt"),
        (ChatPrompt(messages=b"[]"), "messages"),
        (ChatPrompt(messages=CHAT, template_kwargs={"bos_token": "\udfff"}), "messages"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_field(encoding: PromptEncoder, prompt: Prompt, field: str) -> None:
    if isinstance(prompt, ChatPrompt) and prompt.template_kwargs:
        encoding = PromptEncoder(encoding._vocabulary, ChatTemplates({"default": "{{ bos_token }}"}), {})
    assert refused(encoding, prompt)[0] == field


def test_a_token_out_of_the_vocabulary_is_named_with_the_size_of_it(folder: Path, encoding: PromptEncoder) -> None:
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert unpack(routed(encoding, TokenPrompt(pack([size - 1]))).tokens) == [size - 1]
    assert refused(encoding, TokenPrompt(pack([1, size]))) == (
        "prompt",
        f"prompt: token id {size} is not in the vocabulary of {size}",
    )
    assert refused(encoding, TokenPrompt(pack([1])), resume=pack([size]))[0] == "resume"


def test_a_token_that_the_model_has_no_row_for_is_refused_even_where_the_tokenizer_knows_it(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    folder = tiny_tokenizers.write_model(tmp_path, tokenizer, config={"text_config": {"vocab_size": 300}})
    assert refused(encoding_of(folder), TextPrompt("<tool>"))[0] == "prompt"


def test_questions_are_answered_with_tokens_strings_and_text(encoding: PromptEncoder) -> None:
    answer = encoding.answer(Encode(TextPrompt("Hello"), return_strings=True))
    assert isinstance(answer, EncodeReply)
    assert answer.strings == ("<s>", "▁Hello")
    assert encoding.answer(Encode(TextPrompt("Hello"))) == EncodeReply(answer.tokens, None)
    long, words = TextPrompt("Hello" + " Hello" * 5000), ["<s>", *["▁Hello"] * 5001]
    spelled = encoding.answer(Encode(long, return_strings=True, string_slices=True))
    assert isinstance(spelled, EncodeReply)
    assert spelled.strings is None
    assert [msgspec.msgpack.decode(each) for each in spelled.string_slices or ()] == [words[:4096], words[4096:]]
    assert encoding.answer(Decode(answer.tokens)) == DecodeReply("<s> Hello")
    assert encoding.answer(Decode(answer.tokens, skip_special_tokens=True)) == DecodeReply("Hello")
    assert encoding.answer(Decode(b"")) == DecodeReply("")
    chat = encoding.answer(Encode(ChatPrompt(messages=CHAT, add_generation_prompt=False)))
    assert isinstance(chat, EncodeReply)


def test_questions_at_fault_are_refused_by_their_field(encoding: PromptEncoder) -> None:
    wrong = [encoding.answer(q) for q in (Encode(TokenPrompt(b"")), Decode(pack([2**31])), Decode(b"\1"))]
    assert [answer.field for answer in wrong if isinstance(answer, TokenizerRefusal)] == ["prompt", "tokens", "tokens"]


def test_a_tokenizers_own_truncation_and_padding_are_left_aside(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    folder = tiny_tokenizers.write_model(tmp_path, tokenizer)
    assert len(unpack(routed(encoding_of(folder), TextPrompt("x y z " * 50)).tokens)) > 50
    assert len(unpack(routed(encoding_of(folder), TextPrompt("x")).tokens)) == 1


def test_special_tokens_are_read_as_strings_and_as_objects_wherever_they_stand(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    folder = tiny_tokenizers.write_model(tmp_path, tokenizer, {"bos_token": "<s>", "eos_token": None})
    assert load_tokenizer(folder).special_tokens == {"bos_token": "<s>"}
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</s>", "lstrip": False}, "additional_special_tokens": ["<x>"]})
    )
    files = load_tokenizer(folder)
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert files.tokenizer.token_to_id("<x>") in special_ids(files.tokenizer)
    settings = {
        "bos_token": "<s>",
        "added_tokens_decoder": {"700": {"content": "<y>", "special": True}, "699": {"content": "<z>"}},
    }
    size = tokenizer.get_vocab_size()
    files = load_tokenizer(tiny_tokenizers.write_model(folder, tokenizer, settings))
    assert files.special_tokens == {"bos_token": "<s>"}
    assert [files.tokenizer.token_to_id(t) for t in ("<z>", "<y>")] == [size, size + 1]
    assert special_ids(files.tokenizer) >= {size + 1}
    assert size not in special_ids(files.tokenizer)


def test_a_directory_whose_tokenizer_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerUnusable, match=r"no tokenizer\.json there; write one with transformers and sentencep"):
        load_tokenizer(tmp_path)
    (tmp_path / "spm.model").touch()
    with pytest.raises(TokenizerUnusable, match=r"there, only spm\.model; write one .* name it: --tokenizer NEW"):
        load_tokenizer(tmp_path)
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "spm.model").rename(tmp_path / "own.tiktoken")
    message = (
        r"only own\.tiktoken, and code of its own, which is not run; write .*, or bring that of a release with the"
    )
    with pytest.raises(TokenizerUnusable, match=message):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    folder = tiny_tokenizers.write_model(tmp_path, tiny_tokenizers.byte_level())
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(TokenizerUnusable, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)


def test_a_post_processor_adds_its_token_to_text_and_to_a_chat_that_asks_for_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    encoding = encoding_of(tiny_tokenizers.write_model(tmp_path, tokenizer))
    assert unpack(routed(encoding, TextPrompt("x")).tokens)[0] == bos
    plain = unpack(routed(encoding, ChatPrompt(messages=CHAT)).tokens)
    assert bos not in plain
    assert unpack(routed(encoding, ChatPrompt(messages=CHAT, add_special_tokens=True)).tokens) == [bos, *plain]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("keep", [1, 2, 3, 5, 100])
def test_special_tokens_stay_where_a_text_is_shortened_as_transformers_do_it(
    tmp_path: Path, side: Any, keep: int
) -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    marks = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=marks)
    folder = tiny_tokenizers.write_model(tmp_path, tokenizer)
    encoding, text = encoding_of(folder), "Once upon a time there was a fox."
    theirs = AutoTokenizer.from_pretrained(folder, truncation_side=side)
    found = unpack(routed(encoding, TextPrompt(text), truncate_prompt_tokens=keep, truncation_side=side).tokens)
    question = Encode(TextPrompt(text), truncate_prompt_tokens=keep, truncation_side=side)
    answer = encoding.answer(question)
    assert isinstance(answer, EncodeReply)
    assert unpack(answer.tokens) == found
    if keep > 1:
        assert found == theirs(text, truncation=True, max_length=keep)["input_ids"]
    else:
        assert len(found) == 1, "transformers refuse to keep fewer tokens than there are special ones"


def embedded(count: int, first: int) -> PromptEmbeds:
    return PromptEmbeds(dtype="float16", size=1, rows=pack(range(first, first + count))[: 2 * count])


def chat_of(*texts: str, embeds: tuple[PromptEmbeds, ...]) -> ChatPrompt:
    messages = [{"role": "user", "content": text} for text in texts]
    return ChatPrompt(messages=json.dumps(messages).encode(), embeds=embeds)


def test_parts_of_embeddings_stand_where_the_template_shows_them(encoding: PromptEncoder, folder: Path) -> None:
    one, two = embedded(20, 5), embedded(3, 100)
    texts = f"Hello {embeds_placeholder(0)} world", f"{embeds_placeholder(1)}\nHello"
    prompt = chat_of(*texts, embeds=(one, two))
    route = encoding.route(tokenize(prompt), prompt)
    assert isinstance(route, Route)
    generation, ids = route.generation, unpack(route.generation.tokens)
    embeds = generation.prompt_embeds
    assert embeds is not None
    assert embeds.rows == one.rows + two.rows
    assert [count for _, count in embeds.runs] == [20, 3]
    assert embeds.fits(generation.prompt_length)
    assert all(ids[first : first + count] == [0] * count for first, count in embeds.runs)
    # As the library, with the placeholder among its special tokens.
    library = AutoTokenizer.from_pretrained(folder)
    library.add_special_tokens({"additional_special_tokens": ["<|rows|>"]})
    chat = [{"role": "user", "content": text} for text in texts]
    text = library.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    for number in (0, 1):
        text = text.replace(embeds_placeholder(number), "<|rows|>")
    place, counts = library.convert_tokens_to_ids("<|rows|>"), iter((20, 3))
    wanted: list[int] = []
    for token in library(text, add_special_tokens=False)["input_ids"]:
        wanted += [0] * next(counts) if token == place else [token]
    assert ids == wanted
    again = chat_of(*texts, embeds=(embedded(20, 6), two))
    other = encoding.route(tokenize(again), again)
    assert isinstance(other, Route)
    assert other.generation.block_hashes != generation.block_hashes, "their rows name the blocks"


@pytest.mark.parametrize(
    "text", [embeds_placeholder(0) + "<|prompt_embeds|>", embeds_placeholder(0) * 2, embeds_placeholder(1), "nothing"]
)
def test_a_chat_that_does_not_show_each_part_once_is_refused(encoding: PromptEncoder, text: str) -> None:
    prompt = chat_of(text, embeds=(embedded(2, 1),))
    refused = encoding.route(tokenize(prompt), prompt)
    assert isinstance(refused, RequestRejected)
    assert (refused.field, "show each of the 1 parts" in refused.message) == ("messages", True)
