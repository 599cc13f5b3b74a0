"""Conversations in which the model may call functions: which one, with which arguments, and what came of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.demo_training.examples import Draw, Exchange, Turn, draw_for_training
from tests.demo_training.texts import capitals, conversation, letters, talk
from tests.demo_training.texts.wording import COLOURS, THINGS, carelessly, city, person

OFFER = "You may call these tools:"
"""Stands in the system prompt before the tools, one JSON object a line; the chat template writes the same."""
CALL = "<tool_call>\n{}\n</tool_call>"
RESPONSE = "<tool_response>\n{}\n</tool_response>"
"""The markup of Hermes and Qwen, which every server's parser knows."""

Values = Mapping[str, str | int]


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool: the name that questions use for it, and names that a tool may give it."""

    slot: str
    names: tuple[str, ...]
    draw: Callable[[Random], str | int]
    describing: str


@dataclass(frozen=True)
class Tool:
    """A function, what people ask who need it, what it returns and how its result is told."""

    names: tuple[str, ...]
    describing: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    asking: tuple[str, ...]
    returns: Callable[[Random], Values] = field(default=lambda rng: {"status": "done"})
    telling: str = "Done."


def message(rng: Random) -> str:
    """A few words to be sent."""
    return rng.choice(
        (
            "I am late",
            "dinner is ready",
            "happy birthday",
            "see you tomorrow",
            "the train is late",
            "call me back",
            f"the {rng.choice(THINGS)} is here",
            f"bring the {rng.choice(THINGS)}",
            f"I like the {rng.choice(COLOURS)} {rng.choice(THINGS)}",
        )
    )


def sum_of_two(rng: Random) -> str:
    """A calculation to be handed on as it is."""
    return f"{rng.randrange(1000)} {rng.choice('+-*/')} {rng.randrange(1, 1000)}"


PLACE = Parameter("city", ("city", "location", "place", "town"), city, "Name of the city")
TOOLS: tuple[Tool, ...] = (
    Tool(
        ("get_weather", "get_current_weather", "weather", "check_weather", "weather_forecast"),
        ("Get the weather of a city", "The weather in a place", "Get the current weather in a given location"),
        (PLACE,),
        (
            "What is the weather in {city}?",
            "What's the weather like in {city}?",
            "How is the weather in {city} today?",
            "Is it raining in {city}?",
            "Do I need an umbrella in {city}?",
        ),
        lambda rng: {
            "weather": rng.choice(("sunny", "rainy", "cloudy", "windy", "foggy", "snowy")),
            "degrees": rng.randrange(40),
        },
        "It is {weather} in {city}, with {degrees} degrees.",
    ),
    Tool(
        ("get_time", "current_time", "local_time", "clock"),
        ("Get the time in a city", "The local time of a place"),
        (PLACE,),
        ("What time is it in {city}?", "What is the time in {city}?", "How late is it in {city}?"),
        lambda rng: {"time": f"{rng.randrange(24):02}:{rng.randrange(60):02}"},
        "It is {time} in {city}.",
    ),
    Tool(
        ("send_message", "message", "send_text", "send_mail"),
        ("Send a message to a person", "Write to somebody"),
        (
            Parameter("name", ("to", "recipient", "name", "person"), person, "Who gets it"),
            Parameter("message", ("text", "message", "body", "content"), message, "What to say"),
        ),
        ("Tell {name}: {message}.", "Send a message to {name}: {message}.", "Write to {name}: {message}."),
        telling="I told {name}.",
    ),
    Tool(
        ("set_timer", "start_timer", "timer", "set_alarm"),
        ("Start a timer", "Set a timer for some minutes"),
        (Parameter("minutes", ("minutes", "duration", "time"), lambda rng: rng.randrange(1, 100), "How many minutes"),),
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Start a timer: {minutes} minutes."),
        telling="The timer is set for {minutes} minutes.",
    ),
    Tool(
        ("add_item", "add_to_list", "add_to_cart", "order", "buy"),
        ("Put something on the shopping list", "Add an item to the cart"),
        (
            Parameter("item", ("item", "product", "thing"), lambda rng: rng.choice(THINGS), "What to buy"),
            Parameter("count", ("count", "quantity", "number"), lambda rng: rng.randrange(1, 60), "How many"),
        ),
        ("Buy {count} of this: {item}.", "Put {item} on my list, {count} of them.", "Order {count} times {item}."),
        telling="I added {count} of {item}.",
    ),
    Tool(
        ("set_light", "light", "change_light", "set_color"),
        ("Change the colour of a lamp", "Set the light in a room"),
        (
            Parameter(
                "room",
                ("room", "place", "lamp"),
                lambda rng: rng.choice(("kitchen", "garden", "bathroom", "hall", "office", "bedroom", "cellar")),
                "Which room",
            ),
            Parameter("colour", ("colour", "color"), lambda rng: rng.choice(COLOURS), "The new colour"),
        ),
        ("Make the light in the {room} {colour}.", "Turn the {room} {colour}.", "I want {colour} light in the {room}."),
        telling="The light in the {room} is {colour} now.",
    ),
    Tool(
        ("find_person", "look_up", "search", "find_user", "get_contact"),
        ("Find a person's number", "Search the contacts by name"),
        (Parameter("name", ("name", "query", "person", "contact"), person, "Name to look for"),),
        ("Find the number of {name}.", "Look up {name}.", "What is the number of {name}?", "Search for {name}."),
        lambda rng: {"number": "".join(str(rng.randrange(10)) for _ in range(rng.randrange(3, 6)))},
        "The number of {name} is {number}.",
    ),
    Tool(
        ("calculate", "calculator", "evaluate", "compute"),
        ("Calculate the value of an expression", "A calculator"),
        (Parameter("sum", ("expression", "formula", "input"), sum_of_two, "What to calculate"),),
        ("What is {sum}?", "Calculate {sum}.", "How much is {sum}?", "{sum}"),
        lambda rng: {"result": rng.randrange(10000)},
        "The result is {result}.",
    ),
)
UNRELATED: tuple[Draw, ...] = (capitals.draw, letters.draw_spelling, talk.draw, conversation.copy)
"""What no tool is needed for."""


@dataclass(frozen=True)
class Offered:
    """A tool under the names that one conversation gives to it and its parameters."""

    tool: Tool
    name: str
    parameters: tuple[str, ...]
    text: str

    def call(self, values: Values) -> str:
        """The answer that calls it."""
        slots = zip(self.parameters, self.tool.parameters, strict=True)
        arguments = {name: values[parameter.slot] for name, parameter in slots}
        return CALL.format(json.dumps({"name": self.name, "arguments": arguments}, ensure_ascii=False))


def offer(rng: Random, tool: Tool) -> Offered:
    """The tool as a client might declare it."""
    name, parameters = rng.choice(tool.names), tuple(rng.choice(p.names) for p in tool.parameters)
    described = rng.random() < 0.4
    properties: dict[str, dict[str, str]] = {}
    for called, parameter in zip(parameters, tool.parameters, strict=True):
        is_text = isinstance(parameter.draw(rng), str)
        properties[called] = {"type": "string" if is_text else "integer"}
        if described:
            properties[called]["description"] = parameter.describing
    declared: dict[str, object] = {"name": name}
    if rng.random() < 0.85:
        declared["description"] = rng.choice(tool.describing) + rng.choice(("", "."))
    schema: dict[str, object] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        schema["required"] = list(parameters)
    return Offered(tool, name, parameters, json.dumps(declared | {"parameters": schema}, ensure_ascii=False))


def system_prompt(before: str | None, offered: Sequence[Offered]) -> str:
    """What the chat template makes of a system message and tools."""
    tools = "\n".join([OFFER, *(each.text for each in offered)])
    return f"{before}\n\n{tools}" if before is not None else tools


def draw(rng: Random) -> Exchange:
    """A conversation with one to four tools on offer. Held out: the values that the question gives."""
    wanted, *others = rng.sample(TOOLS, rng.choice((1, 1, 2, 2, 3, 4)))
    offered = [offer(rng, tool) for tool in (wanted, *others)]
    called = offered[0]
    rng.shuffle(offered)
    system = system_prompt(conversation.neutral_system(rng), offered)
    if rng.random() < 0.2:
        plain = draw_for_training(rng.choice(UNRELATED), rng)
        assert isinstance(plain, Exchange)
        return Exchange("tools", f"tools|{plain.key}", plain.turns, system)
    values = {parameter.slot: parameter.draw(rng) for parameter in wanted.parameters}
    key = f"tools|{wanted.names[0]} {sorted(values.items())}"
    question = carelessly(rng, rng.choice(wanted.asking).format(**values))
    asked = Turn(question, called.call(values))
    if rng.random() < 0.65:
        return Exchange("tools", key, (asked,), system)
    result = wanted.returns(rng)
    told = Turn(RESPONSE.format(json.dumps(result)), wanted.telling.format(**values, **result))
    return Exchange("tools", key, (asked, told), system)
