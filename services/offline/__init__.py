"""A model in this process, for many prompts at once: all services on an in-memory bus; no server, no port.

from baton import LLM, SamplingParams

with LLM("path/to/model") as llm:
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text)
"""

import logging

from services.offline.errors import EngineFailed, InvalidRequest
from services.offline.llm import LLM
from services.offline.outputs import CompletionOutput, Logprob, RequestOutput
from services.offline.pooling import PoolingParams, PoolingRequestOutput
from services.offline.requests import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineFailed",
    "InvalidRequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
]

_above = __name__.removesuffix("offline").removesuffix("services.")  # `baton.` where this is installed
for _package in ("shared", "services", "kvstore"):  # a library logs, and prints nothing by itself
    logging.getLogger(f"{_above}{_package}").addHandler(logging.NullHandler())
