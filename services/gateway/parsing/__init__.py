"""A model's output as it comes, taken apart into thoughts, text and tool calls. Pure: no bus, no clock, no HTTP.

`output_parser.py` is the way in. Each format reads from a tape as if all of the text were there already; where it is
not, the reading waits (`yield`) for more. So a text gives the same pieces in whatever deltas it comes.
"""
