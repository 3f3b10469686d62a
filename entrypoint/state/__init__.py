"""What outlives a boot: known-good settings, boots, post-mortems. Bounded, written atomically, `"schema": 1`."""
