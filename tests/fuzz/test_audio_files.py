"""Files of sounds, spoilt: each is decoded or refused, within its time and memory; the process may die of one."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

from services.gateway.audio.audio_process import MAX_MEMORY, AudioRefusal, DecodedAll, DecodedWindow, decode_audio
from tests.fuzz.mutations import spoilt_bytes
from tests.support.models.sounds import encoded, sweep, wav

SHARE, FULL = 120, 10_000
FILES_OF_A_PROCESS = 100
SECONDS_OF_A_FILE = 20
MEMORY = 2 * MAX_MEMORY
"""Of the real process, beside what the test has itself."""
KINDS = (("flac", "flac", 16_000), ("mp3", "libmp3lame", 44_100), ("webm", "libopus", 48_000), ("ipod", "aac", 44_100))


def valid_files() -> list[bytes]:
    sound = sweep(0, 0.6)
    return [wav(sound), *(encoded(sound, *kind) for kind in KINDS)]


def spoilt(files: list[bytes], rng: random.Random) -> bytes:
    file = rng.choice(files)
    match rng.randrange(8):
        case 0:
            return rng.randbytes(rng.randrange(4000))
        case 1:
            return file[: rng.randrange(len(file))]
        case 2:
            return file[: rng.randrange(200)] + rng.choice(files)[rng.randrange(200) :]
        case _:
            for _ in range(rng.choice((1, 1, 3, 30))):
                file = spoilt_bytes(file, rng)
            return file


def outcomes(files: list[bytes], outcome: Callable[[bytes], str], memory: int) -> Counter[str]:
    """What came of each, decoded by processes that may take so much memory."""
    found: Counter[str] = Counter()
    while files:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.close(read)
            _decode_each(files[:FILES_OF_A_PROCESS], outcome, memory, write)
        os.close(write)
        with open(read, "rb") as pipe:
            words = pipe.read().decode().split()
        _, status = os.waitpid(child, 0)
        found.update(words)
        files = files[max(1, len(words)) :] if os.WIFSIGNALED(status) else files[FILES_OF_A_PROCESS:]
        if os.WIFSIGNALED(status):
            found[f"died of {signal.Signals(os.WTERMSIG(status)).name}"] += 1
            files = files[1:]
        else:
            assert len(words) <= FILES_OF_A_PROCESS
    return found


def _decode_each(files: list[bytes], outcome: Callable[[bytes], str], memory: int, to: int) -> None:
    """In a process of its own, which it ends. It begins with all that other tests have left in the one that it was
    forked from, and may have `memory` beside that."""
    limit = psutil.Process().memory_info().vms + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for file in files:
        signal.alarm(SECONDS_OF_A_FILE)
        os.write(to, f"{outcome(file)} ".encode())
    os._exit(0)


def heard(file: bytes) -> str:
    """One word for what came of it."""
    replies = list(decode_audio(file, 16_000, 2, 60))
    ended = isinstance(replies[-1], DecodedAll | AudioRefusal)
    windows = all(isinstance(each, DecodedWindow) and 0 < len(each.samples) <= 128_000 for each in replies[:-1])
    return type(replies[-1]).__name__ if ended and windows else "wrong"


def check(found: Counter[str], count: int) -> None:
    print(dict(found))
    assert found.total() == count
    assert found["wrong"] == found["died of SIGALRM"] == 0
    assert found["DecodedAll"] > count / 10 < found["AudioRefusal"]


def test_spoilt_files_are_decoded_or_refused() -> None:
    files, rng = valid_files(), random.Random(1)
    check(outcomes([spoilt(files, rng) for _ in range(SHARE)], heard, MEMORY), SHARE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_spoilt_files_are_decoded_or_refused() -> None:
    files, rng = valid_files(), random.Random(2)
    check(outcomes([spoilt(files, rng) for _ in range(FULL)], heard, MEMORY), FULL)
