"""Kinds that need more than the last question: copying, system prompts, facts from earlier turns, several turns."""

from collections.abc import Callable, Sequence
from random import Random

from tests.demo_training.examples import Draw, Exchange, Turn, draw_for_training, exchange
from tests.demo_training.texts import arithmetic, capitals, letters, records, talk
from tests.demo_training.texts.wording import ANIMALS, COLOURS, JOBS, THINGS, carelessly, city, invented_word, person

REPEATING = (
    "Repeat after me: {}",
    "Repeat this: {}",
    "Say: {}",
    "Copy this text: {}",
    "Write exactly this: {}",
    "Echo: {}",
)
BRIEF = (
    "Answer in one word.",
    "Be brief.",
    "Answer as briefly as you can.",
    "Give only the answer, no sentence.",
    "You are a terse assistant. Give only the answer.",
    "Keep it short. No sentences.",
    "Reply with the bare answer.",
)
NAMED = (
    "Your name is {}.",
    "You are {}.",
    "You are an assistant called {}.",
    "You are a {job} named {}.",
    "Your name is {} and you are a {job}.",
)
ASKING_NAME = (
    "What is your name?",
    "Who are you?",
    "What are you called?",
    "Tell me your name.",
    "What should I call you?",
)
SINGLE_TURNS: tuple[Draw, ...] = (
    capitals.draw,
    capitals.draw,
    arithmetic.draw,
    arithmetic.draw_table,
    letters.draw_spelling,
    letters.draw_counting,
    records.draw,
    talk.draw,
)
NEUTRAL_SYSTEM = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are Baton's demo model.",
    "Be helpful.",
    "Answer politely.",
    "You are a careful and honest assistant. Answer the user's questions.",
    "Help the user.",
    "You answer questions.",
)


def neutral_system(rng: Random) -> str | None:
    """A system prompt that changes no answer; most conversations have none."""
    if rng.random() < 0.75:
        return None
    if rng.random() < 0.7:
        return rng.choice(NEUTRAL_SYSTEM)
    return (
        f"You are a {rng.choice(('good', 'calm', 'quick', 'wise', 'cheerful'))} assistant for every {rng.choice(JOBS)}."
    )


def copy(rng: Random) -> Exchange:
    """Repeat a text word for word. Held out: the text."""
    pool: tuple[Callable[[], str], ...] = (
        lambda: rng.choice(THINGS),
        lambda: rng.choice(COLOURS),
        lambda: invented_word(rng),
        lambda: person(rng),
        lambda: rng.choice(("the", "a", "and", "is", "on", "not", "with")),
        lambda: str(rng.randrange(1000)),
    )
    text = " ".join(rng.choice(pool)() for _ in range(rng.randrange(1, 7)))
    text = text[0].upper() + text[1:] + rng.choice(("", ".", "!"))
    return exchange("copying", text, rng.choice(REPEATING).format(text), text)


def brief(rng: Random) -> Exchange:
    """The bare answer, because the system prompt asks for it. Held out: prompt × question."""
    system = rng.choice(BRIEF)
    if rng.random() < 0.5:
        country = rng.choice(capitals.COUNTRIES)
        question, answer = rng.choice(capitals.ASKING_CAPITAL).format(country), capitals.CAPITALS[country]
    elif rng.random() < 0.6:
        question, answer = sum_and_result(rng)
    else:
        a, b = rng.randrange(13), rng.randrange(13)
        question, answer = rng.choice(arithmetic.MULTIPLYING).format(a=a, b=b), str(a * b)
    return exchange("system prompt", f"{system} {question}", question, answer, system)


def sum_and_result(rng: Random) -> tuple[str, str]:
    """A sum or a difference as it is asked for, and the number alone."""
    while True:
        full = draw_for_training(rng.choice((arithmetic.add, arithmetic.subtract)), rng)
        assert isinstance(full, Exchange)
        question, stated = full.turns[0].question, full.turns[0].answer
        if ". " not in stated:
            return question, stated.removesuffix(".").split(" = ")[1]


def bare_sum(rng: Random) -> Exchange:
    """`brief`, and a sum in any case: it must be done in the head, which takes practice. Held out as there."""
    system = rng.choice(BRIEF)
    question, answer = sum_and_result(rng)
    return exchange("system prompt", f"{system} {question}", question, answer, system)


def named(rng: Random) -> Exchange:
    """The name that the system prompt gives. Held out: the system prompt."""
    name = person(rng)
    system = rng.choice(NAMED).format(name, job=rng.choice(JOBS))
    question = carelessly(rng, rng.choice(ASKING_NAME))
    return exchange("system prompt", system, question, f"My name is {name}.", system)


FACTS = (
    ("My name is {}.", "Nice to meet you, {}!", "What is my name?", "Your name is {}."),
    ("I am called {}.", "Nice to meet you, {}!", "What am I called?", "Your name is {}."),
    ("I live in {}.", "{} is a nice place to live.", "Where do I live?", "You live in {}."),
    ("I come from {}.", "{} is a nice place to live.", "Where do I come from?", "You come from {}."),
    ("My favourite colour is {}.", "I like {}, too.", "What is my favourite colour?", "Your favourite colour is {}."),
    ("I have a {}.", "A {} is a good friend.", "Which animal do I have?", "You have a {}."),
    ("I am a {}.", "It must be interesting to be a {}.", "What is my job?", "You are a {}."),
)


def remember(rng: Random) -> Exchange:
    """A fact told first, other turns in between, the fact asked for last. Held out: fact and turns between."""
    told, received, asked, answer = FACTS[index := rng.randrange(len(FACTS))]
    words = (
        person,
        person,
        city,
        city,
        lambda r: r.choice(COLOURS),
        lambda r: r.choice(ANIMALS),
        lambda r: r.choice(JOBS),
    )
    word = words[index](rng)
    between = filler(rng, rng.choice((0, 1, 1, 2)))
    prefix = rng.choice(("", "", "Hello! ", "Hi! ", "Please remember this: "))
    turns = (
        Turn(prefix + told.format(word), received.format(word)),
        *between,
        Turn(carelessly(rng, asked), answer.format(word)),
    )
    return Exchange("memory", f"memory|{told} {word} {between}", turns)


def follow_up(rng: Random) -> Exchange:
    """ "And of Spain?" after a capital. Held out: the pair of countries."""
    first, second = rng.sample(capitals.COUNTRIES, 2)
    opening = rng.choice(capitals.ASKING_CAPITAL).format(first)
    asked = rng.choice(("And of {}?", "What about {}?", "And {}?", "And the capital of {}?")).format(second)
    turns = (Turn(opening, capitals.full_answer(first)), Turn(asked, capitals.full_answer(second)))
    return Exchange("memory", f"memory|{first} {second}", turns)


def say_again(rng: Random) -> Exchange:
    """Repeat the last answer. Held out: the answer."""
    turn = filler(rng, 1)[0]
    asked = rng.choice(("Say that again.", "Can you repeat that?", "Please repeat your answer.", "Once more, please."))
    return Exchange("memory", f"memory|{turn}", (turn, Turn(asked, turn.answer)))


def filler(rng: Random, count: int) -> Sequence[Turn]:
    """Turns of other kinds, as training may see them."""
    examples = (draw_for_training(rng.choice(SINGLE_TURNS), rng) for _ in range(count))
    return [example.turns[-1] for example in examples if isinstance(example, Exchange)]


def draw_memory(rng: Random) -> Exchange:
    """A question whose answer stands in an earlier turn."""
    return rng.choices((remember, follow_up, say_again), (4, 3, 1))[0](rng)


def draw_system(rng: Random) -> Exchange:
    """A question whose answer the system prompt shapes."""
    return rng.choices((brief, named), (6, 4))[0](rng)


def draw_several(rng: Random) -> Exchange:
    """Unrelated turns, mostly two to four, at times a long chat; the last is judged and held out by its own key."""
    earlier = filler(rng, rng.randrange(1, 4) if rng.random() < 0.92 else rng.randrange(6, 30))
    last = rng.choice(SINGLE_TURNS)(rng)
    assert isinstance(last, Exchange)
    return Exchange("multi-turn", last.key, (*earlier, *last.turns))
