"""What a model that chooses blocks of keys is not combined with: each is an error when a rank starts."""

from __future__ import annotations

from services.worker.models.config import BlockIndexConfig, ModelConfig, ModelError
from services.worker.models.loaded_model import LoadSettings


def chosen_blocks_of(settings: LoadSettings, config: ModelConfig, max_model_len: int) -> BlockIndexConfig | None:
    """The indexer of a model that is served with sequences of which it chooses a part. Raises ModelError, naming the
    setting, where it cannot be loaded so."""
    index = config.block_index
    if index is None or max_model_len <= index.longest:
        return None
    asked = (
        ("kv_connector", settings.on_layer is not None),
        ("data_parallel_size", settings.group is not None),
        ("prefill_context_parallel_size", settings.context_rows is not None),
        (f"kv_cache_dtype {settings.kv_cache_dtype}", settings.kv_cache_dtype != "auto"),
        (f"attention {settings.attention}", settings.attention == "flash-attn"),
    )
    for name in (name for name, value in asked if value):
        raise ModelError(
            f"{name}: not for {config.architecture} with a max_model_len of more than {index.longest} tokens, of which "
            "an indexer chooses blocks"
        )
    return index
