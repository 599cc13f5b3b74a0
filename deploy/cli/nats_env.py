"""`baton nats-env`: how other NATS programs reach a running stack's bus, as the operator."""

from __future__ import annotations

import json
import shlex

from deploy.supervisor.state_file import StackState


def show_nats_environment(state: StackState, *, as_json: bool) -> None:
    """The names are those that the `nats` command reads."""
    values = {"NATS_URL": ",".join(state.nats_url), "NATS_USER": state.nats_user, "NATS_PASSWORD": state.nats_password}
    known = {name: value for name, value in values.items() if value is not None}
    if as_json:
        print(json.dumps(known))
        return
    for name, value in known.items():
        print(f"export {name}={shlex.quote(value)}")
