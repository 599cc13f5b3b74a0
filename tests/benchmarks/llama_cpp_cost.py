"""What a decode step costs beside llama.cpp, for Llama of 110 M parameters in eight bits and in bfloat16.

    python -m venv /tmp/llama
    CMAKE_ARGS=-DGGML_NATIVE=ON /tmp/llama/bin/pip install llama-cpp-python gguf safetensors
    python -m tests.benchmarks.llama_cpp_cost /tmp/llama/bin/python

Both have the same random weights and one thread each, and take turns; theirs is a process of another environment, whose
keys and values are float16. Processor time of a step, the median; ours samples, theirs ends with the logits.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from services.worker.models.loaded_model import QuantizationChoice
from tests.benchmarks.library_cost import SHAPE, step_milliseconds
from tests.support.worker.tiny_backend import tiny_backend

CONCURRENCIES = (1, 16, 64)
STEPS, ROUNDS, POSITIONS = 14, 3, 512

PEER = r"""
import ctypes, sys, time, statistics
import gguf, llama_cpp as lib, numpy as np
from safetensors import safe_open

folder, positions = sys.argv[1], int(sys.argv[2])
LAYERS, HIDDEN, HEADS, KV, SIZE, VOCAB = map(int, sys.argv[3:9])
NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}

def named(name):
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]

def write(path, kind):
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(positions); out.add_embedding_length(HIDDEN); out.add_block_count(LAYERS)
    out.add_feed_forward_length(SIZE); out.add_head_count(HEADS); out.add_head_count_kv(KV)
    out.add_layer_norm_rms_eps(1e-6); out.add_rope_freq_base(10000.0); out.add_vocab_size(VOCAB)
    out.add_rope_dimension_count(HIDDEN // HEADS); out.add_tokenizer_model("none")
    with safe_open(f"{folder}/model.safetensors", "np") as file:
        for name in file.keys():
            numbers = file.get_tensor(name).astype(np.float32)
            heads = {"q_proj": HEADS, "k_proj": KV}.get(name.split(".")[-2])
            if heads:
                numbers = numbers.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(numbers.shape)
            if numbers.ndim == 1:
                out.add_tensor(named(name), numbers)
            else:
                out.add_tensor(named(name), gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    out.write_header_to_file(); out.write_kv_data_to_file(); out.write_tensors_to_file(); out.close()

def opened(kind):
    path = f"{folder}/{kind.name}.gguf"
    write(path, kind)
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 64 * 64, 512, 512, 64
    settings.n_threads = settings.n_threads_batch = 1
    return lib.llama_init_from_model(model, settings)

silent = lib.llama_log_callback(lambda *_: None)
lib.llama_log_set(silent, ctypes.c_void_p(0))
lib.llama_backend_init()
contexts = {"Q8_0": opened(gguf.GGMLQuantizationType.Q8_0), "BF16": opened(gguf.GGMLQuantizationType.BF16)}
batch = lib.llama_batch_init(64, 0, 1)
print("ready", lib.__version__, lib.llama_print_system_info().decode(), flush=True)
for line in sys.stdin:
    kind, concurrency, steps = line.split()
    context, concurrency, times = contexts[kind], int(concurrency), []
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    draw = np.random.default_rng(0)
    for step in range(16 + int(steps)):
        batch.n_tokens = concurrency
        for row in range(concurrency):
            batch.token[row], batch.pos[row] = int(draw.integers(3, VOCAB)), step
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, row, 1
        began = time.process_time()
        assert lib.llama_decode(context, batch) == 0
        lib.llama_get_logits(context)
        times.append(1e3 * (time.process_time() - began))
    print(statistics.median(times[16:]), flush=True)
"""


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, max_position_embeddings=POSITIONS)).float()
        model.save_pretrained(folder)
        sizes = (SHAPE["num_hidden_layers"], SHAPE["hidden_size"], SHAPE["num_attention_heads"])
        more = (SHAPE["num_key_value_heads"], SHAPE["intermediate_size"], SHAPE["vocab_size"])
        command = [sys.argv[1], "-c", PEER, str(folder), *map(str, (POSITIONS, *sizes, *more))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
            assert peer.stdin
            assert peer.stdout
            print(peer.stdout.readline().strip(), flush=True)
            _compare(folder, _asking(peer.stdin, peer.stdout))
            peer.stdin.close()


def _asking(to: IO[str], out: IO[str]) -> Callable[[str, int], float]:
    def ask(kind: str, concurrency: int) -> float:
        print(kind, concurrency, STEPS, file=to, flush=True)
        return float(out.readline())

    return ask


def _compare(folder: Path, ask: Callable[[str, int], float]) -> None:
    schemes: tuple[QuantizationChoice, ...] = ("int8", "w8a8_int8", "auto")
    settings: dict[str, Any] = {"dtype": "bfloat16", "ops": "native", "max_model_len": POSITIONS, "max_num_seqs": 64}
    settings |= {"kv_memory_bytes": 256 << 20, "max_batch_tokens": 512}
    ours = {each: tiny_backend(folder, quantization=each, **settings) for each in schemes}
    for concurrency in CONCURRENCIES:
        found: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for each, runner in ours.items():
                found.setdefault(f"baton {each}", []).append(step_milliseconds(runner, concurrency, STEPS))
            for kind in ("Q8_0", "BF16"):
                found.setdefault(f"llama.cpp {kind}", []).append(ask(kind, concurrency))
        shown = ", ".join(f"{each} {statistics.median(times):.1f}" for each, times in found.items())
        print(f"{concurrency} sequences, ms: {shown}; load {os.getloadavg()[0]:.0f}", flush=True)


if __name__ == "__main__":
    main()
