"""The `baton` command: every command with its options, from the command line itself."""

from __future__ import annotations

from typing import Any

from deploy.cli.app import COMMANDS, loaded
from tests.docs_site.markdown import cell, one_line

_HEADING = """\
# Command line

`baton COMMAND --help` says the same. [Configuration](../configuration.md) has what options of `baton up` set.
This page is made from the code.
"""


def page() -> str:
    """The page's text."""
    parts = [_HEADING]
    for name in COMMANDS:
        command = loaded(name)
        parts += [f"## baton {name}\n", f"{cell(one_line(command.help))}\n"]
        rows = [_row(each) for each in command.params if not getattr(each, "hidden", False)]
        if rows:
            parts += ["\n".join(["| | |", "|---|---|", *rows]) + "\n"]
    return "\n".join(parts)


def _row(option: Any) -> str:
    names = [*option.opts, *option.secondary_opts]
    shown = ", ".join(f"`{each}`" for each in names) if option.param_type_name == "option" else f"`{names[0].upper()}`"
    default = getattr(option, "show_default", None)
    value = default if isinstance(default, str) else option.default
    known = value is not None and value is not False and "UNSET" not in repr(value) and not callable(value)
    said = [one_line(getattr(option, "help", "") or "")]
    said += [f"Default: {value}."] if known else []
    said += [f"Environment: {option.envvar}."] if option.envvar else []
    return f"| {shown} | {cell(' '.join(filter(None, said)))} |"
