"""`python -m deploy.supervisor.checkpoints`: sends this host's model to hosts of the same stack.

A process of its own, of low priority: neither the supervisor nor anything that serves is slowed by it.
"""

from __future__ import annotations

import argparse
import logging
import os
import ssl
from pathlib import Path

import uvicorn

from deploy.supervisor.checkpoints.server import CheckpointServer

NICENESS = 5
MAX_REQUESTS = 64
"""At a time; the next one is answered by 503, and asked again."""
KEEP_ALIVE_SECONDS = 30


def main() -> None:
    """Serves until it is told to end."""
    made = argparse.ArgumentParser("checkpoints", description=__doc__)
    made.add_argument("--model", type=Path, required=True, help="folder of the model")
    made.add_argument("--keep", type=Path, required=True, help="file in which its manifest is written down")
    made.add_argument("--no-weights", action="store_true", help="send all files but the weights")
    made.add_argument("--host", required=True)
    made.add_argument("--port", type=int, required=True)
    for name in ("--cert", "--key", "--authority"):
        made.add_argument(name, required=True, help="PEM file")
    given = made.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.nice(NICENESS)
    uvicorn.run(
        CheckpointServer(given.model, given.keep, weights=not given.no_weights),
        host=given.host,
        port=given.port,
        ssl_certfile=given.cert,
        ssl_keyfile=given.key,
        ssl_ca_certs=given.authority,
        ssl_cert_reqs=ssl.CERT_REQUIRED,
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        limit_concurrency=MAX_REQUESTS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    main()
