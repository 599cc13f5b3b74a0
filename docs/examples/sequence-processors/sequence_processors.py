"""Output that begins with given tokens: baton up --logits-processors begin_with, {"vllm_xargs": {"begin_with": [5, 7]}}"""

try:
    from baton.services.worker.sampling.plugins.interface import LogitsProcessor
except ImportError:  # in a checkout of Baton
    from services.worker.sampling.plugins.interface import LogitsProcessor


class BeginWith(LogitsProcessor):
    extra_args = ("begin_with",)

    @classmethod
    def validate_params(cls, params):
        tokens = params.extra_args["begin_with"]
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise ValueError(f"begin_with = {tokens!r:.80}: a list of token ids is expected")

    def __init__(self, config):
        self.vocab_size = config.vocab_size
        self.requests = {}  # index in the batch → tokens to begin with, output tokens so far

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        for index in batch_update.removed:
            del self.requests[index]
        for index, params, _prompt, output in batch_update.added:
            self.requests[index] = params.extra_args["begin_with"], output
        for source, target, _kind in batch_update.moved:
            self.requests[target] = self.requests.pop(source)

    def apply(self, logits):
        for index, (tokens, output) in self.requests.items():
            if len(output) < len(tokens) and tokens[len(output)] < self.vocab_size:
                token = tokens[len(output)]
                chosen = logits[index, token].item()
                logits[index] = float("-inf")
                logits[index, token] = chosen
        return logits
