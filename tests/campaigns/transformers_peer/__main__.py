"""`python -m tests.campaigns.transformers_peer JSON`: answers requests by transformers' continuous batching.

The JSON is a `wire.PeerSettings`. Started by `baton bench peers`. Requests come by standard input and answers go to
standard output, a line each; it ends when its input does.
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO

import msgspec

from tests.campaigns.transformers_peer.wire import PeerMessage, PeerRefused, PeerSettings


def main(arguments: list[str]) -> int:
    """0 where the input came to its end, 1 where transformers cannot, 2 where the question is none."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        request = msgspec.json.decode(arguments[0], type=PeerSettings)
    except msgspec.MsgspecError as error:
        print(error, file=sys.stderr)
        return 2
    # torch is imported behind the first check, so that a wrong question is answered at once.
    from tests.campaigns.transformers_peer.answering import PeerFailed, answer_all

    answers = _own_output()

    def send(*messages: PeerMessage) -> None:
        answers.write(b"".join(msgspec.json.encode(each) + b"\n" for each in messages))
        answers.flush()

    try:
        answer_all(request, sys.stdin.buffer, send)
    except PeerFailed as error:
        send(PeerRefused(str(error)))
        return 1
    return 0


def _own_output() -> BinaryIO:
    """Standard output; whatever else writes there from now on is heard on standard error, as libraries do print."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # transformers' thread may be in the middle of a step, and is not waited for
