"""Finds and loads what installed packages name in Baton's entry point groups.

A package that is broken is refused by its name and version, with the entry point, before anything is served with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class PluginError(Exception):
    """A plug-in that cannot be had: the text says which distribution and entry point, and why."""


class LoadedPlugin(NamedTuple, Generic[T]):
    """What an entry point names, imported."""

    value: T
    where: str
    """The entry point and its distribution, for errors."""


def plugin_names(group: str) -> list[str]:
    """The names of all plug-ins of a group, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def described(entry: EntryPoint) -> str:
    """The entry point and its distribution, for errors: `acme-parsers 1.0 (brackets = acme:Brackets)`."""
    distribution = "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return f"{distribution} ({entry.name} = {entry.value})"


def find_plugin(group: str, name: str, *, built_in: Sequence[str] = ()) -> EntryPoint:
    """The entry point of that name. `built_in`: what the option knows beside plug-ins, for the error.

    Raises PluginError where no package brings it, or several do.
    """
    # A distribution that lies on the path twice is found twice; the first one is what an import finds, too.
    found = {entry.dist.name if entry.dist else "": entry for entry in reversed(entry_points(group=group, name=name))}
    if not found:
        names = ", ".join([*built_in, *plugin_names(group)]) or "none"
        raise PluginError(f"no installed package brings it; there are: {names}")
    if len(found) > 1:
        several = " and ".join(sorted(map(described, found.values())))
        raise PluginError(f"several packages bring it: {several}; uninstall all but one")
    return next(iter(found.values()))


def load_plugin(group: str, name: str, *, built_in: Sequence[str] = ()) -> LoadedPlugin[Any]:
    """The plug-in of that name. Raises PluginError with what the import raised."""
    entry = find_plugin(group, name, built_in=built_in)
    try:
        return LoadedPlugin(entry.load(), described(entry))
    except (Exception, SystemExit) as error:  # whatever a foreign package raises while it is imported
        raise PluginError(f"{described(entry)}: {error!r}") from None


def load_class(group: str, name: str, base: type[T], *, built_in: Sequence[str] = ()) -> LoadedPlugin[type[T]]:
    """Like `load_plugin`, for plug-ins that are subclasses of `base`. Raises PluginError."""
    found, where = load_plugin(group, name, built_in=built_in)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise PluginError(f"{where}: a subclass of {base.__name__} is expected, not {found!r:.80}")
    return LoadedPlugin(found, where)
