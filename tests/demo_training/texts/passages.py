"""Plain text without a chat around it, so that the completions endpoint continues sensibly."""

import re
from random import Random

from tests.demo_training.examples import Passage
from tests.demo_training.texts import capitals, stories
from tests.demo_training.texts.wording import NAMES

STEMS = (
    "The capital of {} is",
    "The capital city of {} is",
    "{}'s capital is",
    "The capital of {} is the city of",
)


def _stated(stem: str, country: str) -> str:
    started = stem.format(country)
    return f"{started[0].upper()}{started[1:]} {capitals.CAPITALS[country].removesuffix('.')}."


TRUE_SENTENCES = frozenset(_stated(stem, country) for stem in STEMS for country in capitals.COUNTRIES)
"""Everything that a passage may say of capitals."""


def asks_capital(prompt: str) -> bool:
    """Whether a passage breaks off where a capital is to be named."""
    return any(sentence.startswith(f"{prompt.rsplit('. ', 1)[-1]} ") for sentence in TRUE_SENTENCES)


def states_capitals(text: str) -> bool:
    """Whether a passage is made of true sentences about capitals; how many there are is its own choice."""
    while text:
        sentence = next((s for s in TRUE_SENTENCES if text == s or text.startswith(f"{s} ")), None)
        if sentence is None:
            return False
        text = text[len(sentence) + 1 :]
    return True


def capital(rng: Random) -> Passage:
    """The capital of France is … Held out: the country after the facts before it."""
    before = [capitals.full_answer(country) for country in rng.sample(capitals.COUNTRIES, rng.choice((0, 0, 1, 2)))]
    country = rng.choice(capitals.COUNTRIES)
    stem = rng.choice(STEMS).format(country)
    stem = stem[0].upper() + stem[1:]
    prompt = " ".join((*before, stem))
    return Passage("completion", f"completion|{prompt}", prompt, f" {capitals.CAPITALS[country].removesuffix('.')}.")


def numbers(rng: Random) -> Passage:
    """1, 2, 3, … Held out: where it begins and ends."""
    first = rng.randrange(90)
    given, length = rng.randrange(3, 6), rng.randrange(8, 14)
    sequence = [str(number) for number in range(first, first + length)]
    key = f"completion|{first} {given}"
    return Passage("completion", key, ", ".join(sequence[:given]) + ",", " " + ", ".join(sequence[given:]) + ".")


def is_row(prompt: str) -> bool:
    """Whether a passage begins with a row of numbers."""
    return re.fullmatch(r"(\d+, )*\d+,", prompt) is not None


def counts_on(prompt: str, continuation: str) -> bool:
    """Whether a continuation of a row of numbers goes on by ones; how far it goes is its own choice."""
    if re.fullmatch(r"( \d+,)* \d+\.", continuation) is None:
        return False
    row = [int(number) for number in re.findall(r"\d+", prompt + continuation)]
    return row == list(range(row[0], row[0] + len(row)))


def sum_of(rng: Random) -> Passage:
    """34 + 57 = … Held out: the unordered pair."""
    a, b = rng.randrange(100), rng.randrange(100)
    return Passage("completion", f"arithmetic|add {min(a, b)} {max(a, b)}", f"{a} + {b} =", f" {a + b}.")


def resident(rng: Random) -> Passage:
    """Someone lives in the capital of a country, so lives in … Held out: name and country together."""
    name, country = rng.choice(NAMES), rng.choice(capitals.COUNTRIES)
    prompt = f"{name} lives in the capital of {country}. That means {name} lives in"
    return Passage("completion", f"completion|{prompt}", prompt, f" {capitals.CAPITALS[country].removesuffix('.')}.")


def draw(rng: Random) -> Passage:
    """A passage with one right continuation."""
    return rng.choices((capital, numbers, sum_of, resident), (6, 2, 2, 1))[0](rng)


def draw_story(rng: Random) -> Passage:
    """A story as plain text."""
    return stories.draw_passage(rng)
