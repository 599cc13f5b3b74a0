"""A model that `transformers` knows, from its directory to a decoder: read by the library, its products ours."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from services.worker.distributed.communicator import Communicator
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config import ModelError
from services.worker.models.fallback.adapters import PLAIN_PRODUCTS, adapt, implementation
from services.worker.models.fallback.cached_passes import check_cached_passes
from services.worker.models.fallback.library_config import first_line, has_mxfp4, library_config
from services.worker.models.fallback.library_decoder import HeadPlace, LibraryDecoder
from services.worker.models.fallback.tensor_parallel import RoundedShare, shard_model
from services.worker.ops.interface import Ops, PackedLinear
from services.worker.ops.quantized import Code, quantize

_log = logging.getLogger(__name__)


class LibraryModel:
    """A model in a directory, that `transformers` knows."""

    def __init__(self, folder: Path, *, trust_remote_code: bool) -> None:
        """Reads the configuration; takes no memory for weights. Raises ModelError where the library does not know the
        model, or knows it as none that we can serve."""
        self._folder = folder
        self._trusts = trust_remote_code
        self.config, self._own = library_config(folder, trust_remote_code=trust_remote_code)

    @property
    def has_codes(self) -> bool:
        """Whether the checkpoint is quantised."""
        return has_mxfp4(self._own)

    @torch.inference_mode()
    def decoder(
        self,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        communicator: Communicator,
        *,
        dummy: bool,
        quantization: Code | None = None,
    ) -> LibraryDecoder:
        """With this rank's share of the directory's weights, or of random ones where `dummy`. The whole is read into
        main memory before; `quantization` is what linear layers are rounded to, the head to int8. Raises ModelError for
        a broken checkpoint, and where its layers are not of a kind that can be served, or not by so many ranks."""
        if dummy:
            model = _dummy_model(self._own, dtype, trust_remote_code=self._trusts)
        else:
            with open_checkpoint(self._folder, dtype) as files:  # cut files are found before memory is taken
                _check_blocks(self._folder, set(files.names))
                model = _read_model(self._folder, self._own, dtype, trust_remote_code=self._trusts)
        adapt(model, self._own)
        split_heads = communicator.world_size > 1 and shard_model(model, communicator, quantization)
        model = model.to(device)
        own: Any = model
        pack_products(model, ops, quantization, own.get_output_embeddings())
        place = HeadPlace(communicator.rank, communicator.world_size, split_heads)
        made = LibraryDecoder(model, ops, self.config.hidden_size, max_model_len, device, place)
        check_cached_passes(made, self.config.vocab_size, device)
        return made


def _check_blocks(folder: Path, names: set[str]) -> None:
    """Raises ModelError where weights in blocks of four bits have no scales, which the library would not name."""
    for name in sorted(names):
        scales = f"{name.removesuffix('_blocks')}_scales"
        if name.endswith("_blocks") and scales not in names:
            raise ModelError(f"{folder}: the checkpoint has no tensor {scales}")


def _read_model(folder: Path, config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> nn.Module:
    """The model with the weights of `folder`, on the CPU. Raises ModelError where a weight is missing or of another
    shape: the library would make one up."""
    own: Any = transformers  # its stubs know less of these than is there
    own.logging.set_verbosity_error()  # what it warns of is looked at here
    own.logging.disable_progress_bar()
    try:
        model, info = own.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            # Of blocks of four bits, numbers are made as they are read: the library's products of them need a GPU.
            quantization_config=own.Mxfp4Config(dequantize=True) if has_mxfp4(config) else None,
            dtype=dtype,
            attn_implementation=implementation(config),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # of the library, of safetensors, or of the model's own code
        raise ModelError(f"{folder}: transformers cannot read the checkpoint: {first_line(error)}") from None
    for name in sorted(info["missing_keys"]):
        raise ModelError(f"{folder}: the checkpoint has no tensor {name}")
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ModelError(f"{folder}: tensor {name} has shape {list(found)}, the config asks for {list(wanted)}")
    if unused := sorted(info["unexpected_keys"]):
        _log.warning("%d tensors of the checkpoint are not used, such as %s", len(unused), unused[0])
    ready: nn.Module = model.eval().requires_grad_(False)
    return ready


def _dummy_model(config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> nn.Module:
    """The model with random weights, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        own: Any = AutoModelForCausalLM
        model: nn.Module = own.from_config(
            config, dtype=dtype, attn_implementation=implementation(config), trust_remote_code=trust_remote_code
        )
    return model.eval().requires_grad_(False)


class PackedProduct(nn.Module):
    """A linear layer whose weight `ops` multiplies."""

    def __init__(self, ops: Ops, packed: PackedLinear, dtype: torch.dtype, outputs: int, device: torch.device) -> None:
        super().__init__()
        self._ops = ops
        self._packed = packed
        self._outputs = outputs
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
        """Empty: some modules ask for its dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out], in x's dtype."""
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):
            return x.new_empty(*x.shape[:-1], self._outputs)
        return self._ops.linear(rows.contiguous(), self._packed).to(x.dtype).view(*x.shape[:-1], self._outputs)


def pack_products(model: nn.Module, ops: Ops, quantization: Code | None, output: nn.Module | None = None) -> None:
    """Replaces the linear layers by such as `ops` computes: batch invariant and faster where those are native. A
    weight that others share, as a tied head's, stays where it is, and is copied. `output`:
    the head among them, which is rounded to int8 at least."""
    head = next((name for name, each in model.named_modules() if each is output), None)
    for name, module in list(model.named_modules()):
        if isinstance(module, RoundedShare):
            packed, dtype, outputs = module.pack(ops), module.weight.dtype, module.outputs
        elif (weight := _weight_of(module)) is not None:
            own: Any = module
            code: Code | None = "int8" if quantization and name == head else quantization
            packed, dtype, outputs = _pack(ops, weight, own.bias, code), weight.dtype, len(weight)
        else:
            continue
        parent, _, last = name.rpartition(".")
        made = PackedProduct(ops, packed, dtype, outputs, next(module.parameters()).device)
        setattr(model.get_submodule(parent), last, made)


def _weight_of(module: nn.Module) -> Tensor | None:
    """[out, in] of a linear layer; None: it is none, or has no numbers for weights."""
    if isinstance(module, nn.Linear) and (type(module) is nn.Linear or type(module).__name__ in PLAIN_PRODUCTS):
        weight = module.weight.detach()
    elif type(module) is Conv1D:
        weight = module.weight.detach().T
    else:
        return None
    return weight if weight.dtype in (torch.float32, torch.bfloat16, torch.float16) else None


def _pack(ops: Ops, weight: Tensor, bias: Tensor | None, code: Code | None) -> PackedLinear:
    weight, own = weight.contiguous(), None if bias is None else bias.detach()
    return ops.pack_linear(weight, own) if code is None else ops.pack_quantized(quantize(weight, code), own)
