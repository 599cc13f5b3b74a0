"""The Secrets that docs/kubernetes.md has made, as folders."""

from __future__ import annotations

from pathlib import Path

from deploy.container_secrets import make
from deploy.supervisor.cluster.certificates import new_authority, new_key, signed, signing_request

KEY = "a-key"
"""The only API key."""
STORES = "*.engine.baton.svc"
"""The names of the pods whose stores send each other blocks."""


def make_secrets(folder: Path, stores: str = STORES) -> None:
    """A folder for each, without `baton-`; `stores`: whom the certificate of stores is for."""
    make(folder)
    authority_key, key = new_key(), new_key()
    authority = new_authority(authority_key)
    certificate = signed(signing_request(key, "stores"), "stores", stores, authority, authority_key)
    files = {
        "api-keys/api-keys": KEY.encode(),
        "kvstore-tls/ca.crt": authority,
        "kvstore-tls/tls.crt": certificate,
        "kvstore-tls/tls.key": key,
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
