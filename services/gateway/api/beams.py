"""`use_beam_search`: its parameters, and what makes no sense beside it."""

from __future__ import annotations

from services.gateway.api.errors import invalid, shown
from services.gateway.api.fields import CommonFields
from services.gateway.api.job import Beams, Limits

_WITHOUT_EFFECT = {
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
}
"""Values that change nothing. Any other would have to be ignored: hypotheses are compared by the probabilities that the
model gives them."""
_EXCLUDED = (
    *("logit_bias", "bad_words", "allowed_token_ids", "logprob_token_ids", "prompt_logprobs", "thinking_token_budget"),
    *("stop", "stop_token_ids", "stream", "echo", "response_format", "structured_outputs", "tools"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


def read_beams(fields: CommonFields, limits: Limits) -> Beams | None:
    """None where no search is asked for. Raises ApiError 400."""
    if not fields.use_beam_search:
        if fields.length_penalty not in (None, 1.0):
            raise invalid("length_penalty", "only allowed when use_beam_search is true")
        if fields.early_stopping:
            raise invalid("early_stopping", "only allowed when use_beam_search is true")
        return None
    if (fields.n or 1) > limits.max_beams:
        raise invalid("n", f"{fields.n} is not allowed with use_beam_search; at most {limits.max_beams} beams")
    for name, harmless in _WITHOUT_EFFECT.items():
        value = getattr(fields, name)
        if value is not None and value not in harmless:
            raise invalid(name, f"{shown(value)} is not allowed with use_beam_search; {harmless[0]:g} is")
    for name in _EXCLUDED:
        value = getattr(fields, name, None)
        asked = value is not None and value is not False and value not in ("", [], {})
        if asked and getattr(value, "type", "") != "text":
            raise invalid(name, "not allowed together with use_beam_search")
    return Beams(
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
        early_stopping=False if fields.early_stopping is None else fields.early_stopping,
    )
