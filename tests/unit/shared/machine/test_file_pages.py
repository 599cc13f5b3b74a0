"""Code that ran once leaves a process's memory, and what was written into a mapped file's pages does not."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from shared.machine.file_pages import untouched_mappings


def test_only_what_is_still_as_the_file_has_it_is_let_go() -> None:
    mappings = {
        "1000-2000 r-xp 00000000 fe:00 77 /lib/code.so": 0,
        "2000-3000 r--p 00001000 fe:00 77 /lib/relocated.so": 4,
        "3000-4000 rw-p 00002000 fe:00 77 /lib/data.so": 0,
        "4000-5000 r--s 00000000 fe:00 78 /shared": 0,
        "5000-6000 r--p 00000000 00:00 0 [vvar]": 0,
        "6000-8000 r--p 00000000 fe:00 77 /lib/constants.so": 0,
    }
    lines = [line for each, own in mappings.items() for line in (each, "Rss: 4 kB", f"Anonymous:        {own} kB")]
    assert list(untouched_mappings(lines)) == [(0x1000, 0x2000), (0x6000, 0x8000)]


PROGRAM = """
import decimal, json, re, ssl, sqlite3
from pathlib import Path
from shared.machine.file_pages import release_file_pages

def file_kb():
    return int(re.search(r"RssFile:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before = file_kb()
release_file_pages()
after = file_kb()
assert json.loads(json.dumps({"a": [1.5]})) == {"a": [1.5]} and decimal.Decimal(2).sqrt() > 1
ssl.create_default_context(), sqlite3.connect(":memory:").execute("select 1")
print(before, after)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_without_these_pages_is_smaller_and_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = map(int, re.findall(r"\d+", done.stdout))
    assert after < before / 2
