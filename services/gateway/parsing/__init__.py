"""Takes a model's output apart, while it arrives, into reasoning, text and tool calls. Pure: no bus, clock or HTTP.

`output_parser.py` is the entry. Each format has a module that reads from a `TextCursor` as if the whole text were there
already; where it is not, the reader yields until more text comes. A text therefore gives the same events however it is
split into deltas.
"""
