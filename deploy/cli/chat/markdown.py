"""Markdown that grows: blocks that are complete stay as they are, and the last one is drawn again with each piece."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

FRAMES_PER_SECOND = 12
_FENCES = ("```", "~~~")


class MarkdownBlocks:
    """Owns the text that has come of the last block. No terminal."""

    def __init__(self) -> None:
        self.rest = ""

    def add(self, piece: str) -> list[str]:
        """The blocks that are complete with this piece: up to an empty line outside of code."""
        self.rest += piece
        done: list[str] = []
        while (end := self._end()) is not None:
            block, self.rest = self.rest[:end], self.rest[end:].lstrip("\n")
            if block.strip():
                done.append(block)
        return done

    def _end(self) -> int | None:
        """Where the first block ends; None: it may go on."""
        fence, position = "", 0
        for line in self.rest.splitlines(keepends=True):
            bare = line.strip()
            if fence:
                fence = "" if bare.startswith(fence) and not bare.strip(fence[0]) else fence
            elif bare.startswith(_FENCES):
                fence = bare[: len(bare) - len(bare.lstrip(bare[0]))]
            elif not bare and line.endswith("\n") and position + len(line) < len(self.rest):
                return position
            position += len(line)
        return None


def show_markdown(pieces: Generator[str, None, None], console: Console | None = None) -> None:
    """Shows an answer while it comes. Ctrl-C breaks it off; what has come of it stays."""
    console = console or Console()
    blocks = MarkdownBlocks()
    with (
        contextlib.closing(pieces),
        Live(console=console, refresh_per_second=FRAMES_PER_SECOND, transient=True, vertical_overflow="crop") as live,
    ):
        try:
            for piece in pieces:
                for block in blocks.add(piece):
                    live.update("")
                    console.print(Markdown(block), "")
                live.update(Markdown(blocks.rest))
        finally:
            live.update("")
            if blocks.rest.strip():
                console.print(Markdown(blocks.rest))
