"""What is written from the settings is what the settings say."""

from __future__ import annotations

from deploy.configuration import CONFIGS, CONTAINERS, PAGE, VARIABLES, containers, example, page
from shared.settings import settings_of

AGAIN = "run: python -m deploy.configuration"


def test_the_reference_page_is_what_the_settings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), AGAIN


def test_every_default_is_a_value_that_its_setting_allows() -> None:
    for config in CONFIGS.values():
        for setting in settings_of(config).values():
            if setting.default_text:
                assert setting.parse(setting.default_text) == setting.default, setting.name


def test_the_containers_have_the_variables_that_the_settings_offer() -> None:
    text = CONTAINERS.read_text(encoding="utf-8")
    assert containers(text) == text, AGAIN
    assert "BATON_WORKER_DEVICE: ${BATON_DEVICE:-auto}" in text


def test_the_example_explains_the_same_variables() -> None:
    text = VARIABLES.read_text(encoding="utf-8")
    assert example(text) == text, AGAIN
    assert "\nBATON_KVSTORE_MEMORY=512MiB\n" in text
