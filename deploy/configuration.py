"""Every service's settings, and what is generated from them: the reference page and the containers' variables.

python -m deploy.configuration            # after a change to any setting; a test compares
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from deploy.supervisor.settings import StackSettings
from kvstore.config import KvStoreConfig
from services.coordinator.config import CoordinatorConfig
from services.detokenizer.config import DetokenizerConfig
from services.encoder.config import EncoderConfig
from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig
from shared.config import COMMON_KEYS, ENVIRONMENT_PREFIX, ServiceConfig
from shared.settings import Setting, settings_of

CONFIGS: Mapping[str, type[ServiceConfig]] = {
    "worker": WorkerConfig,
    "scheduler": SchedulerConfig,
    "gateway": GatewayConfig,
    "coordinator": CoordinatorConfig,
    "tokenizer": TokenizerConfig,
    "encoder": EncoderConfig,
    "detokenizer": DetokenizerConfig,
    "kvstore": KvStoreConfig,
}
"""The settings that each service gets at its start."""

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "configuration.md"
CONTAINERS = REPOSITORY / "docker-compose.yml"
VARIABLES = REPOSITORY / ".env.example"

_HEADING = """\
# Configuration

`python -m deploy.configuration` writes this page from the services' settings; a test keeps it up to date.

Each service takes its settings from the following sources; a later one overrides an earlier one: the default, a TOML
file, the environment, its command line. `python -m services.worker --help` lists one service's flags. An unknown
setting or a value that is not allowed stops the start, and the error names it with its source. `baton up` looks at
all services' before it starts anything, and names variables that begin with `BATON_` and that nothing reads.
A service that is started otherwise names those that are nearly one of its own.

| setting | flag | TOML file (`--config` or `BATON_CONFIG`) | environment |
|---|---|---|---|
| `log_level` of every service | `--log-level debug` | `log_level = "debug"`, at the top | `BATON_LOG_LEVEL` |
| `kv_memory` of the worker | `--kv-memory 2GiB` | `kv_memory = "2GiB"` in table `[worker]` | `BATON_WORKER_KV_MEMORY` |

A variable with `_FILE` behind its name names a file with the value in it, which keeps a secret out of the environment:
`BATON_NATS_PASSWORD_FILE=/run/baton/nats-password`.

`none` means that no value is set. Lists are separated by commas. Sizes are bytes or have a unit (`512MiB`, `2GiB`,
`1.5GB`). The column `baton up` has the option that sets a setting. Settings without an option are set by
`baton up --set SERVICE.SETTING=VALUE`, or for all services by `--set SETTING=VALUE`.
"""


def page() -> str:
    """The text of docs/configuration.md."""
    parts = [_HEADING, "## Every service\n", _table(settings_of(ServiceConfig).values())]
    parts += ["## The stack\n", "Options of `baton up` only; no service has these settings.\n"]
    parts += [_table(settings_of(StackSettings).values())]
    for service, config in CONFIGS.items():
        own = [setting for name, setting in settings_of(config).items() if name not in COMMON_KEYS]
        module = service if service == "kvstore" else f"services.{service}"
        parts += [f"## {service.capitalize()}\n", f"`python -m {module}`\n", _table(own)]
    return "\n".join(parts)


def _table(settings: Iterable[Setting]) -> str:
    rows = ["| setting | default | allowed | `baton up` | meaning |", "|---|---|---|---|---|"]
    rows += [_row(setting) for setting in settings]
    return "\n".join(rows) + "\n"


def _row(setting: Setting) -> str:
    option = setting.up_option
    flag = f"`--{(option.name or setting.name).replace('_', '-')}`" if option else ""
    default = "must be set" if setting.required else f"`{setting.default_text or 'none'}`"
    if option and option.unset:
        default += f"; `baton up`: {option.unset}"
    allowed = ", ".join(f"`{each}`" for each in setting.choices) or setting.limits
    return f"| `{setting.name}` | {default} | {allowed} | {flag} | {setting.meaning} |".replace("  ", " ")


def variables() -> str:
    """The section of .env.example with the services' settings."""
    lines: list[str] = []
    for name, (setting, default) in _container_variables().items():
        lines += [f"# {setting.description}", f"{name}={default}"]
    return "\n".join(lines) + "\n"


def _container_variables() -> dict[str, tuple[Setting, str]]:
    """Variable → its setting and default. Several services may share one."""
    found: dict[str, tuple[Setting, str]] = {}
    configs: list[type[ServiceConfig]] = [ServiceConfig, *CONFIGS.values()]
    for config in configs:
        for setting, name, default in _variables_of(config):
            found.setdefault(name, (setting, default))
    return found


def _variables_of(config: type[ServiceConfig]) -> Iterator[tuple[Setting, str, str]]:
    for setting in settings_of(config).values():
        variable = setting.container_variable
        if variable is not None:
            unset = "" if setting.plain_type in (str, tuple[str, ...], tuple[int, ...]) else "none"
            default = variable.default if variable.default is not None else setting.default_text or unset
            yield setting, variable.name or f"{ENVIRONMENT_PREFIX}{setting.name.upper()}", default


def environment(service: str) -> list[str]:
    """The lines of a service's environment in docker-compose.yml that come from .env."""
    own = ((s, n, d) for s, n, d in _variables_of(CONFIGS[service]) if s.name not in COMMON_KEYS)
    return [f"{ENVIRONMENT_PREFIX}{service.upper()}_{s.name.upper()}: ${{{n}:-{d}}}" for s, n, d in own]


_BLOCK = re.compile(r"^( *)# (\w+)'s settings, from \.env\n(?:\1BATON_[^\n]*\n)*", re.MULTILINE)


def containers(text: str) -> str:
    """docker-compose.yml with the lines below each `# worker's settings, from .env` replaced."""

    def block(found: re.Match[str]) -> str:
        indent, service = found[1], found[2]
        lines = [f"# {service}'s settings, from .env", *environment(service)]
        return "".join(f"{indent}{line}\n" for line in lines)

    return _BLOCK.sub(block, text)


_OWN_VARIABLES = re.compile(r"(# Settings of the services\.[^\n]*\n).*?(\n# Of docker-compose)", re.DOTALL)


def example(text: str) -> str:
    """.env.example with the section on the services' settings replaced."""
    return _OWN_VARIABLES.sub(lambda found: found[1] + variables() + found[2], text)


def main() -> None:
    """Writes docs/configuration.md, docker-compose.yml and .env.example."""
    PAGE.write_text(page(), encoding="utf-8")
    CONTAINERS.write_text(containers(CONTAINERS.read_text(encoding="utf-8")), encoding="utf-8")
    VARIABLES.write_text(example(VARIABLES.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
