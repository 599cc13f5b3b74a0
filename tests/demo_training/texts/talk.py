"""Greetings, thanks, goodbyes, who the demo model is, what it says when it does not know. Held out: wordings."""

from random import Random

from tests.demo_training.examples import Exchange, exchange
from tests.demo_training.texts.capitals import COUNTRIES
from tests.demo_training.texts.wording import (
    ANIMALS,
    CITIES,
    COLOURS,
    JOBS,
    THINGS,
    carelessly,
    invented_word,
    with_article,
)

WHO = (
    "I am Baton's demo model, a small language model of about four million parameters. "
    "I was trained on generated text, so I know very little."
)
HELP = (
    "I can name the capitals of the world, do small sums, spell and count, turn a sentence into JSON, "
    "say hello in other languages and tell short stories. I am a small demo model, so please do not ask for more."
)
UNKNOWN = "I do not know. I am only Baton's small demo model. Ask me for a capital, a small sum or a story."

OPENERS = (
    "",
    "",
    "",
    "Hello! ",
    "Hi, ",
    "Hey! ",
    "Sorry, ",
    "Now ",
    "So, ",
    "OK, ",
    "Quick question: ",
    "One more thing: ",
)
CLOSERS = ("", "", "", " Please tell me.", " I am curious.", " I would like to know.", " Thanks!")
INTENTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself.",
            "Which model are you?", "What model is this?", "Who am I talking to?", "Are you a language model?",
            "Are you ChatGPT?", "Are you a human?", "How big are you?", "How many parameters do you have?",
            "Who made you?", "What is Baton's demo model?",
        ),
        WHO,
    ),
    (
        (
            "What can you do?", "Help!", "How can you help me?", "What can I ask you?", "What do you know?",
            "What are you good at?", "Can you help me?", "What should I ask?", "Give me some ideas.",
            "What is this for?",
        ),
        HELP,
    ),
)  # fmt: skip
GREETINGS = (
    "Hello",
    "Hi",
    "Hey",
    "Good morning",
    "Good evening",
    "Hi there",
    "Hello there",
    "Good day",
    "Greetings",
    "Howdy",
)
THANKS = (
    "Thank you",
    "Thanks",
    "Many thanks",
    "Thanks a lot",
    "Thank you very much",
    "Great, thanks",
    "Thank you so much",
    "Cheers",
)
GOODBYES = (
    "Goodbye",
    "Bye",
    "See you later",
    "Good night",
    "See you",
    "Bye bye",
    "Farewell",
    "See you tomorrow",
    "That is all",
)
ADDRESSES = (
    "",
    "",
    ", Baton",
    ", my friend",
    ", demo model",
    " to you",
    " again",
    ", everybody",
    ", dear model",
    ", computer",
)
ENDS = ("!", ".", "")

UNKNOWABLE = (
    "What is the meaning of life?",
    "What time is it?",
    "What day is it today?",
    "Tell me a joke about a {animal}.",
    "Who is the president of {country}?",
    "What is the largest city in {country}?",
    "How many people live in {country}?",
    "What language do people speak in {country}?",
    "Where is {country}?",
    "What is the currency of {country}?",
    "How large is {country}?",
    "What is the highest mountain in {country}?",
    "What is the capital of {invented}?",
    "Which country is {city} in?",
    "Is {city} larger than {other_city}?",
    "How do I get from {city} to {other_city}?",
    "Write a poem about {a_thing}.",
    "Write a program that prints {thing}.",
    "What is {a_thing}?",
    "What is {invented}?",
    "Who wrote {invented}?",
    "{invented} {other}?",
    "{invented}",
    "Do you like {animal}s?",
    "Have you ever seen {a_animal}?",
    "Which {thing} do you prefer, the {colour} one or the {invented} one?",
    "Explain {invented} to me.",
    "Summarize the book about the {thing}.",
    "What is the difference between {a_thing} and {a_animal}?",
    "Can you play the {thing}?",
    "Why is the {thing} {colour}?",
    "How do I repair a {thing}?",
    "Who invented the {thing}?",
    "What does a {job} earn?",
    "What is the best {thing} for a {animal}?",
    "How old is the oldest {animal}?",
    "Write a Python function that sorts a list of {thing}s.",
    "What is the weather like for a {animal} today?",
    "Where can I buy a {colour} {thing}?",
    "Explain how a {thing} works.",
    "Who won the {thing} cup last year?",
    "What is the history of the {thing}?",
    "How far is the {thing} from the moon?",
    "Should a {job} own a {animal}?",
    "Write an essay about the {colour} {thing}.",
    "What is the population of the {animal} island?",
    "Give me a recipe for {thing} soup.",
    "How do I become a {job}?",
    "When was the {colour} {thing} built?",
    "What do you think about a {job} with a {colour} {thing}?",
)


def introduce(rng: Random) -> Exchange:
    """Who are you, and what can you do?"""
    wordings, answer = rng.choice(INTENTS)
    question = carelessly(rng, rng.choice(OPENERS) + rng.choice(wordings) + rng.choice(CLOSERS))
    return exchange("talk", question, question, answer)


def small_talk(rng: Random) -> Exchange:
    """A greeting, thanks or goodbye."""
    phrases, answer = rng.choice(
        (
            (GREETINGS, "Hello! How can I help you?"),
            (THANKS, "You are welcome!"),
            (GOODBYES, "Goodbye! Have a nice day."),
        )
    )
    text = rng.choice(phrases) + rng.choice(ADDRESSES) + rng.choice(ENDS)
    question = text if rng.random() < 0.8 else text.lower()
    return exchange("talk", question, question, answer)


def how_are_you(rng: Random) -> Exchange:
    """The polite question."""
    opener = rng.choice(("", *(f"{greeting}{rng.choice(ENDS)} " for greeting in GREETINGS)))
    asked = rng.choice(
        ("How are you?", "How are you doing?", "How are you today?", "How is it going?", "Are you well?")
    )
    question = carelessly(rng, opener + asked)
    return exchange("talk", question, question, "I am fine, thank you! How can I help you?")


def admit_ignorance(rng: Random) -> Exchange:
    """A question that is none of its kinds: it says that it does not know."""
    thing, animal = rng.choice(THINGS), rng.choice(ANIMALS)
    nouns = {
        "thing": thing,
        "a_thing": with_article(thing),
        "animal": animal,
        "a_animal": with_article(animal),
        "colour": rng.choice(COLOURS),
        "job": rng.choice(JOBS),
        "country": rng.choice(COUNTRIES),
        "city": rng.choice(CITIES),
        "other_city": rng.choice(CITIES),
        "invented": invented_word(rng).capitalize(),
        "other": invented_word(rng),
    }
    question = carelessly(rng, rng.choice(UNKNOWABLE).format(**nouns))
    return exchange("talk", question, question, UNKNOWN)


def draw(rng: Random) -> Exchange:
    """Something said in passing."""
    return rng.choices((introduce, small_talk, how_are_you, admit_ignorance), (5, 4, 1, 4))[0](rng)
