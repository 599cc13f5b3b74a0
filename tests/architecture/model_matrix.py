"""Which architecture runs with which feature: a cell for each, which a test of tests/integration/worker runs.

`tests/integration/worker/test_model_features.py` has one test for each cell: that the feature does as `transformers`
does, or, where the cell is in `REFUSED`, that it is an error that says why. `python -m tests.architecture.model_matrix`
writes the table into docs/models.md; a test keeps it true.
"""

from __future__ import annotations

from itertools import product
from typing import Literal, NamedTuple, get_args

from tests.support.paths import TESTS

PAGE = TESTS.parent / "docs" / "models.md"
BEGIN, END = "<!-- features -->\n", "<!-- end of features -->"

ModelFeature = Literal[
    "greedy", "mixed batch", "TP 2", "PP 2", "prefix cache", "prefill/decode", "guided", "LoRA", "int8"
]
MODEL_FEATURES: tuple[ModelFeature, ...] = get_args(ModelFeature)


class Architecture(NamedTuple):
    """A row: the tiny checkpoint that stands for it."""

    name: str
    native: bool
    checkpoint: str
    """Of `tests.support.models.tiny_models` where it is native, else of `library_models`."""


NAS = "nemotron-nas"
MLLAMA = "mllama"
"""The checkpoints that have a module of their own."""
ARCHITECTURES = (
    Architecture("Llama", True, "llama"),
    Architecture("Mistral", True, "mistral"),
    Architecture("Qwen2", True, "qwen2"),
    Architecture("Qwen3", True, "qwen3"),
    Architecture("Gemma 2", True, "gemma2"),
    Architecture("Gemma 3", True, "gemma3"),
    Architecture("Nemotron-NAS", True, NAS),
    Architecture("Llama 3.2 Vision", True, MLLAMA),
    Architecture("Mixtral", True, "mixtral"),
    Architecture("Qwen2-MoE", True, "qwen2-moe"),
    Architecture("Qwen3-MoE", True, "qwen3-moe"),
    Architecture("gpt-oss", True, "gpt-oss"),
    Architecture("DeepSeek-V2", True, "deepseek-v2"),
    Architecture("DeepSeek-V3", True, "deepseek-v3"),
    Architecture("DeepSeek-V3.2", True, "deepseek-v3.2"),
    Architecture("GLM-5", True, "glm-5"),
    Architecture("DeepSeek-V4", True, "deepseek-v4"),
    Architecture("HY4", True, "hy4"),
    Architecture("Mistral Large 4", True, "mistral-large-4"),
    Architecture("Mistral Small 4", True, "mistral-small-4"),
    Architecture("Ministral 3", True, "ministral-3"),
    Architecture("GLM-5-Next", True, "glm-5-next"),
    Architecture("MiniMax-M3", True, "minimax-m3"),
    Architecture("Qwen4", True, "qwen4"),
    Architecture("Mamba-2", True, "mamba2"),
    Architecture("Bamba", True, "bamba"),
    Architecture("Granite 4", True, "granite-hybrid-moe"),
    Architecture("Qwen3-Next", True, "qwen3-next"),
    Architecture("Qwen3.5", True, "qwen3.5"),
    Architecture("Qwen3.5-MoE", True, "qwen3.5-moe"),
    Architecture("Olmo-Hybrid", True, "olmo-hybrid"),
    Architecture("Kimi-Linear", True, "kimi-linear"),
    Architecture("Ling 3", True, "ling-3"),
    Architecture("MiniMax", True, "minimax"),
    Architecture("Nemotron-H", True, "nemotron-h"),
    Architecture("Nemotron-H MoE", True, "nemotron-h-moe"),
    Architecture("Falcon-H1", True, "falcon-h1"),
    Architecture("Zamba2", True, "zamba2"),
    Architecture("RecurrentGemma", True, "recurrent-gemma"),
    Architecture("LFM2", True, "lfm2"),
    Architecture("LFM2-MoE", True, "lfm2-moe"),
    Architecture("LFM3", True, "lfm3"),
    Architecture("Mamba", True, "mamba"),
    Architecture("FalconMamba", True, "falcon-mamba"),
    Architecture("Jamba", True, "jamba"),
    Architecture("GPT-2", False, "GPT2"),
    Architecture("GPT-NeoX", False, "GPTNeoX"),
    Architecture("Bloom", False, "Bloom"),
    Architecture("Falcon", False, "Falcon (grouped)"),
    Architecture("MPT", False, "Mpt"),
    Architecture("Cohere2", False, "Cohere2"),
    Architecture("Phi-3", False, "Phi3"),
    Architecture("GLM-4 MoE", False, "Glm4Moe"),
    Architecture("Llama 4", False, "Llama4Text"),
)


class Cell(NamedTuple):
    architecture: Architecture
    feature: ModelFeature

    def __str__(self) -> str:
        return f"{self.architecture.name}-{self.feature}"


CELLS = tuple(Cell(*pair) for pair in product(ARCHITECTURES, MODEL_FEATURES))
REFUSED: dict[tuple[str, ModelFeature], str] = {}
"""What the error says."""


def table() -> str:
    """The rows of docs/models.md."""
    lines = ["| | by |" + "|".join(MODEL_FEATURES) + "|", "|---|---|" + ":-:|" * len(MODEL_FEATURES)]
    for each in ARCHITECTURES:
        marks = ("✗" if (each.name, feature) in REFUSED else "✓" for feature in MODEL_FEATURES)
        lines.append(f"| {each.name} | {'native' if each.native else 'transformers'} |" + "|".join(marks) + "|")
    if REFUSED:
        lines += ["", "Refused at start (✗):", ""]
    lines += [f"- {name}, {feature}: “{complaint}”" for (name, feature), complaint in REFUSED.items()]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The page `text` with the table as it is now. Raises ValueError where it has no place for it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: no {BEGIN.strip()} … {END}")
    return before + begin + table() + end + behind


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
