"""Lines of `vllm serve` as `baton up` reads them: what of vLLM's names differs here is in these tables (ADR 167)."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from deploy.errors import CommandError

MAX_SHOWN = 80
"""Characters of a value in an error."""
SAME: Mapping[str, str] = {
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--pipeline-parallel-size": "--pp",
    "-pp": "--pp",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "--max-num-batched-tokens": "--max-batch-tokens",
    "--kv-cache-memory-bytes": "--kv-memory",
    "--speculative-config": "--speculative",
    "-sc": "--speculative",
    "--nnodes": "--nodes",
    "--api-server-count": "--gateways",
}
"""Options that have another name here and the same values."""
VALUES: Mapping[str, Mapping[str, str]] = {
    "--kv-cache-dtype": {"fp8_e4m3": "fp8"},
    "--dtype": {"half": "float16", "float": "float32"},
}
"""Values that have another name here."""
SETTINGS: Mapping[str, str] = {
    "--chat-template": "tokenizer.chat_template",
    "--chat-template-content-format": "tokenizer.chat_template_content_format",
    "--scheduling-policy": "scheduler.policy",
    "--max-logprobs": "gateway.max_logprobs",
}
"""Options that are no options here but settings of a service, with the same values."""
NEEDLESS: Mapping[str, str] = {
    "--enable-auto-tool-choice": "tools are always offered to the model",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-lora": "--lora or --lora-registry says so",
    "--enable-prompt-tokens-details": "usage always has them",
    "--enable-server-load-tracking": "/load always answers",
    "--enable-sleep-mode": "engines can always sleep",
    "--disable-log-requests": "requests are not logged",
    "--no-enable-log-requests": "requests are not logged",
    "--disable-log-stats": "figures are at /metrics, not in the log",
    "--disable-uvicorn-access-log": "requests are not logged",
    "--async-scheduling": "steps are planned before the one before them has ended",
    "--enable-request-id-headers": "answers always have X-Request-Id",
    "--enable-scale-out": "/inference/v1/generate and /render always answer",
    "--enable-tokenizer-info-endpoint": "/tokenizer_info always answers, keys with the scope admin",
    "--enable-elastic-ep": "/scale_elastic_ep always answers",
    "--no-enable-log-outputs": "outputs are not logged",
    "--disable-cascade-attn": "attention has no cascade",
    "--enable-ssl-refresh": "certificates are always read again when they change",
}
"""Switches of vLLM's that ask for what is so in any case: they are left out, and why is said."""
INSTEAD: Mapping[str, str] = {
    "--seed": "requests have seeds (`seed`); without one it is drawn anew each time",
    "--ssl-cert-reqs": "--ssl-ca-certs FILE has clients show a certificate",
    "--ssl-ciphers": "TLS 1.2 and 1.3 with OpenSSL's choice of ciphers",
    "--kv-transfer-config": "--prefill N --decode N, or --kv-connector",
    "--master-addr": "--master HOST:PORT, of the first host's NATS server",
    "--distributed-executor-backend": "--launcher ray",
    "--decode-context-parallel-size": "keys and values are not spread over ranks; --prefill-context-parallel-size",
    "--enable-dbo": "a step is not cut into two (ADR 132)",
    "--compilation-config": "nothing is compiled by torch; --enable-sp, --enforce-eager",
    "--hf-token": "HF_TOKEN=… in the environment, where other users of the machine do not see it",
    "--cpu-offload-gb": "weights stay on their device: --quantization makes them smaller, --tp and --pp share them out",
    "--hf-overrides": "change config.json in a copy of the model's folder",
    "--num-gpu-blocks-override": "--kv-memory SIZE",
    "--max-cpu-loras": "all adapters lie in main memory; --max-loras N are on the device",
    "--runner": "--pooling-type TYPE has a model make vectors",
    "--convert": "--pooling-type TYPE has a model make vectors",
    "--logprobs-mode": "log-probabilities are those of the model, before sampling changes them",
    "--uds": "--host and --port; a proxy in front may listen on a socket",
    "--enable-log-requests": "--trace-sample-rate, baton trace",
    "--uvicorn-log-level": "--log-level",
    "--sleep-mode-backend": "engines that sleep have given back their device's memory, in one way (/sleep)",
    "--watchdog-config": "a step that hangs ends its rank, after --set worker.min_step_timeout=SECONDS at least",
    "--monokernel": "decode steps are captured as a whole: --enforce-eager turns it off",
    "--swap-space": "preempted sequences go to the KV store: --kvstore-memory SIZE",
}
"""What to do in place of an option that there is none for."""


def translated(line: Sequence[str], switches: Container[str] = ()) -> tuple[list[str], list[str]]:
    """Returns the arguments of `baton up` for those typed, and what is to be said of them; a line without vLLM's names
    is returned as it is. A model may stand anywhere without `--model`, `_` for `-` in names, and several values behind
    the options in `SEVERAL`. `switches`: options of `baton up` without a value. Raises CommandError for an option of
    vLLM's that is none here."""
    made: list[str] = []
    said: list[str] = []
    rest, has_model = list(line), False
    revisions: dict[str, str] = {}
    while rest:
        name, equals, value = _split(rest.pop(0))
        if not name.startswith("-"):
            made += [name] if has_model else ["--model", name]
            has_model = True
        elif name in NEEDLESS:
            said.append(f"{name} is not needed: {NEEDLESS[name]}")
        elif name in INSTEAD:
            raise CommandError(f"{name} is vLLM's and no option here: {INSTEAD[name]}", status=2)
        elif name in SEVERAL:
            made += SEVERAL[name]([value] if equals else _pop_values(rest))
        elif name in REVISIONS and (equals or rest):
            revisions[REVISIONS[name]] = value if equals else rest.pop(0)
        elif name in _WITH_VALUE and (equals or rest):
            made += _with_value(name, value if equals else rest.pop(0))
        else:
            name = SAME.get(name, name)
            made.append(f"{name}{equals}{value}")
            if not equals and name not in switches and rest:
                made.append(rest.pop(0))
    for option, revision in revisions.items():
        made = _at_revision(made, option, revision)
    return made, said


def _with_value(name: str, given: str) -> list[str]:
    """What one of `_WITH_VALUE` is here. Raises CommandError for a value that it cannot have."""
    if name in CONVERTED:
        try:
            return list(CONVERTED[name](given))  # they read as they go on
        except (ValueError, OverflowError, RecursionError) as error:
            raise CommandError(f"{name} {_shortened(given)}: {error}", status=2) from None
    if name in SETTINGS:
        return ["--set", f"{SETTINGS[name]}={given}"]
    return [name, VALUES[name].get(given, given)]


def _pop_values(rest: list[str]) -> list[str]:
    """Takes what stands in `rest` before the next option."""
    values = list(takewhile(lambda each: not each.startswith("-"), rest))
    del rest[: len(values)]
    return values


def _at_revision(made: Sequence[str], option: str, revision: str) -> list[str]:
    """With the revision behind the name that the option has. Raises CommandError where there is no one name."""
    line = [part for each in made for part in (each.split("=", 1) if each.startswith(f"{option}=") else [each])]
    if line.count(option) != 1 or line[-1] == option:
        typed, what = next(each for each in REVISIONS.items() if each[1] == option)
        raise CommandError(f"{typed}: of one {what.strip('-')} with {what}", status=2)
    at = line.index(option) + 1
    repository, colon, quantization = line[at].partition(":")
    line[at] = f"{repository}@{revision}{colon}{quantization}"
    return line


def switches_of(command: Any) -> frozenset[str]:
    """The options of a command, click's or typer's, that have no value."""
    flags = (each for each in command.params if getattr(each, "is_flag", False))
    return frozenset({"-h", "--help"}.union(*((*each.opts, *each.secondary_opts) for each in flags)))


def _split(argument: str) -> tuple[str, str, str]:
    """The name of an option, `=` and its value; what is no option is all name."""
    if not argument.startswith("-"):
        return argument, "", ""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") if name.startswith("--") else name, equals, value


def _names(values: Sequence[str]) -> Iterator[str]:
    for i, value in enumerate(values or [""]):
        yield from ("--alias" if i else "--served-model-name", value)


def _keys(values: Sequence[str]) -> Iterator[str]:
    for value in values or [""]:
        yield from ("--api-key", value)


def _adapters(values: Sequence[str]) -> Iterator[str]:
    """vLLM takes NAME=PATH and objects."""
    for value in values or [""]:
        yield "--lora"
        if not value.startswith("{"):
            yield value
            continue
        try:
            adapter: Any = json.loads(value)
            yield f"{adapter['name']}={adapter['path']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            said = f'--lora-modules {_shortened(value)}: {{"name": …, "path": …}} is expected'
            raise CommandError(said, status=2) from None


def _media_limits(value: str) -> Iterator[str]:
    """vLLM takes an object of numbers, or of objects that have one as `count`."""
    for kind, limit in _object(value).items():
        if kind not in _MEDIA:
            raise ValueError(f"{kind!r} is none of {', '.join(_MEDIA)}")
        count = limit.get("count") if isinstance(limit, dict) else limit
        if type(count) is not int or count < 0:
            raise ValueError(f"{kind}: a number from 0 on is expected")
        yield from ("--set", f"gateway.{_MEDIA[kind]}={count}")


def _origins(value: str) -> Iterator[str]:
    origins = json.loads(value)
    if not isinstance(origins, list) or not all(isinstance(each, str) for each in origins):
        raise ValueError("a list of origins in JSON is expected")
    yield from ("--set", f"gateway.cors_origins={','.join(origins)}")


def _grammars(value: str) -> Iterator[str]:
    config = _object(value)
    if unknown := config.keys() - {"backend"}:
        raise ValueError(f"{', '.join(sorted(unknown))}: only backend is taken")
    backend = config.get("backend", "auto")
    if not isinstance(backend, str):
        raise ValueError("backend: a string is expected")
    if backend != "auto":
        yield from ("--grammar-backend", {"guidance": "llguidance"}.get(backend, backend))


def _gibibytes(value: str) -> Iterator[str]:
    yield from ("--kvstore-memory", str(round(float(value) * 2**30)))


def _tokenizer_mode(value: str) -> Iterator[str]:
    if value not in ("auto", "hf"):
        raise ValueError("only auto and hf are taken: a tokenizer.json is read by the tokenizers library")
    yield from ()


def _shortened(value: str) -> str:
    """As much of an option's value as an error shows."""
    return value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}… ({len(value)} characters)"


def _object(value: str) -> dict[str, Any]:
    found = json.loads(value)
    if not isinstance(found, dict):
        raise ValueError("an object in JSON is expected")
    return found


_MEDIA = {"image": "max_images", "video": "max_videos", "audio": "max_sounds"}
CONVERTED: Mapping[str, Callable[[str], Iterator[str]]] = {
    "--limit-mm-per-prompt": _media_limits,
    "--allowed-origins": _origins,
    "--structured-outputs-config": _grammars,
    "--kv-offloading-size": _gibibytes,
    "--tokenizer-mode": _tokenizer_mode,
}
"""Options whose one value is written otherwise here."""
_WITH_VALUE = {*CONVERTED, *SETTINGS, *VALUES}
REVISIONS: Mapping[str, str] = {"--revision": "--model", "--tokenizer-revision": "--tokenizer"}
"""Options that say the revision of what another one names."""
SEVERAL: Mapping[str, Callable[[Sequence[str]], Iterator[str]]] = {
    "--served-model-name": _names,
    "--lora-modules": _adapters,
    "--api-key": _keys,
}
"""Options that take several values at once there."""
