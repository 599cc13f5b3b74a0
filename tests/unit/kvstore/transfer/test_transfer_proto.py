"""The committed Python of `kvstore/transfer/transfer.proto` is what the compiler makes of it."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from kvstore.transfer import transfer_pb2
from tests.support.paths import REPOSITORY

PROTO = "kvstore/transfer/transfer.proto"


def test_what_is_committed_is_what_the_proto_file_says(tmp_path: Path) -> None:
    """Compares meanings, not texts: the text names the compiler's version."""
    made = tmp_path / "made"
    assert protoc.main(["protoc", f"-I{REPOSITORY}", f"--descriptor_set_out={made}", PROTO]) == 0
    [proto] = FileDescriptorSet.FromString(made.read_bytes()).file
    proto.ClearField("source_code_info")
    committed = FileDescriptorProto()
    transfer_pb2.DESCRIPTOR.CopyToProto(committed)
    for message in proto.message_type:
        for field in message.field:
            field.ClearField("json_name")
    assert committed == proto


def test_the_types_that_are_committed_name_every_field() -> None:
    types = (REPOSITORY / "kvstore/transfer/transfer_pb2.pyi").read_text()
    for message in transfer_pb2.DESCRIPTOR.message_types_by_name.values():
        assert f"class {message.name}(" in types
        for field in message.fields:
            assert f"{field.name.upper()}_FIELD_NUMBER" in types
