"""The HTTP port by TLS: streams, certificates that are renewed, clients that have to show one, files that are none."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import openai
import pytest

from deploy.cli.batch.http_server import http_server
from deploy.cli.gateway_client import served_models, wait_until_ready
from deploy.errors import CommandError
from services.bench.client.http_client import HttpClient
from services.gateway.api.batches.lines import BatchRequest
from services.gateway.config import GatewayConfig
from services.gateway.http import certificates
from services.gateway.http.certificates import CertificateError
from shared.bus.memory_bus import MemoryBus
from shared.tls.client_context import CERTIFICATE, KEY
from tests.support.cluster.tls_authority import Authority
from tests.support.gateway.fake_services import MODEL, eventually
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack

HELLO: Any = [{"role": "user", "content": "hello"}]


class Files(NamedTuple):
    certificate: Path
    key: Path
    authority: Path


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Files:
    return Files(*(Path(shutil.copy(file, tmp_path)) for file in authority.files("gateway")))


def client(stack: GatewayStack, files: Files, shown: tuple[str, str] | None = None) -> openai.AsyncOpenAI:
    trust = ssl.create_default_context(cafile=files.authority)
    if shown is not None:
        trust.load_cert_chain(*shown)
    url = stack.url.replace("http:", "https:")
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=httpx2.AsyncClient(verify=trust)
    )


def serial(stack: GatewayStack, files: Files) -> str:
    """Of the certificate that a new connection is shown."""
    trust = ssl.create_default_context(cafile=files.authority)
    address = ("127.0.0.1", stack.gateway.server.port)
    with socket.create_connection(address, 30) as plain, trust.wrap_socket(plain, server_hostname="127.0.0.1") as tls:
        shown = tls.getpeercert()
        assert shown is not None
        return str(shown["serialNumber"])


async def test_streams_come_by_tls_and_plain_http_gets_nothing(memory_bus: MemoryBus, files: Files) -> None:
    async with (
        gateway_stack(memory_bus, ssl_certfile=files.certificate, ssl_keyfile=files.key) as stack,
        client(stack, files) as https,
    ):
        assert [model.id async for model in https.models.list()] == [MODEL]
        chunks = [
            chunk async for chunk in await https.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        ]
        assert chunks[-1].choices[0].finish_reason == "stop"
        with pytest.raises(httpx2.TransportError):
            await stack.http.get("/v1/models")
        with pytest.raises(openai.APIConnectionError):  # whoever trusts only others
            await openai.AsyncOpenAI(base_url=https.base_url, api_key="none", max_retries=0).models.list()
        assert await wait_until_ready(stack.url.replace("http:", "https:"), 30)


async def test_a_renewed_certificate_is_shown_to_new_connections_and_a_torn_one_to_none(
    memory_bus: MemoryBus, files: Files, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(f"{certificates.__name__}.POLL_SECONDS", 0.01)
    caplog.set_level(logging.INFO, certificates.__name__)
    async with (
        gateway_stack(memory_bus, ssl_certfile=files.certificate, ssl_keyfile=files.key) as stack,
        client(stack, files) as https,
    ):
        before = await asyncio.to_thread(serial, stack, files)
        stream = await https.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        files.key.write_text("half of a k")
        await eventually(lambda: "the one before stays" in caplog.text)
        assert await asyncio.to_thread(serial, stack, files) == before
        for new, old in zip(authority.files("renewed"), files, strict=True):
            shutil.copy(new, old)
        await eventually(lambda: "certificate read" in caplog.text)
        assert await asyncio.to_thread(serial, stack, files) != before
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"


async def test_clients_show_a_certificate_where_authorities_are_given(
    memory_bus: MemoryBus, files: Files, authority: Authority, tmp_path: Path
) -> None:
    tls = {"ssl_certfile": files.certificate, "ssl_keyfile": files.key, "ssl_ca_certs": files.authority}
    stranger = Authority(tmp_path / "another").files("stranger")[:2]
    async with gateway_stack(memory_bus, **tls) as stack:
        async with client(stack, files, authority.files("alice")[:2]) as known:
            assert [model.id async for model in known.models.list()] == [MODEL]
        for shown in (None, stranger):
            async with client(stack, files, shown) as unknown:
                with pytest.raises(openai.APIConnectionError):
                    await unknown.models.list()


async def test_commands_show_the_certificate_that_the_environment_names(
    memory_bus: MemoryBus, files: Files, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`baton chat` and `lora` by one client, `batch` and `bench` by their own."""
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))
    certificate, key = authority.files("alice")[:2]
    one = tmp_path / "alice.pem"
    shutil.copy(certificate, one)
    with one.open("a") as both:
        both.write(Path(key).read_text())  # noqa: ASYNC240
    request = BatchRequest("a", "b", "/v1/chat/completions", json.dumps({"model": MODEL, "messages": HELLO}).encode())
    tls = {"ssl_certfile": files.certificate, "ssl_keyfile": files.key, "ssl_ca_certs": files.authority}
    async with gateway_stack(memory_bus, **tls) as stack:
        url = stack.url.replace("http:", "https:")
        with pytest.raises(CommandError, match=r"wants a certificate of its clients, BATON_CLIENT_CERT \(and"):
            await asyncio.to_thread(served_models, url, None)
        for shown in ((certificate, key), (str(one), None)):
            for name, file in zip((CERTIFICATE, KEY), shown, strict=True):
                monkeypatch.setenv(name, file or "")
            assert await asyncio.to_thread(served_models, url, None) == [MODEL]
            async with http_server(url, None, 2, 0.0) as ask:
                assert (await ask(request)).status == 200
            assert await HttpClient(url).post(request.url, request.body, lambda data, at: None, 30) == 200
    monkeypatch.setenv(KEY, str(tmp_path / "none.key"))
    with pytest.raises(CommandError, match=r"BATON_CLIENT_KEY .*none\.key: No such file"):
        served_models(url, None)
    monkeypatch.setenv(CERTIFICATE, "")
    with pytest.raises(CommandError, match="BATON_CLIENT_CERT has to name its certificate"):
        served_models(url, None)


@pytest.mark.parametrize("shown", ["none", "its own", "a stranger's"])
async def test_a_start_waits_by_tls_for_a_gateway_that_wants_certificates(
    memory_bus: MemoryBus,
    files: Files,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shown: str,
) -> None:
    if shown != "none":
        of = authority if shown == "its own" else Authority(tmp_path / "another")
        for name, file in zip((CERTIFICATE, KEY), of.files("operator")[:2], strict=True):
            monkeypatch.setenv(name, file)
    tls = {"ssl_certfile": files.certificate, "ssl_keyfile": files.key, "ssl_ca_certs": files.authority}
    async with gateway_stack(memory_bus, **tls) as stack:
        url = stack.url.replace("http:", "https:")
        assert await wait_until_ready(url, 60, wants_certificates=True)
        assert not await wait_until_ready(stack.url, 0.2, wants_certificates=True), "it speaks TLS alone"
    assert not await wait_until_ready(url, 0.2, wants_certificates=True), "nobody is there any more"


def test_files_that_cannot_be_used_are_named_with_the_reason(files: Files, tmp_path: Path) -> None:
    def used(**more: Path) -> None:
        found = GatewayConfig(instance="g", **{"ssl_certfile": files.certificate, "ssl_keyfile": files.key, **more})
        tls = found.certificate_files()
        assert tls is not None
        tls.context()

    used()
    locked = tmp_path / "locked.key"
    command = ("openssl", "ec", "-aes256", "-passout", "pass:x", "-in", files.key, "-out", locked)
    subprocess.run(command, check=True, capture_output=True)
    other = Path(Authority(tmp_path / "another").files("other")[1])
    absent = tmp_path / "absent.pem"
    for more, said in (
        ({"ssl_certfile": absent}, r"absent\.pem and .*gateway\.key: No such file"),
        ({"ssl_keyfile": files.authority}, r"ca\.pem: no PEM file|no start line|not .*key"),
        ({"ssl_keyfile": other}, "mismatch"),
        ({"ssl_keyfile": locked}, "passphrase"),
        ({"ssl_ca_certs": files.key}, r"gateway\.key: no "),
    ):
        with pytest.raises(CertificateError, match=said):
            used(**more)
    with pytest.raises(ValueError, match="ssl_ca_certs: ssl_certfile is needed, too"):
        GatewayConfig(instance="g", ssl_keyfile=files.key)
    with pytest.raises(ValueError, match="ssl_ca_certs: ssl_certfile is needed, too"):
        GatewayConfig(instance="g", ssl_ca_certs=files.authority)
