"""The console's colours can be read, and its modules are small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import services.gateway.http.console_page as page_files

FOLDER = Path(page_files.__file__).parent
MIN_CONTRAST = 4.5
"""WCAG 2.2, level AA, for text of any size."""
ON_GROUNDS = ("text", "faint", "warn", "bad", "accent")
"""Colours of text that stands on the page's ground and on what lies on it."""


def schemes() -> dict[str, dict[str, str]]:
    """The variables of the light scheme, and of the dark one."""
    light, dark = re.findall(r":root \{(.*?)\}", (FOLDER / "console.css").read_text(), re.DOTALL)
    return {name: dict(re.findall(r"--([\w-]+): (#\w+)", text)) for name, text in (("light", light), ("dark", dark))}


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    shares = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(scheme: str) -> None:
    colours = schemes()[scheme]
    pairs = [(text, ground) for text in ON_GROUNDS for ground in ("ground", "surface")]
    pairs += [(tone, f"{tone}-soft") for tone in ("good", "warn", "bad", "calm", "accent")]
    pairs += [
        ("surface", "accent"),
        ("surface", "bad"),
        ("text", "accent-soft"),
        ("text", "warn-soft"),
        ("text", "bad-soft"),
    ]
    weak = {pair: contrast(*(colours[name] for name in pair)) for pair in pairs}
    assert {pair: found for pair, found in weak.items() if found < MIN_CONTRAST} == {}


def test_modules_are_as_small_as_pythons() -> None:
    own = [file for file in FOLDER.iterdir() if file.suffix in (".js", ".css") and file.name != "preact.js"]
    assert {file.name for file in own if len(file.read_text().splitlines()) > 500} == set()
