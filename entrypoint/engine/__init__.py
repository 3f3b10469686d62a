"""The engine: its command line, its processes, its log, its probes."""
