"""`bench prefixes`: what it reads, what it counts, what it says."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from services.bench.__main__ import main
from services.bench.errors import BenchError
from services.bench.prefixes.command import survival
from services.bench.prefixes.prompt_files import CHUNK, BlockIds, FilePrompt, TokenIds, array_elements, read_prompts
from services.bench.prefixes.symbols import BlockAlphabet, CharacterAlphabet, SymbolTable, TokenAlphabet, WordAlphabet
from tests.support.paths import DEMO_MODEL


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, **options: Any) -> list[FilePrompt]:
    return list(read_prompts(path, options.get("format_", "auto"), options.get("turns", "all")))


TALK = [
    {"from": "human", "value": "hi"},
    {"from": "gpt", "value": "hello"},
    {"from": "human", "value": "bye"},
    {"from": "gpt", "value": "see you"},
]


def test_every_usual_record_is_read(tmp_path: Path) -> None:
    request = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]}
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": "x"}]
    path = written(
        tmp_path / "x.jsonl",
        {"prompt": "once"},
        {"prompt": ["twice", "thrice"]},
        {"prompt": [1, 2, 3]},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": request},
        {**request, "tools": [{"name": "f"}]},
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]},
        {"conversations": TALK},
        {"timestamp": 5, "input_length": 1100, "hash_ids": [0, 1, 7]},
    )
    assert read(path) == [
        "once",
        "twice",
        "thrice",
        TokenIds([1, 2, 3]),
        "system: Be brief.\nuser: hi\n",
        'tools: [{"name": "f"}]\nsystem: Be brief.\nuser: hi\n',
        'user: look\n{"type": "image_url", "image_url": "x"}\nassistant: \n',
        "human: hi\n",
        "human: hi\ngpt: hello\nhuman: bye\n",
        BlockIds([0, 1, 7]),
    ]


def test_a_conversation_may_count_with_its_first_question_only(tmp_path: Path) -> None:
    assert read(written(tmp_path / "x", {"conversations": TALK}), turns="first") == ["human: hi\n"]


def test_an_array_is_read_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": i, "conversations": TALK} for i in range(3)], indent=2))
    assert len(read(path)) == 6
    big = [{"prompt": "x" * (CHUNK // 3) + str(i)} for i in range(7)]
    text = json.dumps(big)
    assert list(array_elements(text[:10], io.StringIO(text[10:]))) == big
    with pytest.raises(ValueError, match="Expecting"):
        list(array_elements("[{}, ", io.StringIO("")))


def test_text_is_one_prompt_a_line_compressed_or_not(tmp_path: Path) -> None:
    plain, packed = tmp_path / "x.txt", tmp_path / "x.txt.gz"
    plain.write_text("one\n\n  two\nthree")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(plain) == read(packed) == ["one", "  two", "three"]


def test_instructions_in_dollys_format_are_read_with_what_they_are_about(tmp_path: Path) -> None:
    records = [
        {"instruction": "Who?", "context": "", "response": "I.", "category": "open_qa"},
        {"instruction": "When?", "context": "In 1812.", "response": "1812", "category": "closed_qa"},
    ]
    assert read(written(tmp_path / "dolly.jsonl", *records)) == ["Who?", "When?\n\nIn 1812."]


def test_conversations_in_lmsys_parquet_files_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    import pyarrow
    from pyarrow.parquet import write_table

    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    table = pyarrow.Table.from_pylist([{"conversation_id": f"{n}", "conversation": said} for n in range(3000)])
    write_table(table, tmp_path / "lmsys.parquet")
    assert read(tmp_path / "lmsys.parquet") == ["user: Hi\n"] * 3000
    (tmp_path / "broken.parquet").write_bytes(b"no such thing")
    with pytest.raises(BenchError, match=r"broken\.parquet"):
        read(tmp_path / "broken.parquet")


def test_parquet_without_its_library_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(BenchError, match=r"pip install 'baton-serve\[parquet\]'"):
        read(tmp_path / "lmsys.parquet")


def test_a_line_longer_than_what_is_read_at_once_stays_whole(tmp_path: Path) -> None:
    lines = ["a" * (CHUNK + 5), "b" * (CHUNK - 1), "c"]
    (tmp_path / "x.txt").write_text("\n".join(lines))
    assert read(tmp_path / "x.txt") == lines


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt": "a"}\n{"prompt"\n', "record 2"),
        ('{"prompt": "a"}\n\n{"nothing": 1}\n', "record 2: neither prompt"),
        ('{"prompt": {"a": 1}}\n', "neither text nor token ids"),
        ('{"messages": ["hi"]}\n', "a message without role"),
        ('{"hash_ids": [1, "x"]}\n', "whole numbers"),
        ('[{"prompt": "a"}, {"prompt": "b"', "record 2"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(content)
    with pytest.raises(BenchError, match=f"x: .*{said}"):
        read(tmp_path / "x")


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("binary", "nowhere"):
        with pytest.raises(BenchError, match=name):
            read(tmp_path / name)


def test_words_tokens_characters_and_blocks_can_be_shown_again() -> None:
    words, tokens, blocks = WordAlphabet(), TokenAlphabet(None), BlockAlphabet()
    one, other = words.encode(["the  cat sat", "the cat\nran"])
    assert (len(one), one[:2]) == (3, other[:2])
    assert words.decode(other) == "the cat ran"
    assert tokens.decode(tokens.encode([TokenIds([5, 55_296, 1])])[0]) == "5 55296 1"
    assert blocks.decode(blocks.encode([BlockIds([10**12, 3, 10**12])])[0]) == f"{10**12} 3 {10**12}"
    assert CharacterAlphabet().encode(["ab"]) == ["ab"]


def test_prompts_of_different_kinds_are_not_compared() -> None:
    for alphabet, prompt in (
        (WordAlphabet(), TokenIds([1])),
        (TokenAlphabet(None), "text"),
        (TokenAlphabet(None), BlockIds([1])),
    ):
        with pytest.raises(BenchError):
            alphabet.encode([prompt])
    with pytest.raises(BenchError):
        BlockAlphabet().encode(["text"])
    with pytest.raises(BenchError, match="no token id"):
        TokenAlphabet(None).encode([TokenIds([3, -1])])


def test_there_is_a_limit_to_how_many_words_are_told_apart() -> None:
    numbers = SymbolTable()
    numbers.encode(range(0x110000))
    with pytest.raises(BenchError, match="different words"):
        numbers.encode(["one more"])


def test_a_survival_curve_is_the_share_of_values_at_least_as_large() -> None:
    assert survival([3, 0, 1, 1]) == ([0, 1, 3], [1.0, 0.75, 0.25])
    assert survival([]) == ([], [])
    lengths, shares = survival(range(100_000))
    assert len(lengths) <= 2001
    assert shares == [1 - length / 100_000 for length in lengths]


def shared_prefixes(path: Path) -> Path:
    """Ten prompts behind one system prompt of 20 words, five behind another, five of their own; 24 words each."""
    systems = [" ".join(f"{name}{i}" for i in range(20)) for name in ("first", "second")]
    asked = [f"{systems[n >= 10]} question {n} ends here" for n in range(15)]
    alone = [" ".join(f"own{n}-{i}" for i in range(24)) for n in range(5)]
    return written(path, *({"prompt": prompt} for prompt in [*asked, *alone]))


def test_the_figures_of_a_file_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = shared_prefixes(tmp_path / "x.jsonl"), tmp_path / "out" / "result.json"
    words = ["prefixes", str(path), "--unit", "words"]
    assert main([*words, "--min-visits", "3", "--min-length", "16", "--output-json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["unit"], result["prompts"], result["total_length"]) == ("words", 20, 480)
    assert (result["shared_prefixes"], result["prompt_share"]) == (2, 0.75)
    assert result["ideal_hit_rate"] == pytest.approx((9 + 4) * 21 / 480)
    assert result["shared_share"] == result["covered_share"] == pytest.approx(15 * 21 / 480)
    assert result["prefix_length"] == {"min": 21, "mean": 21, "p10": 21, "p50": 21, "p90": 21, "p99": 21, "max": 21}
    assert [(top["visits"], top["length"], top["share"]) for top in result["top"]] == [(10, 21, 0.5), (5, 21, 0.25)]
    assert result["top"][0]["text"].startswith("first0 first1 ")
    printed = capsys.readouterr().out
    assert "Prompts behind one (% of prompts):      75.00" in printed
    assert "first0 first1" in printed
    assert main([*words, "--min-visits", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_share"] == 0.5
    assert main([*words, "--min-length", "21", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shared_prefixes"] == 0
    assert main(["prefixes", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unit"] == "chars"


def test_a_tokenizer_counts_tokens_and_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shared_prefixes(tmp_path / "x.jsonl")
    assert main(["prefixes", str(path), "--model", str(DEMO_MODEL), "--block-size", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["unit"], result["block_size"]) == ("tokens", 8)
    assert result["total_length"] > 480
    assert 0 < result["ideal_hit_rate_in_blocks"] < result["ideal_hit_rate"] < 1
    assert result["top"][0]["text"].startswith("first0 first1")


def test_a_trace_of_block_hashes_has_its_hit_rate_in_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "trace", *({"hash_ids": [0, 1, 10 * n]} for n in range(2, 6)))
    assert main(["prefixes", str(path), "--min-length", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["unit"], result["ideal_hit_rate"], result["prompt_share"]) == ("blocks", 6 / 12, 1.0)


def test_what_was_forgotten_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefixes", str(shared_prefixes(tmp_path / "x")), "--max-stored", "100"]) == 0
    assert "lower bounds: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plot.png", "deep/plot.svg"])
def test_a_plot_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["prefixes", str(shared_prefixes(tmp_path / "x")), "--plot", str(tmp_path / name)]) == 0
    assert (tmp_path / name).stat().st_size > 5000


def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, empty = str(shared_prefixes(tmp_path / "x")), tmp_path / "empty"
    empty.write_text("\n")
    for flags, said in (
        ([str(empty)], "no prompt"),
        ([path, "--unit", "blocks"], "--unit blocks"),
        ([path, "--unit", "tokens"], "name a tokenizer"),
        ([path, "--tokenizer", str(tmp_path)], "config.json"),
        ([path, "--plot", "x.txt"], "must end in .png"),
    ):
        assert main(["prefixes", *flags]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["prefixes", path, "--plot", str(tmp_path / "x.png")]) == 1
    assert "pip install 'baton-serve[plot]'" in capsys.readouterr().err
