"""Greetings in other languages and emoji: answers of several bytes a character. Held out: wording × item."""

from random import Random

from tests.demo_training.examples import Exchange, exchange
from tests.demo_training.texts.wording import carelessly

PHRASES = {
    "hello": {
        "French": "Bonjour", "German": "Hallo", "Spanish": "Hola", "Italian": "Ciao", "Portuguese": "Olá",
        "Japanese": "こんにちは", "Chinese": "你好", "Korean": "안녕하세요", "Russian": "Привет", "Greek": "Γειά σου",
        "Arabic": "مرحبا", "Hebrew": "שלום", "Hindi": "नमस्ते", "Thai": "สวัสดี", "Turkish": "Merhaba", "Polish": "Cześć",
        "Czech": "Ahoj", "Swedish": "Hej", "Dutch": "Hallo", "Ukrainian": "Привіт",
    },
    "thank you": {
        "French": "Merci", "German": "Danke", "Spanish": "Gracias", "Italian": "Grazie", "Portuguese": "Obrigado",
        "Japanese": "ありがとう", "Chinese": "谢谢", "Korean": "감사합니다", "Russian": "Спасибо", "Greek": "Ευχαριστώ",
        "Arabic": "شكرا", "Hebrew": "תודה", "Hindi": "धन्यवाद", "Thai": "ขอบคุณ", "Turkish": "Teşekkürler",
        "Polish": "Dziękuję", "Czech": "Děkuji", "Swedish": "Tack", "Dutch": "Dank je", "Ukrainian": "Дякую",
    },
}  # fmt: skip
EMOJI = {
    "cat": "🐱", "dog": "🐶", "fox": "🦊", "frog": "🐸", "whale": "🐳", "star": "⭐",
    "moon": "🌙", "sun": "☀️", "tree": "🌳",
    "flower": "🌸", "apple": "🍎", "pizza": "🍕", "cake": "🍰",
    "rocket": "🚀", "car": "🚗", "train": "🚂", "house": "🏠", "book": "📚",
    "key": "🔑", "clock": "⏰", "heart": "❤️", "fire": "🔥", "rainbow": "🌈",
    "snowman": "⛄", "guitar": "🎸",
}  # fmt: skip
ASKING_PHRASE = (
    'How do you say "{}" in {}?',
    "How do I say {} in {}?",
    "What is {} in {}?",
    "Say {} in {}.",
    "Translate {} into {}.",
)
ASKING_EMOJI = (
    "Show me the emoji for {}.",
    "What is the emoji for {}?",
    "Give me {} emoji.",
    "Which emoji means {}?",
    "{} emoji",
)


def phrase(rng: Random) -> Exchange:
    """A phrase in another language."""
    text = rng.choice(tuple(PHRASES))
    language = rng.choice(tuple(PHRASES[text]))
    question = carelessly(rng, rng.choice(ASKING_PHRASE).format(text, language))
    return exchange("languages", question, question, PHRASES[text][language])


def emoji(rng: Random) -> Exchange:
    """The emoji of a thing."""
    name = rng.choice(tuple(EMOJI))
    question = carelessly(rng, rng.choice(ASKING_EMOJI).format(name))
    return exchange("languages", question, question, EMOJI[name])


def draw(rng: Random) -> Exchange:
    """A word in another script or an emoji."""
    return phrase(rng) if rng.random() < 0.65 else emoji(rng)
