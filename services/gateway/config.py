"""Every setting of a gateway: type, limits, default and help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args
from urllib.parse import urlsplit

from msgspec import Meta

from services.gateway.api.fields.reasoning_effort import ReasoningEffortMap, read_effort_map
from services.gateway.batches.file_store import FileLimits
from services.gateway.core.open_request import RetryPolicy
from services.gateway.core.overflow import ModelNames, OverflowLimits, ProviderDialect
from services.gateway.database.database_url import check_database_url, open_database
from services.gateway.database.records import Database
from services.gateway.database.sql_database import SqlDatabase
from services.gateway.federation.settings import FederationSettings
from services.gateway.parsing.parser_choice import ParserChoice
from services.gateway.response_store import ResponseLimits
from shared.addresses import is_loopback
from shared.config import ServiceConfig
from shared.messages.dialects import REASONING_ALIASES, TOOL_ALIASES, ReasoningFormat, ToolFormat
from shared.messages.generation import StreamInterval
from shared.settings import ByteSize, ContainerVariable, Port, UpOption

if TYPE_CHECKING:  # `baton up` reads the settings and serves nobody: what they are for is imported where it is made
    from services.gateway.api.generation import RequestLimits
    from services.gateway.batches.batch_run import BatchLimits
    from services.gateway.http.bodies.body_budget import BodyLimits
    from services.gateway.http.certificates import CertificateFiles
    from services.gateway.http.generation import StreamSettings
    from services.gateway.overflow_provider import OverflowSettings

Seconds = Annotated[float, Meta(gt=0)]
Positive = Annotated[int, Meta(ge=1)]

BODY_PATIENCE = 5.0
"""Seconds that a body waits for room: longer than a burst takes to be read, shorter than clients' timeouts."""


class GatewayConfig(ServiceConfig, frozen=True, kw_only=True):
    """The settings of one gateway process; each is a flag, an environment variable and a TOML key."""

    host: Annotated[str, Meta(description="Address that the HTTP port listens on."), UpOption(placed=True)] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="HTTP port; 0 picks a free one."), UpOption(placed=True)] = 8000
    reuse_port: Annotated[bool, Meta(description="Share the port with other gateway processes.")] = False
    published_host: Annotated[
        str | None,
        Meta(description="Address at which something else, such as Docker, publishes the port; default: `host`."),
        ContainerVariable("BATON_HOST", "127.0.0.1"),
    ] = None
    insecure: Annotated[
        bool,
        Meta(description="Serve without API keys at an address that other machines can reach."),
        UpOption(),
        ContainerVariable(),
    ] = False
    api_keys: Annotated[
        tuple[str, ...],
        Meta(description="API keys. Every client must send one of them; none: no key is required."),
        UpOption(name="api_key", placed=True, environment="BATON_API_KEY"),
        ContainerVariable(),
    ] = ()
    """`KEY` or `NAME=sha256:HASH`; each may do everything."""
    keys_file: Annotated[
        Path | None,
        Meta(description="TOML file of API keys and what each may do (`baton keys`); read again when it changes."),
        UpOption(environment="BATON_KEYS_FILE"),
    ] = None
    share_prefixes: Annotated[
        bool,
        Meta(description="Let requests of different API keys share cached prefixes, which shows each what others ask."),
        UpOption("KV store"),
    ] = False
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="Web origins that browsers may call from; * for all.")
    ] = ()
    root_path: Annotated[
        str,
        Meta(
            pattern=r"^(/[A-Za-z0-9._~-]+)*\Z",
            description="Path below which a proxy passes requests on, e.g. /llm; the API answers there, too.",
        ),
        UpOption(),
        ContainerVariable(),
    ] = ""
    ssl_certfile: Annotated[
        Path | None,
        Meta(description="PEM file of a certificate and its chain, for HTTPS; read again when it changes."),
        UpOption(),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        Meta(description="PEM file of the certificate's private key, without a passphrase; default: `ssl_certfile`."),
        UpOption(),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        Meta(description="PEM file of authorities: clients must show a certificate that one of them has signed."),
        UpOption(),
    ] = None
    console: Annotated[
        bool,
        Meta(description="Serve the console, a page that shows the stack and operates it, at /console."),
        UpOption(),
        ContainerVariable(),
    ] = True
    max_open_requests: Annotated[
        Positive, Meta(description="Open sequences; above it requests are refused with 429.")
    ] = 4096
    max_connections: Annotated[
        Positive, Meta(description="Client connections; above it new ones are refused with 503.")
    ] = 8192
    max_body: Annotated[ByteSize, Meta(description="Size of a request's body; a larger one is refused with 413.")] = (
        16 * 2**20
    )
    max_media_body: Annotated[
        ByteSize,
        Meta(
            description="Size of the body of a chat where a model takes images, videos or sounds, as far as these make "
            "it larger than `max_body`; never more than half of `max_bodies`."
        ),
    ] = 72 * 2**20
    max_bodies: Annotated[
        ByteSize,
        Meta(description="Bytes of the bodies of all open requests; beyond it requests wait 5 s for room, then 503."),
    ] = 512 * 2**20
    body_s: Annotated[Seconds, Meta(description="Seconds that a client may take to send a body; then 408.")] = 60.0
    body_stall_s: Annotated[Seconds, Meta(description="Seconds without a byte of an unfinished body; then 408.")] = 10.0
    max_choices: Annotated[Positive, Meta(description="Sequences of one request: prompts times n.")] = 128
    max_stop: Annotated[Positive, Meta(description="Stop strings in one request.")] = 16
    max_logprobs: Annotated[int, Meta(ge=0, le=1000, description="Upper bound of `logprobs` and `top_logprobs`.")] = 20
    max_images: Annotated[int, Meta(ge=0, description="Images in one chat.")] = 16
    max_videos: Annotated[int, Meta(ge=0, description="Videos in one chat.")] = 4
    max_sounds: Annotated[int, Meta(ge=0, description="Sounds in one chat.")] = 4
    image_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts (HOST or HOST:PORT) that images and videos may be fetched from; none: only data URIs "
            "are taken."
        ),
        UpOption("Model", name="image_host"),
    ] = ()
    max_audio_s: Annotated[
        Seconds, Meta(description="Seconds of a sound that is to be written down, in a file of 25 MiB at most.")
    ] = 7200.0
    audio_decode_s: Annotated[
        Seconds, Meta(description="Seconds that decoding a window of a sound may take, half a minute of it; then 400.")
    ] = 10.0
    image_fetch_s: Annotated[
        Seconds, Meta(description="Seconds that fetching an image or a video may take; then 400.")
    ] = 10.0
    video_decode_s: Annotated[
        Seconds, Meta(description="Seconds that decoding two frames of a video may take; then 400.")
    ] = 10.0
    enable_force_include_usage: Annotated[
        bool,
        Meta(description="Every chunk of every stream of OpenAI's chats and completions has the usage so far."),
        UpOption("Model"),
    ] = False
    allow_request_template: Annotated[
        bool, Meta(description="Accept chat templates from clients (`chat_template`).")
    ] = False
    enable_prefix_caching: Annotated[
        bool,
        Meta(description="Reuse computed blocks of earlier prompts; a request may say no for itself."),
        UpOption("KV store"),
    ] = True
    """The gateway marks every request; engines, KV stores and routers keep and look for no block of a request that is
    marked so."""
    tool_call_parser: Annotated[
        str,
        Meta(
            description="Format of the model's tool calls: auto (found in its chat template), none, "
            + ", ".join([*get_args(ToolFormat), *TOOL_ALIASES])
            + ", or a plug-in's (docs/plugins.md)."
        ),
        UpOption("Model"),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            description="Format of the model's reasoning: auto (found in its chat template), none, "
            + ", ".join([*get_args(ReasoningFormat), *REASONING_ALIASES])
            + ", or a plug-in's (docs/plugins.md)."
        ),
        UpOption("Model"),
    ] = "auto"
    reasoning_effort_map: ReasoningEffortMap = "{}"
    attempts: Annotated[
        Positive, Meta(description="Consecutive attempts of a request that may fail without a new token.")
    ] = 6
    silence_s: Annotated[Seconds, Meta(description="Seconds without output after which the engine is probed.")] = 2.0
    placement_s: Annotated[Seconds, Meta(description="Seconds to place a request, before the next attempt.")] = 5.0
    queue_s: Annotated[Seconds, Meta(description="Seconds that a request may wait for an engine; then 503.")] = 120.0
    wait_for_engines_s: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description="Seconds that new requests wait while no engine of their model is ready; then 503.",
        ),
        UpOption("Capacity"),
    ] = 2.0
    """The same holds while there is no tokenizer, coordinator, detokenizer or bus. At most a coordinator's
    `queue_timeout`, as it keeps no request for longer."""
    request_s: Annotated[Seconds, Meta(description="Seconds that a request may take in all.")] = 3600.0
    bus_outage_s: Annotated[
        Seconds,
        Meta(description="Seconds that open requests wait while the bus is away; then 503."),
        UpOption("Capacity"),
    ] = 60.0
    """New requests wait for `wait_for_engines_s`, if that is less."""
    refuse_poisoned_s: Annotated[
        Seconds, Meta(description="Seconds for which a request is refused, after processes died of an equal one.")
    ] = 600.0
    keep_alive_s: Annotated[Seconds, Meta(description="Seconds of silence after which a stream gets a comment.")] = 15.0
    stream_interval: Annotated[
        StreamInterval,
        Meta(description="Steps whose tokens a stream gets together, behind the first; requests may say another."),
        UpOption("Capacity"),
    ] = 1
    unread_limit: Annotated[
        ByteSize, Meta(description="Bytes that a streaming client may leave unread before it is disconnected.")
    ] = 2**20
    resume_s: Annotated[
        Seconds,
        Meta(description="Seconds for which a resumable stream waits for its client, and can be read after its end."),
    ] = 120.0
    resumable_memory: Annotated[
        ByteSize, Meta(description="Memory of resumable streams, copies of other gateways' included; then 503.")
    ] = 64 * 2**20
    overflow: Annotated[
        str | None,
        Meta(
            description="Base URL, with its /v1, of an OpenAI-compatible provider that gets what cannot be served here "
            "in time."
        ),
        UpOption("Overflow"),
    ] = None
    overflow_key: Annotated[
        str | None,
        Meta(description="API key for the provider; better set by environment than by flag."),
        UpOption("Overflow", environment="BATON_OVERFLOW_KEY"),
    ] = None
    overflow_model: Annotated[
        tuple[str, ...],
        Meta(description="The provider's name of a model, as NAME=NAME_THERE, or NAME_THERE for all others."),
        UpOption("Overflow"),
    ] = ()
    """Without any, models have the same names there. With NAME=NAME_THERE only, others are not sent there."""
    overflow_dialect: Annotated[
        ProviderDialect,
        Meta(description="Fields that the provider understands; requests with others stay here."),
        UpOption("Overflow"),
    ] = "openai"
    """vllm and baton are for servers of the same model, as they also send token ids there."""
    overflow_wait_s: Annotated[
        Seconds,
        Meta(description="Seconds to the first token, predicted or passed, from which on the provider is asked."),
        UpOption("Overflow"),
    ] = 10.0
    overflow_silence_s: Annotated[
        Seconds, Meta(description="Seconds that a provider's stream may be silent, from the request on.")
    ] = 20.0
    overflow_answer_s: Annotated[Seconds, Meta(description="Seconds that a provider's whole answer may take.")] = 600.0
    overflow_concurrency: Annotated[
        Positive, Meta(description="Requests of one gateway that may be open at the provider.")
    ] = 64
    overflow_requests_per_minute: Annotated[
        Positive, Meta(description="Requests a minute that one gateway sends to the provider, at most.")
    ] = 600
    overflow_tokens_per_day: Annotated[
        Positive,
        Meta(description="Tokens a day, by the provider's own count, after which a gateway sends it no more."),
        UpOption("Overflow"),
    ] = 10_000_000
    """Counted from the gateway's start. What is open then still goes on."""
    cluster: Annotated[
        str | None,
        Meta(description="Name of this stack among the clusters of a federation, 1 to 24 of A-Z a-z 0-9 -."),
        UpOption("Federation", unset="in no federation"),
    ] = None
    federation_url: Annotated[
        str | None,
        Meta(description="nats://USER:PASSWORD@HOST:PORT of the NATS server that other clusters reach."),
    ] = None
    federation_address: Annotated[
        str,
        Meta(description="HOST:PORT where other clusters reach that server."),
    ] = ""
    federation_model: Annotated[
        str,
        Meta(pattern="^([0-9a-f]{2}){0,32}\\Z", description="Fingerprint of the model's files, in hexadecimal."),
    ] = ""
    """Clusters with another one for the same name are refused; empty: none is."""
    federation_state: Annotated[
        Path | None,
        Meta(description="File that remembers whether this cluster is drained; none: forgotten with its last gateway."),
    ] = None
    federation_wait_s: Annotated[
        Seconds,
        Meta(description="Seconds that a request may queue here while another cluster has room."),
        UpOption("Federation"),
    ] = 1.0
    database: Annotated[
        str | None,
        Meta(
            description="URL of the database of what is kept for clients, one for a stack: sqlite:////PATH, "
            "postgresql://… or redis://…."
        ),
        UpOption("Run", unset="a SQLite file in the run directory", environment="BATON_DATABASE"),
        ContainerVariable(),
    ] = None
    """All gateways of a stack need the same one, so gateways on several hosts need a server."""
    database_file: Annotated[
        Path | None, Meta(description="SQLite file where no `database` is given; none: nothing is kept.")
    ] = None
    responses_kept: Annotated[
        int, Meta(ge=0, le=10**9, description="Stored responses of one API key; the oldest go first. 0: none.")
    ] = 10_000
    responses_size: Annotated[
        ByteSize, Meta(description="Bytes of the stored responses of one API key; the oldest go first.")
    ] = 2**30
    responses_s: Annotated[Seconds, Meta(description="Seconds after which a stored response is forgotten.")] = (
        30 * 86_400.0
    )
    max_file: Annotated[ByteSize, Meta(description="Bytes of a file that clients upload; a larger one gets a 413.")] = (
        200 * 2**20
    )
    max_files: Annotated[Positive, Meta(description="Files that are kept for one API key.")] = 1000
    max_stored: Annotated[ByteSize, Meta(description="Bytes of all files that are kept for one API key.")] = 10 * 2**30
    file_retention_s: Annotated[
        Seconds, Meta(description="Seconds after which files and batches are removed, unless a client says when.")
    ] = 30 * 86_400.0
    max_batches: Annotated[Positive, Meta(description="Batches that are kept for one API key.")] = 10_000
    max_batch_lines: Annotated[Positive, Meta(description="Requests in one batch.")] = 50_000
    batch_concurrency: Annotated[
        Positive, Meta(description="Requests of batches that a gateway has under way, however idle the engines are.")
    ] = 64
    batch_lease_s: Annotated[
        Annotated[float, Meta(ge=1)],
        Meta(description="Seconds after which another gateway goes on with the batches of one that says nothing."),
    ] = 15.0
    read_timeout_s: Annotated[
        Seconds, Meta(description="Seconds that a client may take to read the end of a response.")
    ] = 60.0

    def __post_init__(self) -> None:
        """Raises ValueError where no body of `max_body` bytes would ever find room, or strangers would, or where a
        parser is none that is built in or installed."""
        if self.max_bodies < 2 * self.max_body:
            raise ValueError(f"max_bodies {self.max_bodies}: it must be at least twice max_body ({self.max_body})")
        if self.overflow is not None:
            url = urlsplit(self.overflow)
            if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment or url.username:
                raise ValueError("overflow: an http:// or https:// URL is allowed, without user, password and query")
        ModelNames.parse(self.overflow_model)
        self.certificate_files()
        self.parsers().check()
        read_effort_map(self.reasoning_effort_map)
        self.federation().check()
        if self.database is not None:
            check_database_url(self.database)
        if self.reachable and not (self.api_keys or self.keys_file or self.insecure):
            raise ValueError(
                f"host {self.published_host or self.host}: other machines could use this one without an API key; set "
                "a key (--api-key, or BATON_API_KEY), a file of keys (--keys-file), or --insecure"
            )

    @property
    def reachable(self) -> bool:
        """Whether other machines can reach the port."""
        return not is_loopback(self.published_host or self.host)

    def certificate_files(self) -> CertificateFiles | None:
        """Returns the files of TLS; None where the port speaks plain HTTP. Raises ValueError where a key or authorities
        are given without a certificate."""
        if self.ssl_certfile is None:
            if self.ssl_keyfile or self.ssl_ca_certs:
                raise ValueError("ssl_keyfile, ssl_ca_certs: ssl_certfile is needed, too")
            return None
        from services.gateway.http.certificates import CertificateFiles

        return CertificateFiles(self.ssl_certfile, self.ssl_keyfile or self.ssl_certfile, self.ssl_ca_certs)

    def federation(self) -> FederationSettings:
        """Returns its part in a federation."""
        return FederationSettings(
            instance=self.instance,
            namespace=self.namespace,
            cluster=self.cluster,
            url=self.federation_url,
            address=self.federation_address,
            model=self.federation_model,
            block_size=self.block_size,
        )

    def policy(self) -> RetryPolicy:
        """Returns the deadlines and the limits of retries."""
        return RetryPolicy(
            silence_s=self.silence_s,
            placement_s=self.placement_s,
            queue_s=self.queue_s,
            wait_for_engines_s=self.wait_for_engines_s,
            request_s=self.request_s,
            bus_outage_s=self.bus_outage_s,
            elsewhere_s=self.federation_wait_s,
            attempts=self.attempts,
            refuse_s=self.refuse_poisoned_s,
            attempts_in_all=max(self.attempts, RetryPolicy().attempts_in_all),
        )

    def overflow_settings(self) -> OverflowSettings | None:
        """Returns how the overflow provider is reached; None where there is none."""
        if self.overflow is None:
            return None
        from services.gateway.overflow_provider import OverflowSettings

        return OverflowSettings(
            url=self.overflow,
            key=self.overflow_key,
            models=ModelNames.parse(self.overflow_model),
            dialect=self.overflow_dialect,
            wait=self.overflow_wait_s,
            silence=self.overflow_silence_s,
            answer=self.overflow_answer_s,
            limits=OverflowLimits(
                self.overflow_concurrency, self.overflow_requests_per_minute, self.overflow_tokens_per_day
            ),
        )

    def open_database(self) -> Database | None:
        """Returns the database, which connects when it is first used; None where there is none. Raises ImportError
        where its library is not installed."""
        if self.database is not None:
            return open_database(self.database)
        return None if self.database_file is None else SqlDatabase(self.database_file)

    def response_limits(self) -> ResponseLimits:
        """Returns how much is stored of responses."""
        return ResponseLimits(self.responses_kept, self.responses_size, self.responses_s)

    def file_limits(self) -> FileLimits:
        """Returns what one API key may keep."""
        return FileLimits(self.max_file, self.max_files, self.max_stored, self.file_retention_s)

    def batch_limits(self) -> BatchLimits:
        """Returns what bounds batches."""
        from services.gateway.batches.batch_run import BatchLimits

        return BatchLimits(
            max_lines=self.max_batch_lines,
            max_line=self.max_body,
            concurrency=self.batch_concurrency,
            lease=self.batch_lease_s,
            retention=self.file_retention_s,
        )

    def limits(self) -> RequestLimits:
        """Returns what a single request may ask for."""
        from services.gateway.api.generation import RequestLimits

        return RequestLimits(
            max_choices=self.max_choices,
            max_stop=self.max_stop,
            max_logprobs=self.max_logprobs,
            allow_request_template=self.allow_request_template,
            allow_prefix_caching=self.enable_prefix_caching,
            force_usage=self.enable_force_include_usage,
            efforts=read_effort_map(self.reasoning_effort_map),
            max_body=self.max_body,
            stream_interval=self.stream_interval,
            max_images=self.max_images,
            max_videos=self.max_videos,
            max_sounds=self.max_sounds,
            image_hosts=self.image_hosts,
        )

    def body_limits(self) -> BodyLimits:
        """Returns the limits of reading bodies, with a new budget for all of them."""
        from services.gateway.http.bodies.body_budget import BodyBudget, BodyLimits

        media = max(self.max_body, min(self.max_media_body, self.max_bodies // 2))
        budget = BodyBudget(self.max_bodies, BODY_PATIENCE)
        return BodyLimits(self.max_body, media, self.body_s, self.body_stall_s, budget)

    def parsers(self) -> ParserChoice:
        """Returns how outputs are parsed."""
        return ParserChoice(self.tool_call_parser, self.reasoning_parser)

    def stream_settings(self) -> StreamSettings:
        """Returns the limits of sending a response."""
        from services.gateway.http.generation import StreamSettings

        return StreamSettings(self.keep_alive_s, self.unread_limit, self.read_timeout_s)
