"""Where things lie in a checkout, for tests wherever they lie themselves."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TESTS = REPOSITORY / "tests"
DATA = TESTS / "data"
CHAT_TEMPLATES = TESTS / "chat_templates"
DEMO = REPOSITORY / "deploy" / "demo"
DEMO_MODEL = DEMO / "model"
