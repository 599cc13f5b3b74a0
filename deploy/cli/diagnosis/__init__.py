"""Commands that say how a stack is, to other programs and to whoever helps."""
