"""The bodies of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=256)]
AdapterPath = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadLoraRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/v1/load_lora_adapter`."""

    lora_name: Name
    lora_path: AdapterPath
    """A folder of the machine that the engines run on."""
    load_inplace: bool = False


class UnloadLoraRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/v1/unload_lora_adapter`."""

    lora_name: Name
