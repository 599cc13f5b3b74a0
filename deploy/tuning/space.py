"""What is tried: settings and the values that each may take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

Settings = Mapping[str, str]
"""Option of `baton up`, or SERVICE.KEY → value as it is typed."""


PD_RATIO = "pd_ratio"
"""What is tried under this name is no option: the share of prefill to decode engines, of a fixed number of engines."""
MIXED = "mixed"
"""Its value for engines that do both."""


class SpaceError(ValueError):
    """What is to be tried makes no sense. The text names the setting and the value."""


class SearchSpace:
    """Owns the values of each setting, in their order. Raises SpaceError where there are none."""

    def __init__(self, values: Mapping[str, Sequence[str]]) -> None:
        self.values = {name: tuple(dict.fromkeys(each)) for name, each in values.items()}
        if empty := [name for name, each in self.values.items() if not each]:
            raise SpaceError(f"{empty[0]}: at least one value is needed")

    @property
    def size(self) -> int:
        """How many combinations there are."""
        return prod(len(each) for each in self.values.values())

    def combinations(self) -> Iterator[dict[str, str]]:
        """Yields all of them."""
        return (dict(zip(self.values, each, strict=True)) for each in product(*self.values.values()))


def parse_search(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`["max_batch_tokens=512,1024", "scheduler.run_ahead=1,2"]`, values by setting. Commas within a JSON object do
    not part values: `speculative={"method": "ngram", "num_speculative_tokens": 2},{…}`. Raises SpaceError."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        several = tuple(filter(None, (each.strip() for each in _apart(values))))
        if not equals or not name or not several:
            raise SpaceError(f"{text!r}: SETTING=VALUE,VALUE is expected")
        if name in found:
            raise SpaceError(f"{name}: given twice")
        found[name] = several
    return found


def _apart(text: str) -> Iterator[str]:
    """What lies between commas that stand in no braces and no brackets."""
    depth = begin = 0
    for at, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]


class PoolSizes(NamedTuple):
    """How many engines of each role there are."""

    mixed: int
    prefill: int
    decode: int

    @property
    def flags(self) -> list[str]:
        """Of `baton up`."""
        if not self.prefill:
            return [f"--engines={self.mixed}"]
        return [f"--prefill={self.prefill}", f"--decode={self.decode}"]


def pools_at(ratio: str, engines: int) -> PoolSizes:
    """`"1:3"` of 8 engines is 2 that prefill and 6 that decode; `"mixed"` is 8 that do both. What does not divide is
    rounded, and no pool is empty. Raises SpaceError for anything else, or too few engines."""
    if ratio == MIXED:
        return PoolSizes(engines, 0, 0)
    prefill, colon, decode = ratio.partition(":")
    if not (colon and prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise SpaceError(f"{PD_RATIO}={ratio}: {MIXED}, or P:D as in 1:3, is expected")
    if engines < 2:
        raise SpaceError(f"{PD_RATIO}={ratio}: two pools need two engines, there is {engines}")
    share = int(prefill) / (int(prefill) + int(decode))
    first = max(1, min(engines - 1, round(engines * share)))
    return PoolSizes(0, first, engines - first)


def default_space(devices: int) -> dict[str, tuple[str, ...]]:
    """What is tried unless the user says otherwise, on so many devices in all."""
    space: dict[str, tuple[str, ...]] = {
        "max_num_seqs": ("32", "64", "128", "256", "512"),
        "max_batch_tokens": ("512", "1024", "2048", "4096", "8192"),
    }
    sizes = tuple(str(size) for size in (1, 2, 4, 8) if devices % size == 0)
    return space | ({"tp": sizes} if len(sizes) > 1 else {})
