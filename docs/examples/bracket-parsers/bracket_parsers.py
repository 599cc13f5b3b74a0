"""Tool calls as `[[weather {"city": "Paris"}]]`, reasoning as `((it may rain))`:
baton up --tool-call-parser brackets --reasoning-parser asides"""

import re

try:
    from baton.services.gateway.parsing.interface import (
        CallOpenings,
        NotAToolCall,
        ReasoningParser,
        ThinkingMarks,
        ToolParser,
        read_value,
    )
except ImportError:  # in a checkout of Baton
    from services.gateway.parsing.interface import (
        CallOpenings,
        NotAToolCall,
        ReasoningParser,
        ThinkingMarks,
        ToolParser,
        read_value,
    )

NAME = re.compile(r"[\w.:/-]*")


class BracketCalls(ToolParser):
    openings = CallOpenings(anywhere=("[[",))
    call_template = "[[{name} {arguments}]]"

    def read(self, cursor, events):
        yield from cursor.expect("[[")
        name = yield from cursor.read_run(NAME)
        yield from cursor.skip_whitespace()
        if name not in self.schemas or (yield from cursor.peek()) != "{":
            raise NotAToolCall  # what was read is text then
        events.start_call(name)
        yield from read_value(cursor, events.arguments)  # as it arrives
        yield from cursor.expect("]]")
        events.end_call()
        cursor.mark()


class Asides(ReasoningParser):
    marks = ThinkingMarks("((", "))")
