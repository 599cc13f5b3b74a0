"""Every option of the command line, flag of a service and environment variable is what users' scripts say.

After a change that is meant: python -m tests.contracts.test_command_line
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.cli.app import COMMANDS, loaded
from deploy.configuration import CONFIGS
from shared.config import COMMON_KEYS
from shared.settings import settings_of

WRITTEN = Path(__file__).with_name("command_line.txt")


def lines() -> Iterator[str]:
    for name in sorted(COMMANDS):
        yield from sorted(f"baton {name} {_described(each)}" for each in loaded(name).params)
    for service, config in sorted(CONFIGS.items()):
        for key, setting in settings_of(config).items():
            variable = f"BATON_{key.upper()}" if key in COMMON_KEYS else f"BATON_{service.upper()}_{key.upper()}"
            default = "must be set" if setting.required else setting.default_text or "none"
            yield f"{service} {setting.flag} {variable} default {default}"


def _described(option: Any) -> str:
    names = "/".join([*option.opts, *option.secondary_opts])
    shown = getattr(option, "show_default", False)
    default = shown if isinstance(shown, str) else option.default
    parts = [names] if default in (None, False, "") or "UNSET" in repr(default) else [names, f"default {default}"]
    if option.envvar:
        parts.append(f"environment {option.envvar}")
    parts += [word for word in ("is_flag", "multiple", "hidden") if getattr(option, word, False)]
    return " ".join(parts)


def test_names_and_defaults_are_those_that_users_know() -> None:
    assert list(lines()) == WRITTEN.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    WRITTEN.write_text("\n".join(lines()) + "\n", encoding="utf-8")
