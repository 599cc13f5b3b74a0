from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchRequest(_message.Message):
    __slots__ = ("layout", "hashes", "patience")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    layout: str
    hashes: bytes
    patience: float
    def __init__(self, layout: _Optional[str] = ..., hashes: _Optional[bytes] = ..., patience: _Optional[float] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("begins", "payload")
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    begins: Block
    payload: bytes
    def __init__(self, begins: _Optional[_Union[Block, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("hash", "parent", "tokens", "checksums", "waited")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    parent: bytes
    tokens: int
    checksums: bytes
    waited: bool
    def __init__(self, hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., tokens: _Optional[int] = ..., checksums: _Optional[bytes] = ..., waited: _Optional[bool] = ...) -> None: ...
