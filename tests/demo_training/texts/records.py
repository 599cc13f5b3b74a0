"""Sentences turned into JSON objects. Held out: the combination of facts, in every wording."""

import json
from random import Random

from tests.demo_training.examples import Exchange, exchange
from tests.demo_training.texts.wording import ANIMALS, COLOURS, JOBS, THINGS, city, person, with_article

REQUESTS = (
    "Turn this sentence into JSON: {}",
    "Turn this sentence into a JSON object: {}",
    "Write this as JSON: {}",
    "Convert to JSON: {}",
    "{} Write that as a JSON object.",
    "Extract the facts as JSON: {}",
    "Make a JSON object from this: {}",
    "JSON, please: {}",
)
SENTENCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
    ("{name} lives in {city} and is {age} years old.", ("name", "age", "city")),
    ("{name}, aged {age}, lives in {city}.", ("name", "age", "city")),
    ("My name is {name}, I am {age} and I live in {city}.", ("name", "age", "city")),
    ("{name} is {age} years old.", ("name", "age")),
    ("{name} lives in {city}.", ("name", "city")),
    ("{name} is {a_job} from {city}.", ("name", "job", "city")),
    ("{name} is {a_job} in {city} and is {age} years old.", ("name", "job", "city", "age")),
    ("{name} works in {city} as {a_job}.", ("name", "job", "city")),
    ("{name} has {a_animal} called {pet}.", ("name", "animal", "pet")),
    ("{name} bought {count} {item}s for {price} dollars.", ("name", "item", "count", "price")),
    ("The {colour} {item} costs {price} dollars.", ("item", "colour", "price")),
)


def facts(rng: Random) -> dict[str, str | int]:
    """One value for every field that a sentence may mention."""
    return {
        "name": person(rng),
        "age": rng.randrange(5, 99),
        "city": city(rng),
        "job": rng.choice(JOBS),
        "animal": rng.choice(ANIMALS),
        "pet": person(rng),
        "item": rng.choice(THINGS),
        "count": rng.randrange(2, 60),
        "price": rng.randrange(2, 99),
        "colour": rng.choice(COLOURS),
    }


def draw(rng: Random) -> Exchange:
    """A sentence to be written as a JSON object whose keys follow the sentence's pattern."""
    sentence, fields = rng.choice(SENTENCES)
    values = facts(rng)
    articles = {f"a_{field}": with_article(str(values[field])) for field in ("job", "animal")}
    record = {field: values[field] for field in fields}
    question = rng.choice(REQUESTS).format(sentence.format(**values, **articles))
    answer = json.dumps(record, ensure_ascii=False)
    return exchange("json", answer, question, answer)
