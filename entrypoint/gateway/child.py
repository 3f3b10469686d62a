"""The router's own process: `python -m entrypoint.gateway.child`, its arguments as JSON on stdin, where no process
list shows the key that they hold. Blocks until SIGTERM and the drain after it."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Run the router until it is stopped."""
    from smg.router import Router
    from smg.router_args import RouterArgs

    given = json.load(sys.stdin)
    given["control_plane_api_keys"] = [tuple(row) for row in given["control_plane_api_keys"]]
    Router.from_args(RouterArgs(**given)).start()


if __name__ == "__main__":
    main()
