"""A batch's lines and its output file: every line gets one entry, and what was written once is never written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.batch.files import BatchOutput, written_id
from deploy.errors import CommandError
from services.gateway.api.batches.lines import (
    BadLine,
    BatchAnswer,
    BatchRequest,
    answered_line,
    line_id,
    read_line,
    refused_line,
)


def line(**changes: Any) -> bytes:
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps({**request, **changes}).encode()


def test_a_request_keeps_its_body_as_it_stood() -> None:
    text = (
        b'{"url": "/v1/chat/completions", "custom_id": "a", "method": "POST", "body": {"n" : 1.50, "x": "\xc3\xa4"}}\n'
    )
    assert read_line(3, text) == BatchRequest(
        line_id(3, text), "a", "/v1/chat/completions", b'{"n" : 1.50, "x": "\xc3\xa4"}'
    )


@pytest.mark.parametrize(
    ("text", "custom_id", "code", "told"),
    [
        (b"{", None, "invalid_line", "line 7: "),
        (b"\xff\xfe", None, "invalid_line", "line 7: "),
        (b"[1]", None, "invalid_line", "line 7: "),
        (b'{"custom_id": "b"}', "b", "invalid_line", "method"),
        (line(custom_id=5), None, "invalid_line", "$.custom_id"),
        (line(custom_id=""), "", "invalid_request", "custom_id: it must not be empty"),
        (line(method="GET"), "a", "invalid_request", "method: 'GET' is not allowed; 'POST' is"),
        (line(url="/v1/models"), "a", "invalid_request", "url: '/v1/models' is not allowed; one of /v1/chat"),
        (line(body=[]), "a", "invalid_request", "line 7: body: "),
        (line(body={"strxam": 1}).replace(b"strxam", b"str\xa6am"), "a", "invalid_request", "line 7: body: "),
        (line(body={"stream": "x"}).replace(b'"x"', b'"\xa6"'), "a", "invalid_request", "line 7: body: "),
        (line(body={"stream": True}), "a", "invalid_request", "body.stream: true is not allowed"),
    ],
)
def test_a_bad_line_says_what_is_wrong(text: bytes, custom_id: str | None, code: str, told: str) -> None:
    bad = read_line(7, text)
    assert isinstance(bad, BadLine)
    assert (bad.custom_id, bad.code) == (custom_id, code)
    assert told in bad.message
    entry = json.loads(refused_line(bad))
    assert entry == {"id": bad.id, "custom_id": custom_id, "response": None, "error": entry["error"]}
    assert entry["error"]["code"] == code


def test_an_answer_is_in_openais_format_whatever_its_status() -> None:
    request = read_line(1, line())
    assert isinstance(request, BatchRequest)
    written = answered_line(request, BatchAnswer(400, "req-1", b'{\n "error": {"message": "no"}\n}'))
    assert written.count(b"\n") == 1
    assert json.loads(written) == {
        "id": request.id,
        "custom_id": "a",
        "response": {"status_code": 400, "request_id": "req-1", "body": {"error": {"message": "no"}}},
        "error": None,
    }
    assert written_id(written) == request.id
    broken = json.loads(answered_line(request, BatchAnswer(200, "", b"<html>")))
    assert broken["response"] is None
    assert broken["error"]["code"] == "invalid_answer"


def test_equal_lines_in_different_places_are_different_requests() -> None:
    assert len({line_id(1, line()), line_id(2, line()), line_id(1, line(url="x"))}) == 3
    assert line_id(1, line()) == line_id(1, line() + b"\r\n")


def entry(id_: str) -> bytes:
    return refused_line(BadLine(id_, None, "invalid_line", "x"))


def test_a_line_that_was_left_half_written_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out"
    whole = entry("a") + entry("b")
    for torn in (b"", b"{", entry("c")[:-1]):
        path.write_bytes(whole + torn)
        output = BatchOutput(path, {"a", "b", "c"})
        assert output.answered == {"a", "b"}
        output.write(entry("c"))
        output.close()
        assert path.read_bytes() == whole + entry("c")


def test_an_output_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for foreign in (b"my notes\n", entry("z")):
        path.write_bytes(foreign)
        with pytest.raises(CommandError, match="line 1 is no answer to a request of this input"):
            BatchOutput(path, {"a"})
        assert path.read_bytes() == foreign


def test_two_runs_never_write_one_file(tmp_path: Path) -> None:
    first = BatchOutput(tmp_path / "out", {"a"})
    with pytest.raises(CommandError, match="another baton batch is writing it"):
        BatchOutput(tmp_path / "out", {"a"})
    first.close()
    BatchOutput(tmp_path / "out", {"a"}).close()
