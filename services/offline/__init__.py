"""A model in this process, for many prompts at once: the serving actors on an in-memory bus; no server, no port.

from services.offline import LLM, SamplingParams

with LLM("path/to/model") as llm:
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text)
"""

import logging

from services.offline.errors import EngineFailed, InvalidRequest
from services.offline.llm import LLM
from services.offline.outputs import CompletionOutput, Logprob, RequestOutput
from services.offline.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineFailed", "InvalidRequest", "Logprob", "RequestOutput", "SamplingParams"]

for _package in ("shared", "services", "kvstore"):  # what a library does: it logs, and prints nothing unasked
    logging.getLogger(_package).addHandler(logging.NullHandler())
