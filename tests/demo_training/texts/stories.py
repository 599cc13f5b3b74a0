"""Short stories from a small grammar: a hero, a place, a thing that is lost, and three lengths."""

import re
from dataclasses import dataclass
from random import Random
from typing import Literal

from tests.demo_training.examples import Exchange, Passage, Turn
from tests.demo_training.texts.wording import ANIMALS, JOBS, NAMES, favouring, with_article, words

Length = Literal["short", "medium", "long"]

HEROES = words(
    "fox rabbit knight robot sailor dragon bear girl boy wizard pirate mouse owl princess "
    "baker giant turtle cat dog astronaut"
)
EVERY_HERO = tuple(dict.fromkeys((*HEROES, *ANIMALS, *JOBS)))
PLACES = words(
    "in a quiet forest;by the sea;in a small village;on a high mountain;on a lonely island;in an old castle;"
    "in a busy city;on a farm;under the ground;in a lighthouse;near a wide river;on the moon;"
    "in a deep valley;in a snowy land",
    ";",
)
THINGS = words("key lamp map crown book bell ring boat kite drum mirror clock star violin letter compass")
HELPERS = words("owl fisherman mole gardener crow squirrel shepherd goose miller hedgehog")

TITLES: dict[Length, tuple[str, ...]] = {
    "short": (
        "Tell me a short story",
        "Write a short story",
        "Write a very short story",
        "Please tell me a short story",
    ),
    "medium": (
        "Tell me a story",
        "Write a story",
        "Can you tell me a story",
        "I would like to hear a story",
        "Make up a story",
    ),
    "long": ("Tell me a long story", "Write a long story", "Please write a long story", "I would like a long story"),
}

ADJECTIVES = ("little", "brave", "curious", "kind", "clever", "shy")
COLOURS = ("golden", "blue", "old", "shiny", "tiny", "silver")
OPENINGS = (
    "Once upon a time, there was a {adjective} {hero} called {name} who lived {place}.",
    "Long ago, a {adjective} {hero} named {name} lived {place}.",
    "There once was a {adjective} {hero} whose name was {name}. {name} lived {place}.",
)
WISHES = (
    "More than anything, {name} loved a {colour} {thing}.",
    "{name} owned only one treasure, a {colour} {thing}.",
    "Every evening {name} looked at a {colour} {thing} and smiled.",
)
LOSSES = (
    "One morning the {thing} was gone.",
    "One day a strong wind came and carried the {thing} away.",
    "Then, one night, somebody took the {thing}.",
)
SEARCHES = (
    '"I will find it," said {name}, and set out at once.',
    "{name} was sad, but did not give up.",
    "{name} packed some bread and went to look for it.",
)
MEETINGS = (
    "On the way {name} met {a_helper}.",
    "Soon {a_helper} came along the path.",
    "Behind a big stone sat {a_helper}.",
)
QUESTIONS = (
    '"Have you seen my {thing}?" asked {name}.',
    '"Please help me," said {name}. "I have lost my {thing}."',
    '{name} asked, "Do you know where my {thing} is?"',
)
REPLIES = (
    '"I saw it near the old bridge," said the {helper}.',
    '"Follow the river," the {helper} answered.',
    '"Look under the tallest tree," said the {helper}.',
)
THANKS = (
    "{name} thanked the {helper} and walked on.",
    '"Thank you, dear {helper}," said {name}.',
    "They shared the bread and talked for a while.",
)
TRIALS = (
    "It began to rain, and the path was dark.",
    "The way was long, and the hills were steep.",
    "Night fell, and the stars came out.",
)
COURAGE = (
    "{name} sang a song to be less afraid.",
    "But {name} thought of home and kept going.",
    "{name} took a deep breath and counted to ten.",
)
SECOND_MEETINGS = (
    "The next morning {a_second} stood at a gate.",
    "At the end of the road lived {a_second}.",
    "Then {name} heard the voice of {a_second}.",
)
SECOND_REPLIES = (
    '"You are very near," said the {second}. "I will come with you."',
    '"I know the place," the {second} said. "Let us go together."',
    '"Two are better than one," said the {second} with a smile.',
)
TOGETHER = (
    "So they walked side by side until noon.",
    "Together they crossed the water on a fallen tree.",
    "They climbed over a wall and through a small door.",
)
FINDINGS = (
    "And there, in the grass, lay the {thing}.",
    "At last {name} saw the {thing} shine in the sun.",
    "There it was: the {colour} {thing}, safe and sound.",
)
JOYS = (
    "{name} danced with joy.",
    "{name} laughed out loud.",
    "{name} held it close and was happy.",
)
RETURNS = (
    "On the way home {name} told everybody the story.",
    "{name} went home before it was dark.",
    "The journey home was short and merry.",
)
FEASTS = (
    "That evening all the friends came to a great supper.",
    "They lit a fire, ate soup and sang old songs.",
    "The whole neighbourhood came to see the {thing}.",
)
LESSONS = (
    "{name} had learned that it is good to ask for help.",
    "{name} knew now that a friend is worth more than a {thing}.",
    "From then on {name} helped everybody who had lost something.",
)
ENDINGS = (
    "And they lived happily ever after.",
    "And that is the end of the story.",
    "And {name} slept well that night.",
)
BEATS: dict[Length, tuple[tuple[str, ...], ...]] = {
    "short": (OPENINGS, WISHES, LOSSES, FINDINGS, ENDINGS),
    "medium": (OPENINGS, WISHES, LOSSES, SEARCHES, MEETINGS, QUESTIONS, REPLIES, FINDINGS, JOYS, ENDINGS),
    "long": (
        OPENINGS, WISHES, LOSSES, SEARCHES, MEETINGS, QUESTIONS, REPLIES, THANKS, TRIALS, COURAGE, SECOND_MEETINGS,
        SECOND_REPLIES, TOGETHER, FINDINGS, JOYS, RETURNS, FEASTS, LESSONS, ENDINGS,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """What was asked for; what was not asked for (None) the story chooses."""

    length: Length
    hero: str | None
    name: str | None
    place: str | None
    thing: str | None


def plot(rng: Random) -> Plot:
    """A request of a hero and some of name, place and thing; now and then just of a story."""
    if rng.random() < 0.12:
        name = rng.choice(NAMES) if rng.random() < 0.5 else None
        return Plot(_length(rng), hero=None, name=name, place=None, thing=None)
    return Plot(
        length=_length(rng),
        hero=rng.choice(HEROES) if rng.random() < 0.75 else rng.choice(EVERY_HERO),
        name=rng.choice(NAMES) if rng.random() < 0.5 else None,
        place=rng.choice(PLACES) if rng.random() < 0.4 else None,
        thing=rng.choice(THINGS) if rng.random() < 0.5 else None,
    )


def _length(rng: Random) -> Length:
    lengths: tuple[Length, ...] = ("short", "medium", "long")
    return rng.choices(lengths, (5, 4, 2))[0]


def ask(plot: Plot, rng: Random) -> str:
    """The request in words."""
    parts = [rng.choice(TITLES[plot.length])]
    if plot.hero is not None:
        parts.append(f"about {with_article(plot.hero)}")
    elif plot.name is not None:
        parts.append(f"about {plot.name}")
    if plot.hero is not None and plot.name is not None:
        parts.append(f"{rng.choice(('called', 'named'))} {plot.name}")
    if plot.place is not None:
        parts.append(plot.place)
    if plot.thing is not None:
        parts.append(f"and {with_article(plot.thing)}")
    return " ".join(parts) + rng.choice((".", ".", ""))


def tell(plot: Plot, rng: Random) -> str:
    """The story. Its choices lean on the hero: every hero's greedy story differs and none hangs on a coin toss."""
    hero = plot.hero or favouring(rng, HEROES, 0)
    taste = EVERY_HERO.index(hero) % len(HEROES)
    helper = favouring(rng, HELPERS, taste)
    second = HELPERS[(HELPERS.index(helper) + 3) % len(HELPERS)]
    words = {
        "hero": hero,
        "name": plot.name or favouring(rng, NAMES, taste),
        "place": plot.place or favouring(rng, PLACES, taste),
        "thing": plot.thing or favouring(rng, THINGS, taste),
        "adjective": favouring(rng, ADJECTIVES, taste),
        "colour": favouring(rng, COLOURS, taste // 2),
        "helper": helper,
        "second": second,
        "a_helper": with_article(helper),
        "a_second": with_article(second),
    }
    beats = enumerate(BEATS[plot.length])
    sentences = (favouring(rng, options, taste + beat * (1 + taste // 3)).format(**words) for beat, options in beats)
    return " ".join(sentences).replace(" a old ", " an old ")


def draw(rng: Random) -> Exchange:
    """A request for a story. Held out: hero, name, place and thing together; without a hero, the wording."""
    wanted = plot(rng)
    question = ask(wanted, rng)
    facts = f"{wanted.hero} {wanted.name} {wanted.place} {wanted.thing}" if wanted.hero is not None else question
    return Exchange("stories", f"stories|{facts}", (Turn(question, tell(wanted, rng)),))


def draw_passage(rng: Random) -> Passage:
    """A story as plain text, begun by its first words."""
    wanted = plot(rng)
    first, rest = _split(tell(wanted, rng), rng)
    return Passage("completion", f"completion|story {first}", first, rest)


def _split(text: str, rng: Random) -> tuple[str, str]:
    words = text.split(" ")
    at = rng.randrange(3, 9)
    return " ".join(words[:at]), " " + " ".join(words[at:])


def is_good(question: str, story: str) -> bool:
    """Whether a story is what was asked for: all that was named occurs, the length fits, it closes, nothing repeats."""
    sentences = re.split(r"(?<=[.?!])\"? ", story)
    asked = [hero for hero in EVERY_HERO if re.search(rf"\b{hero}\b", question)]
    asked += [name for name in NAMES if re.search(rf"\b{name}\b", question)]
    asked += [thing for thing in THINGS if re.search(rf"\ban? {thing}\b", question)]
    asked += [place for place in PLACES if place in question]
    length = next((word for word in ("short", "long") if f" {word} " in question), "medium")
    bounds = {"short": (5, 7), "medium": (9, 14), "long": (17, 28)}[length]
    return (
        all(re.search(rf"\b{word}\b", story) is not None for word in asked)
        and bounds[0] <= len(sentences) <= bounds[1]
        and len(set(sentences)) == len(sentences)
        and story.endswith(tuple(ending.split("{name}")[-1] for ending in ENDINGS))
    )
