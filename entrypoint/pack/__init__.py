"""Carry everything that a start needs to a site without a network: `relaunch pack` and `relaunch unpack`."""
