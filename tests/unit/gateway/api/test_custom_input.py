"""What a custom tool's input is, wherever its arguments are cut."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.api.custom_tools.custom_input import CustomInput, custom_arguments

ODD = 'a"b\\\\c\n\u00e9\U0001f600 {}'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (custom_arguments(ODD), ODD),
        (msgspec.json.encode({"input": ODD}).decode(), ODD),
        ('{"input": "\\ud83d\\ude00"}', "\U0001f600"),
        ('{"input": "\\d+\\\\d \\\'x\\\'"}', "\\d+\\d \\'x\\'"),
        ('{"input": "C:\\users \\u12\\u0041"}', "C:\\users \\u12A"),
        ('{"input": "\\ud83dx\\ude00\\ud83d"}', "\ufffdx\ufffd\ufffd"),
        ('{"other": 1}', '{"other": 1}'),
    ],
    ids=["as we write it", "as JSON is written", "a pair", "no escape of JSON's", "no code", "half pairs", "no input"],
)
def test_input_is_read_wherever_arguments_are_cut(arguments: str, text: str) -> None:
    for cut in range(len(arguments) + 1):
        custom = CustomInput()
        read = custom.feed(arguments[:cut]) + custom.feed(arguments[cut:]) + custom.rest()
        assert read == text
        read.encode()
