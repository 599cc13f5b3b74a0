"""Prompts have exactly the length asked for, and are the same for the same seed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from services.bench.client.api import BenchRequest, PromptBody
from services.bench.datasets.lengths import LengthDistribution, drawn_length, parse_distribution
from services.bench.datasets.multi_turn import ConversationScript, ConversationTurn, TurnsShape, conversation, scripts
from services.bench.datasets.single_turn import (
    PrefixShape,
    chosen_prefixes,
    random_prompts,
    read_conversations,
    shared_prefix_prompts,
    sharegpt_prompts,
)
from services.bench.datasets.writers import COMMON_WORDS, LocalTokenizer, TokenWriter, seen_vocabulary, text_writer
from services.bench.errors import BenchError
from services.bench.options import serve_options
from services.bench.statistics import RequestOutcome


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE with a special token in front, made on the spot."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(COMMON_WORDS)] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


async def count_chat(local: LocalTokenizer, body: PromptBody) -> int:
    """As a server with a template would: four tokens around each message."""
    assert isinstance(body, tuple)
    return await local.count(body) + 4 * len(body)


async def test_token_prompts_are_exact_and_repeat_for_a_seed() -> None:
    writer = TokenWriter(range(5, 50))
    first = await random_prompts(writer, 20, 16, 8, 0.0, Random(1))
    assert first == await random_prompts(writer, 20, 16, 8, 0.0, Random(1))
    assert first != await random_prompts(writer, 20, 16, 8, 0.0, Random(2))
    for prompt in first:
        assert isinstance(prompt.body, list)
        assert (len(prompt.body), prompt.tokens, prompt.output_tokens) == (16, 16, 8)
        assert all(5 <= token < 50 for token in prompt.body)


async def test_lengths_vary_by_the_ratio_asked_for() -> None:
    random = Random(0)
    drawn = [drawn_length(100, 0.25, random) for _ in range(2000)]
    assert (min(drawn), max(drawn)) == (75, 125)
    assert {drawn_length(100, 0.0, random) for _ in range(10)} == {100}
    assert min(drawn_length(1, 0.9, random) for _ in range(99)) == 1


async def test_output_lengths_have_the_distribution_asked_for() -> None:
    writer, normal = TokenWriter(range(50)), parse_distribution("normal:20:500")
    prompts = await random_prompts(writer, 4000, 10, normal, 0.0, Random(0))
    lengths = sorted(prompt.output_tokens for prompt in prompts)
    assert {prompt.tokens for prompt in prompts} == {10}
    assert lengths[0] >= 20
    assert lengths[-1] <= 500
    assert lengths[2000] == pytest.approx(260, abs=5)
    # 68.3 % within a deviation, which is a sixth of what is between the bounds.
    assert sum(180 <= length <= 340 for length in lengths) / 4000 == pytest.approx(0.683, abs=0.03)
    uniform = sorted(parse_distribution("uniform:3:5").draw(random) for random in [Random(1)] for _ in range(3000))
    assert (uniform[0], uniform[-1]) == (3, 5)
    assert uniform.count(4) == pytest.approx(1000, abs=100)
    assert str(normal) == "normal:20:500"


@pytest.mark.parametrize(
    "text", ["normal", "normal:20", "zipf:1:2", "normal:0:5", "normal:9:8", "normal:1:2:3", "normal:a:b"]
)
def test_a_distribution_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_options(["--output-len-distribution", text])
    assert f"{text!r}: normal:LEAST:MOST or uniform:LEAST:MOST" in capsys.readouterr().err


def test_a_distribution_is_of_random_prompts() -> None:
    given = ["--output-len-distribution", "uniform:3:5"]
    assert serve_options(given).output_distribution == LengthDistribution("uniform", 3, 5)
    with pytest.raises(SystemExit):
        serve_options([*given, "--dataset", "multi-turn"])


async def test_text_prompts_are_exact(folder: Path) -> None:
    local = LocalTokenizer(folder)
    writer = await text_writer(local.count, chat=False)
    prompts = await random_prompts(writer, 40, 33, 8, 0.5, Random(1))
    assert len({prompt.body for prompt in prompts if isinstance(prompt.body, str)}) == 40
    for prompt in prompts:
        assert await local.count(prompt.body) == prompt.tokens
    again = await random_prompts(await text_writer(local.count, chat=False), 40, 33, 8, 0.5, Random(1))
    assert prompts == again


async def test_chat_prompts_are_exact_with_their_template(folder: Path) -> None:
    local = LocalTokenizer(folder)

    async def count(body: PromptBody) -> int:
        return await (local.count(body) if isinstance(body, str) else count_chat(local, body))

    writer = await text_writer(count, chat=True)
    for prompt in await random_prompts(writer, 10, 21, 8, 0.0, Random(1)):
        assert await count(prompt.body) == 21
    for prompt in await shared_prefix_prompts(writer, PrefixShape(2, 20, 12, 8, 0.0), 6, Random(1)):
        assert await count(prompt.body) == 32
        assert isinstance(prompt.body, tuple)
        assert [role for role, _ in prompt.body] == ["system", "user"]


async def test_a_prompt_shorter_than_the_template_is_refused(folder: Path) -> None:
    writer = await text_writer(LocalTokenizer(folder).count, chat=False)
    with pytest.raises(BenchError, match="too short"):
        await writer.prompt(0, Random(0))


async def test_a_tokenizer_whose_counts_do_not_add_up_is_said_so() -> None:
    async def drunk(body: PromptBody) -> int:
        return 2 * len(str(body).split())

    with pytest.raises(BenchError, match="use token ids"):
        await (await text_writer(drunk, chat=False)).prompt(7, Random(0))


async def test_groups_share_their_beginning_and_nothing_else() -> None:
    prompts = await shared_prefix_prompts(TokenWriter(range(1000)), PrefixShape(3, 40, 10, 8, 0.0), 15, Random(1))
    assert prompts == await shared_prefix_prompts(
        TokenWriter(range(1000)), PrefixShape(3, 40, 10, 8, 0.0), 15, Random(1)
    )
    bodies = [prompt.body for prompt in prompts if isinstance(prompt.body, list)]
    assert len(bodies) == 15
    assert {len(body) for body in bodies} == {50}
    beginnings = [tuple(body[:40]) for body in bodies]
    assert len(set(beginnings)) == 3
    assert all(beginnings.count(beginning) == 5 for beginning in beginnings)
    assert len({tuple(body) for body in bodies}) == 15
    assert beginnings != sorted(beginnings)


def test_prefixes_are_chosen_by_zipfs_law() -> None:
    drawn = Counter(chosen_prefixes(4, 1.0, 25_000, Random(2)))
    for rank in range(4):
        assert drawn[rank] == pytest.approx(25_000 / (rank + 1) / (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.05)
    assert chosen_prefixes(4, 1.0, 50, Random(2)) == chosen_prefixes(4, 1.0, 50, Random(2))


def test_without_a_popularity_every_prefix_is_chosen_as_often() -> None:
    assert sorted(Counter(chosen_prefixes(4, 0.0, 10, Random(2))).values()) == [2, 2, 3, 3]


async def multi_turn_scripts(folder: Path, shape: TurnsShape, count: int = 3) -> list[ConversationScript]:
    writer = await text_writer(LocalTokenizer(folder).count, chat=True)
    return await scripts(writer, shape, count, Random(4))


async def test_conversations_repeat_for_a_seed_and_have_the_lengths_asked_for(folder: Path) -> None:
    shape = TurnsShape(turns=5, system_len=20, user_len=40, output_len=16, ratio=0.25, pause=2.0)
    made = await multi_turn_scripts(folder, shape, count=20)
    assert made == await multi_turn_scripts(folder, shape, count=20)
    assert len({script.system for script in made}) == 1
    turns = [turn for script in made for turn in script.turns]
    assert len(turns) == len({turn.user for turn in turns}) == 100
    assert all(12 <= turn.output_tokens <= 20 for turn in turns)
    count = LocalTokenizer(folder).count
    lengths = [await count(turn.user) for turn in turns]
    assert (min(lengths) >= 30, max(lengths) <= 51) == (True, True)  # and the special token in front
    assert all(script.turns[0].pause == 0 for script in made)
    pauses = [turn.pause for script in made for turn in script.turns[1:]]
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, rel=0.4)


SCRIPT = ConversationScript(
    "Be brief.", (ConversationTurn("one", 3, 0.0), ConversationTurn("two", 4, 0.0), ConversationTurn("three", 5, 0.0))
)


def test_a_chats_turn_repeats_what_was_answered() -> None:
    first, third = SCRIPT.prompt([], chat=True), SCRIPT.prompt(["A", "B"], chat=True)
    assert first == BenchRequest((("system", "Be brief."), ("user", "one")), None, 3)
    said = (("user", "one"), ("assistant", "A"), ("user", "two"), ("assistant", "B"), ("user", "three"))
    assert third == BenchRequest((("system", "Be brief."), *said), None, 5)


def test_a_completions_turn_begins_with_the_one_before_and_its_answer() -> None:
    first, second = SCRIPT.prompt([], chat=False).body, SCRIPT.prompt(["So"], chat=False).body
    assert first == "Be brief.\none\n"
    assert second == f"{first}So\ntwo\n"


async def hold(
    script: ConversationScript, answers: list[RequestOutcome]
) -> tuple[list[RequestOutcome], list[BenchRequest]]:
    """What becomes of a conversation with a server that gives these answers."""
    asked: list[BenchRequest] = []

    async def send(prompt: BenchRequest) -> RequestOutcome:
        asked.append(prompt)
        return answers[len(asked) - 1]

    return await conversation(script, chat=False)(send), asked


async def test_turns_come_in_order_behind_the_real_answers() -> None:
    outcomes, asked = await hold(SCRIPT, [answered("A"), answered("B"), answered("C")])
    assert asked == [SCRIPT.prompt(["A", "B"][:n], chat=False) for n in range(3)]
    assert [outcome.turn for outcome in outcomes] == [0, 1, 2]


async def test_a_turn_that_fails_ends_its_conversation() -> None:
    outcomes, asked = await hold(SCRIPT, [answered("A"), answered("")._replace(error="HTTP 503")])
    assert [outcome.error for outcome in outcomes] == [None, "HTTP 503"]
    assert len(asked) == 2


def answered(text: str) -> RequestOutcome:
    return RequestOutcome(0.0, 1.0, 5, 3, [0.5, 1.0], text=text)


async def test_the_vocabulary_seen_holds_no_special_token(folder: Path) -> None:
    local = LocalTokenizer(folder)

    async def tokenize(body: PromptBody) -> list[int]:
        assert isinstance(body, str)
        return list(local._tokenizer.encode(body).ids)

    seen = await seen_vocabulary(tokenize)
    assert 0 not in seen
    assert len(seen) > 90
    assert set(seen) <= set(local.vocabulary())
    assert 0 not in local.vocabulary()


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=str(tmp_path)):
        LocalTokenizer(tmp_path)


def sharegpt_entry(question: object, *answers: str) -> dict[str, object]:
    turns = [{"from": "human", "value": question}, *({"from": "gpt", "value": answer} for answer in answers)]
    return {"id": "x", "conversations": turns}


async def words(body: PromptBody) -> int:
    return len(str(body).split())


async def test_sharegpt_takes_first_turns_of_a_sensible_length(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    good = [sharegpt_entry(f"question number {i} is this", "this is the answer " + "so " * i, "more") for i in range(5)]
    bad = [
        sharegpt_entry("too short", "an answer of five words"),
        sharegpt_entry("a question of five words", "short"),
        sharegpt_entry("w " * 1025, "an answer of five words"),
        sharegpt_entry("a question of five words", "w " * 2044),
        sharegpt_entry("a question without an answer"),
        sharegpt_entry(7, "a b c d e"),
        "nonsense",
    ]
    path.write_text(json.dumps([*bad, *good]))
    read = read_conversations(path)
    prompts = await sharegpt_prompts(read, words, 5, False, None, Random(1))
    assert sorted(prompts, key=lambda p: p.output_tokens) == [
        BenchRequest(f"question number {i} is this", 5, 4 + i) for i in range(5)
    ]
    assert prompts == await sharegpt_prompts(read, words, 5, False, None, Random(1))
    assert len(await sharegpt_prompts(read, words, 12, False, None, Random(1))) == 12
    (fixed,) = await sharegpt_prompts(read, words, 1, True, 64, Random(1))
    assert fixed.output_tokens == 64
    assert isinstance(fixed.body, tuple)


async def test_a_sharegpt_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content in ("{", "{}"):
        path.write_text(content)
        with pytest.raises(BenchError, match=str(path)):
            read_conversations(path)
    with pytest.raises(BenchError):
        read_conversations(tmp_path / "nowhere")
    with pytest.raises(BenchError, match="no conversation"):
        await sharegpt_prompts([], words, 3, False, None, Random(0))
