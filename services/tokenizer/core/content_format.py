"""Whether a chat template goes through the parts of a message's content itself, or expects a string.

A reading of the template's syntax tree with vLLM's rule (`_detect_content_format`): a loop over `message.content`,
where `message` comes from a loop over `messages`, means parts. Names are followed through `set` and macro arguments;
scopes are not, as a template that reuses a name for two things is not worth a control-flow graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]
"""`openai`: content stays a list of parts where the client sent one. The words are vLLM's."""


def detect_content_format(tree: nodes.Template) -> ContentFormat:
    """What the template with this syntax tree expects."""
    messages = _names_for(tree, "messages")
    items = {name for name, over in _loops(tree) if _is_name(over, messages)}
    if any(_is_content(over, items) for _, over in _loops(tree)):
        return "openai"
    parameters = {"content"} | set(_content_parameters(tree, items))
    carried = set().union(*(_names_for(tree, name) for name in parameters))
    return "openai" if any(_is_name(over, carried) for _, over in _loops(tree)) else "string"


def _loops(tree: nodes.Node) -> Iterator[tuple[str, nodes.Node]]:
    """Each loop's variable, and what it goes over."""
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            yield loop.target.name, loop.iter


def _names_for(tree: nodes.Node, name: str) -> set[str]:
    """`name` and whatever it is assigned to, sliced or filtered on the way or not."""
    names = {name}
    while True:
        more = {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _is_name(assign.node, names)
        }
        if more <= names:
            return names
        names |= more


def _content_parameters(tree: nodes.Node, items: set[str]) -> Iterator[str]:
    """Parameters of macros that are called with a message's content."""
    for macro in tree.find_all(nodes.Macro):
        parameters = [argument.name for argument in macro.args]
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                yield from (p for p, value in zip(parameters, call.args, strict=False) if _is_content(value, items))
                yield from (k.key for k in call.kwargs if k.key in parameters and _is_content(k.value, items))


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """The node under filters, tests and slices."""
    while True:
        if isinstance(node, (nodes.Filter, nodes.Test)) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            return node


def _is_name(node: nodes.Node | None, names: set[str]) -> bool:
    bare = _bare(node)
    return isinstance(bare, nodes.Name) and bare.name in names


def _is_content(node: nodes.Node | None, items: set[str]) -> bool:
    bare = _bare(node)
    if isinstance(bare, nodes.Getattr):
        return bare.attr == "content" and _is_name(bare.node, items)
    if isinstance(bare, nodes.Getitem):
        return isinstance(bare.arg, nodes.Const) and bare.arg.value == "content" and _is_name(bare.node, items)
    return False
