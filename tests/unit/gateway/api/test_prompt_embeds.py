"""`prompt_embeds`: tensors that PyTorch saved, read without it; and what is refused before any of it is computed."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from services.gateway.api.chat import read_chat
from services.gateway.api.completions import read_completion
from services.gateway.api.embeds.prompt_embeds import MAX_MAGNITUDE, has_undefined
from services.gateway.api.embeds.saved_tensor import NoSavedTensor, SavedTensor, read_saved_tensor
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.api.prompts import read_tokenize
from shared.ids import ModelName
from shared.messages.generation import MAX_PROMPT_EMBEDS_BYTES
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import ChatPrompt, EmbedsPrompt, TextPrompt, embeds_placeholder
from tests.support.models.embedded_prompts import prompt_embeds
from tests.support.models.embedded_prompts import prompt_embeds_field as encoded

SIZE = 8
CARD = ModelCard(
    name=ModelName("demo"),
    max_model_len=2048,
    vocab_size=2048,
    eos_token_ids=(2,),
    dtype="float32",
    created=1,
    prompt_embeds=SIZE,
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def saved(what: Any, **more: Any) -> bytes:
    file = io.BytesIO()
    torch.save(what, file, **more)
    return file.getvalue()


def rows(count: int, dtype: torch.dtype = torch.float32, size: int = SIZE) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count)).to(dtype)


def completion(card: ModelCard = CARD, **fields: Any) -> GenerationRequest:
    return read_completion(msgspec.json.encode({"model": "demo"} | fields), [card], RequestLimits())


def refusal(read: Callable[..., Any], *arguments: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        read(*arguments, **fields)
    assert error.value.status == 400
    return error.value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_pytorch_saved_is_read_without_it(dtype: torch.dtype, protocol: int) -> None:
    whole = rows(7, dtype)
    for tensor in (whole, whole[2:5], torch.nn.Parameter(whole), whole[None], whole.flatten()):
        read = read_saved_tensor(saved(tensor, pickle_protocol=protocol))
        assert read.shape == tuple(tensor.shape)
        assert read.dtype == str(dtype).removeprefix("torch.")
        assert read.data == prompt_embeds(tensor.reshape(-1, SIZE)).rows


class Harmful:
    """Unpickled, it would call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/tmp/baton-unpickled", "w"))


def archive(pickled: bytes, **entries: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data.pkl", pickled)
        for name, content in entries.items():
            made.writestr(f"archive/{name}", content)
    return file.getvalue()


def doubled(times: int) -> bytes:
    """A pickle of a tuple of tuples, with 2 to the power of `times` at the bottom, where names are expected."""
    return b"\x80\x04)q\x00" + b"h\x00\x86q\x00" * times + b"h\x00\x93."


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        (b"", "not a ZIP archive"),
        (b"PK\x03\x04" + bytes(100), "has no end"),
        (saved(rows(3), _use_new_zipfile_serialization=False), "not a ZIP archive"),
        (saved({"a": rows(3)}), "EMPTY_DICT, which no tensor's has"),
        (saved([1]), "EMPTY_LIST, which no tensor's has"),
        (saved(3), "something other than one tensor"),
        (saved(Harmful(), pickle_module=pickle), "its pickle calls"),
        (saved(rows(3).to_sparse()), "its pickle calls torch.serialization._get_layout"),
        (saved(rows(3).to(torch.complex64)), "torch.ComplexFloatStorage are not read"),
        (saved(rows(4).T), "save tensor.contiguous"),
        (archive(b"\x80\x02."), "something other than one tensor"),
        (archive(b"\x80\x02t."), "broken at TUPLE"),
        (archive(b"\x80\x02r\xff\xff\xff\xff."), "broken at LONG_BINPUT"),
        (archive(b"no pickle"), "cannot be read"),
        (archive(b"\x80\x02" + b")" * 100), "holds more than a tensor"),
        (archive(doubled(60)), "broken at STACK_GLOBAL"),
        (archive(bytes(20_000)), "longer than 16384 bytes"),
        (archive(b"", **{f"x{i}": b"" for i in range(80)}), "81 entries"),
        (archive(b"", byteorder=b"big"), "little-endian"),
    ],
)
def test_what_is_not_one_dense_tensor_is_refused_and_never_unpickled(file: bytes, complaint: str) -> None:
    with pytest.raises(NoSavedTensor, match=complaint):
        read_saved_tensor(file)


def test_spoilt_files_are_refused_or_read() -> None:
    """And nothing else happens: of ten thousand, no error is of another kind."""
    whole, random = saved(rows(3)), Random(1)
    read = 0
    for _ in range(10_000):
        file = bytearray(whole)
        for _ in range(random.randrange(1, 4)):
            file[random.choice((random.randrange(300), random.randrange(len(file))))] = random.randrange(256)
        try:
            read += isinstance(read_saved_tensor(bytes(file[: random.choice((None, len(file) - 1))])), SavedTensor)
        except NoSavedTensor:
            continue
    assert 0 < read < 10_000


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_no_model_can_begin_with_are_found(dtype: torch.dtype) -> None:
    whole = rows(5, dtype)
    name: Any = str(dtype).removeprefix("torch.")
    largest = min(MAX_MAGNITUDE, torch.tensor(65280.0).item() if dtype == torch.bfloat16 else MAX_MAGNITUDE)
    for value, found in ((largest, False), (-largest, False), (0.0, False), (-0.0, False), (1e-8, False)):
        assert has_undefined(name, prompt_embeds(whole.clone().fill_(value)).rows) is found
    above = [float("nan"), float("inf"), -float("inf"), *([] if dtype == torch.float16 else [65536.0, -1e30])]
    for value in above:
        whole[3, 5] = value
        assert has_undefined(name, prompt_embeds(whole).rows)
        whole[3, 5] = 0.0
        assert not has_undefined(name, prompt_embeds(whole).rows)


def test_prompts_of_embeddings_come_before_those_of_tokens() -> None:
    job = completion(
        prompt_embeds=[encoded(rows(3)), encoded(rows(5, torch.bfloat16)[None])],
        prompt="hi",
        n=2,
    )
    wanted = (rows(3), rows(5, torch.bfloat16))
    assert job.prompts == (*(EmbedsPrompt(prompt_embeds(each)) for each in wanted), TextPrompt("hi"))
    assert job.sequences == 6
    for nothing in ("", [], None):
        alone = completion(prompt_embeds=encoded(rows(3)), prompt=nothing)
        assert alone.prompts == (EmbedsPrompt(prompt_embeds(rows(3))),)
    assert completion(prompt_embeds=encoded(rows(3))).prompts == alone.prompts


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("no base64", r"prompt_embeds: 'no base64' is not allowed; base64 of what torch.save wrote is"),
        ("é", r"prompt_embeds: 'é' is not allowed"),
        ("aGk=", r"prompt_embeds: not a tensor that torch.save wrote: not a ZIP archive"),
        (3, r"prompt_embeds: 3 is not allowed; a tensor of torch.save in base64, or a list of these, is"),
        ([encoded(rows(2)), 7], r"is not allowed; a tensor of torch.save"),
        (
            [encoded(rows(2)), encoded(rows(2, size=9))],
            r"prompt_embeds\[1\]: shape \[2, 9\] is not allowed; \[tokens, 8\]",
        ),
        (encoded(rows(2)[0]), r"shape \[8\] is not allowed; \[tokens, 8\] is"),
        (encoded(rows(2)[:0]), r"shape \[0, 8\] is not allowed"),
        (encoded(rows(2).expand(2, 2, 8).contiguous()), r"shape \[2, 2, 8\] is not allowed"),
        (encoded(rows(2).double()), r"dtype float64 is not allowed; float32, float16, bfloat16 are"),
        (encoded(rows(2).log()), r"NaN, infinity and numbers beyond ±65504 are not allowed"),
        (
            encoded(torch.zeros(MAX_PROMPT_EMBEDS_BYTES // 32 + 1, 8)),
            r"6291488 bytes of rows .* 6291456 are, 196608",
        ),
        ("A" * 9_000_000, r"9000000 characters; at most 6291456 bytes of rows"),
    ],
)
def test_a_prompt_that_is_none_names_the_field_and_what_is_allowed(given: Any, complaint: str) -> None:
    error = refusal(completion, prompt_embeds=given)
    assert error.param is not None
    assert error.param.startswith("prompt_embeds")
    with pytest.raises(RequestError, match=complaint):
        raise error


@pytest.mark.features("prompt embeds", "prompt logprobs", refused=True)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("echo", True), ("prompt_logprobs", 0), ("truncate_prompt_tokens", 2), ("return_token_ids", True)),
        *(("return_prompt_text", True), ("vllm_xargs", {"a": 1}), ("repetition_penalty", 1.1)),
    ],
)
def test_what_needs_tokens_is_refused(field: str, value: Any) -> None:
    error = refusal(completion, prompt_embeds=encoded(rows(3)), **{field: value})
    assert error.param == field
    assert "prompt_embeds" in error.message


@pytest.mark.features("prompt embeds", "beam search", refused=True)
def test_beams_are_refused() -> None:
    assert refusal(completion, prompt_embeds=encoded(rows(3)), use_beam_search=True, n=2).param == "use_beam_search"


@pytest.mark.features("prompt embeds", "logits processors", refused=True)
def test_a_logits_processor_of_a_request_is_refused() -> None:
    """It may read the prompt."""
    assert refusal(completion, prompt_embeds=encoded(rows(3)), vllm_xargs={}).param == "vllm_xargs"


def test_engines_that_take_none_say_how_they_would() -> None:
    error = refusal(completion, msgspec.structs.replace(CARD, prompt_embeds=None), prompt_embeds=encoded(rows(3)))
    assert (error.param, error.code) == ("prompt_embeds", "unsupported_parameter")
    assert "--enable-prompt-embeds" in error.message


def chat(*parts: Any, card: ModelCard = CARD, **fields: Any) -> GenerationRequest:
    body = {"model": "demo", "messages": [{"role": "user", "content": list(parts)}]} | fields
    return read_chat(msgspec.json.encode(body), [card], RequestLimits())


def part(tensor: Tensor) -> dict[str, str]:
    return {"type": "prompt_embeds", "data": encoded(tensor)}


def test_parts_of_a_chat_are_taken_out_of_its_messages() -> None:
    (prompt,) = chat(part(rows(3)), {"type": "text", "text": "and"}, part(rows(2))).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.embeds == (prompt_embeds(rows(3)), prompt_embeds(rows(2)))
    (message,) = msgspec.json.decode(prompt.messages)
    assert [each["text"] for each in message["content"]] == [embeds_placeholder(0), "and", embeds_placeholder(1)]
    (plain,) = chat({"type": "text", "text": "and"}).prompts
    assert isinstance(plain, ChatPrompt)
    assert plain.embeds == ()


@pytest.mark.parametrize(
    ("parts", "param", "complaint"),
    [
        ([{"type": "prompt_embeds"}], "data", "None is not allowed; a tensor of torch.save in base64 is"),
        ([part(rows(2, size=9))], "data", r"shape \[2, 9\] is not allowed"),
        ([part(rows(2)), part(rows(2, torch.bfloat16))], "data", "dtype bfloat16 is not allowed beside float32"),
        ([part(torch.zeros(131_072, 8)), part(torch.zeros(65_537, 8))], "data", "6291488 bytes of rows .* 6291456 are"),
    ],
)
def test_a_part_that_is_none_names_itself(parts: list[Any], param: str, complaint: str) -> None:
    error = refusal(chat, *parts)
    assert error.param == f"messages[0].content[{len(parts) - 1}].{param}"
    with pytest.raises(RequestError, match=complaint):
        raise error


def test_what_needs_tokens_is_refused_beside_parts_too() -> None:
    assert refusal(chat, part(rows(3)), echo=True).param == "echo"
    assert chat(part(rows(3)), repetition_penalty=1).prompts
    error = refusal(chat, part(rows(3)), card=msgspec.structs.replace(CARD, prompt_embeds=None))
    assert (error.param, error.code) == ("messages[0].content[0].type", "unsupported_parameter")
    body = {"model": "demo", "messages": [{"role": "user", "content": [part(rows(3))]}]}
    tokenized = refusal(read_tokenize, msgspec.json.encode(body), [CARD], RequestLimits())
    assert tokenized.param == "messages[0].content[0].type"


def test_a_whole_chat_is_none() -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "prompt_embeds": encoded(rows(3)),
    }
    error = refusal(read_chat, msgspec.json.encode(body), [CARD], RequestLimits())
    assert (error.param, error.code) == ("prompt_embeds", "unsupported_parameter")


def test_a_completion_without_any_prompt_is_refused() -> None:
    assert refusal(completion).message == "prompt: this field is required"
