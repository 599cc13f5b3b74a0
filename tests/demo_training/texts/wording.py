"""Words shared by several generators, and the ways in which people vary a question."""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def words(text: str, separator: str | None = None) -> tuple[str, ...]:
    """A word list that can be read and written as text."""
    return tuple(text.split(separator))


NAMES = words(
    "Maria Tom Anna Peter Lena Omar Mia Jonas Sofia Ben Clara Hugo Nina Paul Rosa Sam Eva Leo Ines Max Julia Adam "
    "Lucy David Emma Felix Grace Henry Iris Jack Kate Liam Nora Oscar Paula Ravi Sara Theo Vera Will Yuki Zoe Amir "
    "Bella Carlos Diana Elias Fatima George Hanna Ivan Jade Karim Laura Marco Nadia Otto Priya Robin Stella"
)
CITIES = words(
    "Lisbon Paris Berlin Madrid Rome Vienna Oslo Tokyo Cairo Lima Dublin Prague Athens Nairobi Boston Chicago "
    "Sydney Toronto Mumbai Seoul Kyoto Milan Hamburg Porto Geneva Bergen Austin Denver Leeds Lyon Naples Seville "
    "Zurich Utrecht"
)
COLOURS = words("red blue green yellow black white orange purple pink brown grey silver golden")
ANIMALS = words("dog cat rabbit horse parrot turtle hamster goat fish pony duck mouse")
JOBS = words(
    "teacher nurse baker pilot farmer painter doctor sailor writer cook driver engineer gardener lawyer singer tailor "
    "carpenter chemist dentist judge"
)
THINGS = words(
    "apple book cake chair clock coat cup desk door flower garden guitar hat house key lamp letter map mirror moon "
    "pencil piano picture plate pumpkin ring river school shoe spoon star stone table train tree umbrella violin wall "
    "water window winter summer forest bridge mountain island castle candle basket blanket bottle butter button "
    "camera carrot cheese cherry circle cloud coffee corner cotton danger dinner dragon engine family father finger "
    "friend glass grass hammer honey hotel jacket kitchen ladder lemon library market melon mother "
    "music needle number ocean office onion paper pepper planet pocket potato prince princess puzzle queen rainbow "
    "ribbon rocket salad salt shadow silver sister snow soup spider spring square storm story strawberry street sugar "
    "ticket tiger tomato travel valley village wheel whistle window wizard world yellow zebra"
)

ONSETS = words("b c d f g h j k l m n p r s t v w z br ch cl dr fl gr pl sh st th tr")
VOWELS = words("a e i o u a e i o ai ee oo ou")
CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "nd", "ck", "x"]


def invented_word(rng: Random) -> str:
    """A pronounceable word of two or three syllables that no list holds: it must be copied or spelled by its pieces."""
    syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.choice((2, 2, 2, 3))))
    return "".join(syllables)


def person(rng: Random) -> str:
    """A first name; one in four is invented."""
    return rng.choice(NAMES) if rng.random() < 0.75 else invented_word(rng).capitalize()


def city(rng: Random) -> str:
    """A city; one in eight is invented."""
    return rng.choice(CITIES) if rng.random() < 0.88 else invented_word(rng).capitalize()


def with_article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def favouring(rng: Random, options: Sequence[T], favourite: int) -> T:
    """One of the options, mostly the favourite: text of coin tosses would leave a greedy reader no clear choice."""
    if rng.random() < 0.6:
        return options[favourite % len(options)]
    return rng.choice(options)


def carelessly(rng: Random, question: str) -> str:
    """The question as it is, or as people type it: lower case, no full stop, a "please"."""
    style = rng.random()
    if style < 0.76:
        return question
    if style < 0.82:
        return question.rstrip("?.!")
    if style < 0.92:
        return question.rstrip("?.!").lower()
    return f"{question} Please." if question.endswith("?") else f"{question.rstrip('.')}, please."
