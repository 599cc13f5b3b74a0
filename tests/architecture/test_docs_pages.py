"""The pages that are made from code name all that the code has, and what a page says of other servers' names is so."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from deploy.chaos.attacks.__main__ import ATTACKS
from deploy.chaos.faults.choice import FAULTS
from deploy.cli.app import COMMANDS, loaded
from deploy.cli.up.vllm_line import CONVERTED, INSTEAD, NEEDLESS, REVISIONS, SAME, SETTINGS, SEVERAL
from deploy.configuration import CONFIGS
from services.gateway import metrics as gateway_metrics
from services.gateway.api.openapi import OPERATIONS
from services.scheduler import metrics as scheduler_metrics
from shared.messages.dialects import ReasoningFormat, ToolFormat
from shared.permissions import TABLE
from shared.settings import settings_of
from tests.contracts.golden import GOLDEN
from tests.docs_site import api_page, commands_page, messages_page, metrics_page
from tests.docs_site.sources import DOCS, on_site
from tests.support.paths import REPOSITORY

METRIC = re.compile(r'\b(?:Counter|Gauge|Histogram|PlainHistogram|CounterMetricFamily)\(\s*"(baton_\w+)"')
USED_METRIC = re.compile(r"\bbaton_(?:gateway|router|scheduler|worker|kvstore|planner)_\w*[a-z]\b")
COMING_FROM = DOCS / "coming_from.md"


def test_every_metric_that_is_made_is_on_the_page_once() -> None:
    sources = [path for top in ("shared", "services", "kvstore") for path in (REPOSITORY / top).rglob("*.py")]
    made = {name for path in sources for name in METRIC.findall(path.read_text(encoding="utf-8"))}
    listed = re.findall(r"^\| `(baton_\w+)` \|", metrics_page.page(), re.MULTILINE)
    assert made
    assert made - {name.removesuffix("_total") for name in listed} - set(listed) == set()
    assert [name for name in set(listed) if listed.count(name) > 1] == []


def test_metrics_and_settings_that_a_page_names_are_there() -> None:
    listed = {name.removesuffix("_total") for name in re.findall(r"^\| `(baton_\w+)` \|", metrics_page.page(), re.M)}
    settings = {f"{service}.{key}" for service, config in CONFIGS.items() for key in settings_of(config)}
    for path in DOCS.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        metrics = {re.sub("_(total|bucket|sum|count)$", "", name) for name in USED_METRIC.findall(text)}
        assert metrics - listed == set(), path.name
        assert set(re.findall(r"--set ([a-z]+\.[a-z_]+)", text)) - settings == set(), path.name


def test_what_can_be_chosen_by_name_is_on_its_page() -> None:
    def named(page: str, heading: str) -> set[str]:
        """In the first cells of the table below its heading."""
        table = (DOCS / page).read_text(encoding="utf-8").partition(heading)[2].partition("\n\n")[0]
        return {name for row in table.splitlines() for name in re.findall("`([^`]+)`", row.split("|")[1])}

    assert named("reliability.md", "| fault | what it does |\n") == set(FAULTS)
    assert named("reliability.md", "| attack | what comes |\n") == set(ATTACKS)
    assert named("tools.md", "| markup |\n") == set(get_args(ToolFormat))
    assert named("tools.md", "| `--reasoning-parser` | |\n") == set(get_args(ReasoningFormat))


def test_a_metric_is_listed_with_its_labels() -> None:
    page = metrics_page.page()
    assert "| `baton_router_requests_total` | counter | `policy`, `kind` | Requests placed," in page
    assert "| `baton_gateway_time_to_first_token_seconds` | histogram | `model` |" in page
    assert "| `vllm:num_requests_running` | `baton_scheduler_running_requests` |" in page


def test_every_message_and_every_subject_is_on_the_page() -> None:
    page = messages_page.page()
    sent = {name.rpartition(".")[2] for name in GOLDEN}
    assert [name for name in sent if f"### {name}\n" not in page] == []
    assert [rights.subject for rights in TABLE if f"| `{rights.subject}` |" not in page] == []


def test_every_endpoint_and_every_field_is_on_the_page() -> None:
    page = api_page.page()
    assert [each for each in OPERATIONS if f"| `{each.method} {each.path}` |" not in page] == []
    assert "| `temperature` | number ≥ 0 or null | `null` |" in page


def test_every_option_is_on_the_page() -> None:
    page = commands_page.page()
    for name in COMMANDS:
        section = page.partition(f"## baton {name}\n")[2].partition("\n## ")[0]
        options = [option for each in loaded(name).params if not getattr(each, "hidden", False) for option in each.opts]
        assert [option for option in options if option.startswith("-") and f"`{option}`" not in section] == []


def baton_column() -> list[str]:
    """The last cells of the page's tables."""
    lines = COMING_FROM.read_text(encoding="utf-8").splitlines()
    return [line.rsplit("|", 2)[1] for line in lines if line.startswith("|")]


def test_what_is_named_for_others_users_is_there() -> None:
    text = "\n".join(baton_column())
    typed = {
        option for name in COMMANDS for each in loaded(name).params for option in (*each.opts, *each.secondary_opts)
    }
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
    settings = re.findall(r"--set (\w+)\.(\w+)=", text)
    endpoints = set(re.findall(r"`(/[\w/]+)`", text))
    commands = set(re.findall(r"\bbaton (\w[\w-]*)", text))
    assert len(flags) > 40
    assert len(endpoints) > 20
    assert flags - typed == set()
    assert [each for each in settings if each[1] not in settings_of(CONFIGS[each[0]])] == []
    assert endpoints - {each.path for each in OPERATIONS} == set()
    assert commands - COMMANDS.keys() - {"import"} == set()


@pytest.mark.parametrize(
    ("source", "link", "shown"),
    [
        ("README.md", "[a](docs/api.md#files)", "[a](api.md#files)"),
        ("README.md", "[a](deploy/demo/README.md)", "[a](demo_model.md)"),
        ("docs/api.md", "[a](../ARCHITECTURE.md#subjects)", "[a](architecture.md#subjects)"),
        ("docs/adr/0001-x.md", "[a](../api.md)", "[a](../api.md)"),
        ("docs/plugins.md", "[`a`](../services/worker/platforms)", "`a`"),
        ("docs/api.md", "```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
        ("docs/api.md", "[a](https://nats.io) [b](#files)", "[a](https://nats.io) [b](#files)"),
    ],
)
def test_links_lead_where_they_led_in_the_repository(source: str, link: str, shown: str) -> None:
    assert on_site(link, source) == shown


def test_vllms_names_of_figures_are_on_the_pages_that_are_said() -> None:
    def names(cell: str) -> set[str]:
        return {name.removesuffix("_total") for name in re.findall(r"`((?:vllm:|baton_)\w+)`", cell)}

    page = COMING_FROM.read_text(encoding="utf-8").partition("## Figures")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `vllm:")]
    on_api = set().union(*(names(theirs) for theirs, api, _, _ in rows if "yes" in api))
    on_engines = set().union(*(names(theirs) for theirs, _, engine, _ in rows if "yes" in engine))
    requests = {each.name.removesuffix("_total") for each in gateway_metrics.VLLM_NAMES}
    assert on_api == requests | {name.removesuffix("_total") for name in gateway_metrics.ENGINE_NAMES}
    assert on_engines == {each.name.removesuffix("_total") for each in scheduler_metrics.VLLM_NAMES.names}
    listed = {
        name.removesuffix("_total") for name in re.findall(r"^\| `(baton_\w+)` \|", metrics_page.page(), re.MULTILINE)
    }
    ours = set().union(*(names(own) for *_, own in rows))
    assert ours - listed == set()


def test_up_reads_each_of_vllms_flags_or_says_what_to_do_instead() -> None:
    page = COMING_FROM.read_text(encoding="utf-8").partition("## Flags")[2].partition("\n## ")[0]
    theirs = re.findall(r"^\| [^|]+ \| ([^|]+) \|", page, re.MULTILINE)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", "\n".join(theirs)))
    read = {option for each in loaded("up").params for option in (*each.opts, *each.secondary_opts)}
    read |= {*SAME, *SETTINGS, *NEEDLESS, *SEVERAL, *INSTEAD, *CONVERTED, *REVISIONS}
    assert len(flags) > 50
    assert flags - read == set()
