"""Who reads what the configuration says of models whose layers have states."""

from __future__ import annotations

from services.worker.models.hf_layers.convolution import CONVOLUTION_ARCHITECTURES, LFM3
from services.worker.models.hf_layers.delta import DELTA_ARCHITECTURES, KIMI_LINEAR, LING_3, OLMO_HYBRID
from services.worker.models.hf_layers.lightning import LIGHTNING_ARCHITECTURES
from services.worker.models.hf_layers.mamba import MAMBA_ARCHITECTURES
from services.worker.models.hf_layers.selective import RECURRENT_GEMMA, SELECTIVE_ARCHITECTURES
from services.worker.models.hf_layers.shared import ZAMBA2
from services.worker.models.hf_layers.tensor_names import NEMOTRON_H
from services.worker.models.states.reading.bailing import LING_2_5, bailing_model_config, refuse_ling_2_5
from services.worker.models.states.reading.convolution import convolution_model_config
from services.worker.models.states.reading.delta import delta_model_config
from services.worker.models.states.reading.falcon import falcon_model_config
from services.worker.models.states.reading.kimi import kimi_model_config
from services.worker.models.states.reading.lfm3 import lfm3_model_config
from services.worker.models.states.reading.mamba import mamba_model_config
from services.worker.models.states.reading.minimax import minimax_model_config
from services.worker.models.states.reading.nemotron import nemotron_model_config
from services.worker.models.states.reading.olmo import olmo_model_config
from services.worker.models.states.reading.recurrent import recurrent_model_config
from services.worker.models.states.reading.selective import selective_model_config
from services.worker.models.states.reading.zamba import zamba_model_config

STATE_READERS = {
    **dict.fromkeys(MAMBA_ARCHITECTURES, mamba_model_config),
    NEMOTRON_H: nemotron_model_config,
    "FalconH1ForCausalLM": falcon_model_config,
    **dict.fromkeys(DELTA_ARCHITECTURES, delta_model_config),
    OLMO_HYBRID: olmo_model_config,
    KIMI_LINEAR: kimi_model_config,
    **dict.fromkeys(LING_3, bailing_model_config),
    **dict.fromkeys(LING_2_5, refuse_ling_2_5),
    **dict.fromkeys(LIGHTNING_ARCHITECTURES, minimax_model_config),
    **dict.fromkeys(SELECTIVE_ARCHITECTURES, selective_model_config),
    ZAMBA2: zamba_model_config,
    RECURRENT_GEMMA: recurrent_model_config,
    **dict.fromkeys(CONVOLUTION_ARCHITECTURES, convolution_model_config),
    LFM3: lfm3_model_config,
}
"""By architecture."""
