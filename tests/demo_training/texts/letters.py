"""Spelling: words letter by letter, the number of letters, first and last letters. Counting: up, down and in steps."""

from random import Random

from tests.demo_training.examples import Exchange, exchange
from tests.demo_training.texts.wording import NAMES, THINGS, carelessly, invented_word

SPELLING = (
    "Spell {}.",
    "Spell the word {}.",
    "How do you spell {}?",
    "Can you spell {}?",
    "Spell {} with dashes.",
    "Write {} letter by letter.",
)
NUMBER_OF_LETTERS = (
    "How many letters are in {}?",
    "How many letters does {} have?",
    "Count the letters in {}.",
    "How many letters are in the word {}?",
)
OCCURRENCES = ("How many times does the letter {letter} appear in {word}?", "How many {letter}'s are in {word}?")
EDGES = ("What is the {edge} letter of {word}?", "What is the {edge} letter in {word}?")
NEIGHBOURS = {"after": 1, "before": -1}


def _word(rng: Random) -> tuple[str, str]:
    """A word and what must be held out of it: an invented word itself, a listed word per wording (an empty string)."""
    if rng.random() < 0.5:
        word = invented_word(rng)
        return word, word
    return (rng.choice(THINGS) if rng.random() < 0.85 else rng.choice(NAMES)), ""


def _quoted(rng: Random, word: str) -> str:
    return rng.choice((word, word, f'"{word}"', f"'{word}'"))


def spell(rng: Random) -> Exchange:
    """g-a-r-d-e-n. Held out: the invented word, or the wording × word of a listed one."""
    word, key = _word(rng)
    question = carelessly(rng, rng.choice(SPELLING).format(_quoted(rng, word)))
    return exchange("spelling", key or question, question, "-".join(word.lower()))


def count_letters(rng: Random) -> Exchange:
    """Spelled first, counted then: a small model counts what it has written."""
    word, key = _word(rng)
    question = carelessly(rng, rng.choice(NUMBER_OF_LETTERS).format(_quoted(rng, word)))
    return exchange("spelling", key or question, question, f"{'-'.join(word.lower())}: {len(word)} letters")


def count_occurrences(rng: Random) -> Exchange:
    """How often a letter appears in a word."""
    word, key = _word(rng)
    letter = rng.choice(word.lower()) if rng.random() < 0.85 else rng.choice("abcdefghiklmnoprstu")
    question = rng.choice(OCCURRENCES).format(letter=letter, word=_quoted(rng, word))
    return exchange("spelling", key or question, question, f"{'-'.join(word.lower())}: {word.lower().count(letter)}")


def edge_letter(rng: Random) -> Exchange:
    """The first or the last letter."""
    word, key = _word(rng)
    edge = rng.choice(("first", "last"))
    question = rng.choice(EDGES).format(edge=edge, word=_quoted(rng, word))
    letter = word.lower()[0 if edge == "first" else -1]
    return exchange("spelling", key or question, question, f"{'-'.join(word.lower())}: {letter}")


def _row(numbers: range) -> str:
    """The numbers, and a full stop. As questions end with the last number and a full stop, too, to end the row is to
    copy what follows that number there: a small model learns to copy long before it learns to compare."""
    return ", ".join(map(str, numbers)) + "."


def count(rng: Random) -> Exchange:
    """Count from a to b, up or down. Held out: the pair."""
    a = rng.randrange(100)
    b = min(100, a + rng.randrange(2, 13))
    up = rng.random() < 0.65
    wording = (
        ("Count from {} to {}.", "Count up from {} to {}.")
        if up
        else ("Count down from {} to {}.", "Count backwards from {} to {}.")
    )
    first, last, step = (a, b, 1) if up else (b, a, -1)
    question = carelessly(rng, rng.choice(wording).format(first, last))
    return exchange("counting", f"{first} {last}", question, _row(range(first, last + step, step)))


def count_in_steps(rng: Random) -> Exchange:
    """Count in steps of 2, 5 or 10. Held out: both ends and the step."""
    step = rng.choice((2, 5, 10))
    first = rng.randrange(0, 51) if step == 2 else step * rng.randrange(0, 8)
    last = first + step * rng.randrange(3, 10)
    wording = rng.choice(("Count in steps of {} from {} to {}.", "Count by {}s from {} to {}."))
    question = wording.format(step, first, last)
    return exchange("counting", f"{first} {last} {step}", question, _row(range(first, last + 1, step)))


def count_to(rng: Random) -> Exchange:
    """Count from one. Held out: the number, per wording."""
    last = rng.randrange(3, 21)
    question = carelessly(rng, rng.choice(("Count to {}.", "Count up to {}.", "Can you count to {}?")).format(last))
    return exchange("counting", question, question, _row(range(1, last + 1)))


def neighbour(rng: Random) -> Exchange:
    """The number after or before another. Held out: the number, per side."""
    side = rng.choice(("after", "before"))
    number = rng.randrange(1, 200)
    question = rng.choice(("What number comes {} {}?", "Which number is just {} {}?")).format(side, number)
    return exchange("counting", f"{side} {number}", question, f"{number + NEIGHBOURS[side]} comes {side} {number}.")


def draw_spelling(rng: Random) -> Exchange:
    """A question about the letters of a word."""
    return rng.choices((spell, count_letters, count_occurrences, edge_letter), (5, 3, 2, 1))[0](rng)


def draw_counting(rng: Random) -> Exchange:
    """A request to count."""
    return rng.choices((count, count_in_steps, count_to, neighbour), (5, 3, 1, 2))[0](rng)
