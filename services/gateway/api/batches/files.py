"""The fields of an upload."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

MAX_FILENAME = 256

FilePurpose = Literal["batch", "batch_output"]


class ExpiresAfter(Struct, frozen=True, forbid_unknown_fields=True):
    """When a file is to be deleted."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class UploadFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The form of `POST /v1/files`; `expires_after` is two fields of it, `expires_after[anchor]` and
    `expires_after[seconds]`."""

    file: bytes
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None
