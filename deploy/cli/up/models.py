"""Which models a stack is to serve, and what was said of one of several alone. It starts nothing and reads no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deploy.cli.up.options import STACK, Offer, offers
from deploy.errors import CommandError
from deploy.model_choice import served_name
from deploy.supervisor.core.plan import name_prefix
from deploy.supervisor.settings import SIZE, StackSettings
from deploy.supervisor.spec import ModelSpec
from shared.ids import ModelName
from shared.machine.home import expanded
from shared.settings import settings_of

SERVICES_OF_A_MODEL = frozenset({"tokenizer", "encoder", "detokenizer", "scheduler", "worker"})
_SIZES_OF_ALL = ("gateways", "coordinators", "max_instances")
SIZES_OF_A_MODEL = frozenset(
    name
    for name, setting in settings_of(StackSettings).items()
    if setting.up_option is not None and setting.up_option.panel == SIZE and name not in _SIZES_OF_ALL
)
"""Settings of a stack of which each model has its own."""
OF_ALL_MODELS = frozenset({"model", "served_model_name", "kv_connector", "kv_connector_extra_config", "kv_role"})
ONE_MODEL_ONLY = (
    "tokenizer",
    "nodes",
    "master",
    "advertise_address",
    "federation_address",
    "federate",
    "launcher",
    "served_model_name",
    "alias",
    "lora",
    "lora_registry",
    "colocate",
    "data_parallel_size",
)
"""Options that several models together cannot have."""
MAX_MODELS = 64


class ChosenModel(NamedTuple):
    """What was typed of one model."""

    name: ModelName
    source: str
    """A directory, a file or a repository."""
    is_named: bool
    """Whether the name was typed."""


def chosen_models(typed: Sequence[str]) -> tuple[ChosenModel, ...]:
    """What `--model` said, each time: `PATH_OR_ID`, or `NAME=PATH_OR_ID`. Raises CommandError."""
    models = tuple(map(_chosen, typed))
    if len(models) > MAX_MODELS:
        raise CommandError(f"--model: {len(models)} models, {MAX_MODELS} are allowed", status=2)
    prefixes: dict[str, ModelName] = {}
    for model in models:
        if (other := prefixes.get(name_prefix(model.name))) is not None:
            same = "twice" if other == model.name else f"and {other}: names of processes would be the same"
            raise CommandError(f"--model {model.name} {same}; name them as NAME=PATH_OR_ID", status=2)
        prefixes[name_prefix(model.name)] = model.name
    return models


def _chosen(text: str) -> ChosenModel:
    """A file or folder may have a `=` in its name."""
    name, equals, source = text.partition("=")
    if not equals or expanded(text).exists():
        return ChosenModel(served_name(text, None), text, is_named=False)
    if not name.strip() or not source.strip():
        raise CommandError(f"--model {text}: NAME=PATH_OR_ID is expected", status=2)
    return ChosenModel(ModelName(name), source, is_named=True)


def first_of(models: Sequence[ChosenModel], typed: Mapping[str, Any]) -> dict[str, Any]:
    """What was typed, with the first of the models as if it were the only one. Raises CommandError where the only one
    has two names."""
    if not models:
        return dict(typed)
    first, name = models[0], typed.get("served_model_name")
    if len(models) > 1:
        return {**typed, "model": first.source}
    if name is not None and first.is_named:
        raise CommandError(f"--served-model-name {name}: --model {first.name}=… names it already", status=2)
    return {**typed, "model": first.source, "served_model_name": name or (first.name if first.is_named else None)}


def check_together(
    models: Sequence[ChosenModel], values: Mapping[str, Any], own: Mapping[ModelName, Sequence[str]]
) -> None:
    """Raises CommandError for an option that several models together cannot have, and for settings of a model (`own`)
    that is none of several. `values` are those of `given`."""
    names = [model.name for model in models] if len(models) > 1 else []
    for model, assignments in own.items():
        if model not in names:
            known = f"the models are {', '.join(names)}" if names else "there is one model; leave MODEL/ out"
            raise CommandError(f"--set {model}/{assignments[0]}: {known}", status=2)
    for option in ONE_MODEL_ONLY if names else ():
        if option in values and values[option] != _default(option):
            hint = f"; --set {names[0]}/{option}=… is of one of them" if option in ("alias", "lora") else ""
            typed = f"{offers()[option].flag} {_shown(values[option])}"
            raise CommandError(f"{typed}: not with several models ({', '.join(names)}){hint}", status=2)


def check_names(models: Sequence[ModelSpec]) -> None:
    """Raises CommandError where clients could mean two of the models by one name."""
    owners: dict[str, ModelName] = {}
    for model in models:
        worker = model.settings.get("worker", {})
        loras = (each.partition("=")[0] for each in _parts(worker.get("lora", "")))
        for name in {str(model.name), *_parts(worker.get("alias", "")), *loras}:
            if (owner := owners.setdefault(name, model.name)) != model.name:
                raise CommandError(f"{name!r} is a name of {owner} and of {model.name}", status=2)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _default(option: str) -> Any:
    return offers()[option].setting.default


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class Assignments(NamedTuple):
    """The settings that `--set` assigns."""

    shared: list[str]
    """Of the whole stack: `SERVICE.KEY=VALUE` or `KEY=VALUE`."""
    own: dict[ModelName, list[str]]
    """Of each model: the same, without the `MODEL/` before it."""


def split_assignments(assignments: Sequence[str]) -> Assignments:
    """`MODEL/…` is of that model alone. Names of models may hold slashes, those of settings none."""
    found = Assignments([], {})
    for assignment in assignments:
        target, equals, value = assignment.partition("=")
        model, slash, key = target.rpartition("/")
        if slash:
            found.own.setdefault(ModelName(model), []).append(f"{key}{equals}{value}")
        else:
            found.shared.append(assignment)
    return found


class OwnSettings(NamedTuple):
    """What was said of one model."""

    options: dict[str, Any]
    """Options of `baton up` by name, as `given` has them."""
    assignments: list[str]
    """`SERVICE.KEY=VALUE`."""


def own_settings(model: ModelName, assignments: Sequence[str]) -> OwnSettings:
    """`OPTION=VALUE` is an option of `baton up` for this model, `SERVICE.KEY=VALUE` a flag of its services. Raises
    CommandError."""
    found = OwnSettings({}, [])
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        typed, (service, dot, _) = f"--set {model}/{assignment}", key.partition(".")
        if not equals:
            raise CommandError(f"{typed}: MODEL/OPTION=VALUE or MODEL/SERVICE.KEY=VALUE is expected", status=2)
        if dot and service not in SERVICES_OF_A_MODEL:
            known = ", ".join(sorted(SERVICES_OF_A_MODEL))
            raise CommandError(f"{typed}: {service!r} is no service of one model; {known} are", status=2)
        if dot:
            found.assignments.append(assignment)
            continue
        name = key.replace("-", "_")
        offer = offers().get(name)
        if offer is None or not _is_of_a_model(offer):
            known = ", ".join(each.name for each in offers().values() if _is_of_a_model(each))
            raise CommandError(f"{typed}: {key!r} is no option of one model; there are {known}", status=2)
        try:
            found.options[name] = offer.setting.parse(value)
        except ValueError as error:
            raise CommandError(f"{typed}: {error}", status=2) from None
    return found


def _is_of_a_model(offer: Offer) -> bool:
    services = {service for service, _ in offer.targets}
    if offer.name in OF_ALL_MODELS:
        return False
    return offer.name in SIZES_OF_A_MODEL if services == {STACK} else services <= SERVICES_OF_A_MODEL
