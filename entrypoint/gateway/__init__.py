"""Several replicas of `relaunch serve` behind one address: sglang's router, told by us who is ready."""
