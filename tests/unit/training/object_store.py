"""moto's S3 server on loopback, reached as any S3 is: by an endpoint and keys in the environment."""

import logging
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def bucket(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket; yields its URL. The variables that reach it are set in `patch`."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        # moto keeps one memory for all servers of a process
        for method, path in (("POST", "moto-api/reset"), ("PUT", "runs")):
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{path}", method=method)).close()
        yield "s3://runs/polythink"
    finally:
        server.stop()
