"""Sums and differences below a hundred, times tables, and the small questions about numbers around them."""

from random import Random

from tests.demo_training.examples import Exchange, exchange
from tests.demo_training.texts.wording import NAMES, carelessly, words

ADDING = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "{a}+{b}=?",
)
SUBTRACTING = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "{a}-{b}=?",
)
MULTIPLYING = (
    "What is {a} times {b}?",
    "What is {a} * {b}?",
    "What is {a} x {b}?",
    "Multiply {a} by {b}.",
    "Calculate {a} * {b}.",
    "{a} * {b}",
    "{a}*{b}=?",
)
DIVIDING = ("What is {a} / {b}?", "What is {a} divided by {b}?", "Divide {a} by {b}.", "Calculate {a} / {b}.")
GOODS = words("apples books coins stamps marbles pencils shells cards eggs stones")


def _operand(rng: Random) -> int:
    """Small numbers more often than their share, because people try those first."""
    return rng.randrange(10) if rng.random() < 0.2 else rng.randrange(100)


def add(rng: Random) -> Exchange:
    """a + b below 200. Held out: the unordered pair, in every wording."""
    a, b = _operand(rng), _operand(rng)
    key = f"add {min(a, b)} {max(a, b)}"
    if rng.random() < 0.12:
        name, goods = rng.choice(NAMES), rng.choice(GOODS)
        question = f"{name} has {a} {goods} and gets {b} more. How many {goods} does {name} have now?"
        return exchange("arithmetic", key, question, f"{a} + {b} = {a + b}. {name} has {a + b} {goods} now.")
    question = carelessly(rng, rng.choice(ADDING).format(a=a, b=b))
    return exchange("arithmetic", key, question, f"{a} + {b} = {a + b}.")


def subtract(rng: Random) -> Exchange:
    """a - b, never below zero. Held out: the pair."""
    b, a = sorted((_operand(rng), _operand(rng)))
    key = f"subtract {a} {b}"
    if rng.random() < 0.12:
        name, goods = rng.choice(NAMES), rng.choice(GOODS)
        question = f"{name} has {a} {goods} and gives away {b}. How many {goods} are left?"
        return exchange("arithmetic", key, question, f"{a} - {b} = {a - b}. There are {a - b} {goods} left.")
    question = carelessly(rng, rng.choice(SUBTRACTING).format(a=a, b=b))
    return exchange("arithmetic", key, question, f"{a} - {b} = {a - b}.")


def compare(rng: Random) -> Exchange:
    """Which of two numbers is larger or smaller. Held out: the unordered pair."""
    a, b = rng.sample(range(100), 2)
    word = rng.choice(("larger", "smaller"))
    wording = rng.choice(("Which number is {w}, {a} or {b}?", "What is {w}: {a} or {b}?"))
    winner, loser = (max(a, b), min(a, b)) if word == "larger" else (min(a, b), max(a, b))
    question = wording.format(w=word, a=a, b=b)
    return exchange("arithmetic", f"compare {min(a, b)} {max(a, b)}", question, f"{winner} is {word} than {loser}.")


def multiply(rng: Random) -> Exchange:
    """The tables up to twelve. A table is learnt by heart: held out are wording × pair, not the pair."""
    a, b = rng.randrange(13), rng.randrange(13)
    question = carelessly(rng, rng.choice(MULTIPLYING).format(a=a, b=b))
    return exchange("times tables", question, question, f"{a} * {b} = {a * b}.")


def divide(rng: Random) -> Exchange:
    """The tables read backwards; every division comes out even. Held out: wording × pair."""
    b, quotient = rng.randrange(1, 11), rng.randrange(11)
    question = carelessly(rng, rng.choice(DIVIDING).format(a=b * quotient, b=b))
    return exchange("times tables", question, question, f"{b * quotient} / {b} = {quotient}.")


def draw(rng: Random) -> Exchange:
    """A question of arithmetic below a hundred."""
    return rng.choices((add, subtract, compare), (5, 5, 1))[0](rng)


def draw_table(rng: Random) -> Exchange:
    """A question of the times tables."""
    return rng.choices((multiply, divide), (7, 3))[0](rng)
