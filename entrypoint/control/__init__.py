"""The control port: probes, plan, history, metrics, status page. Never generates on the probe path."""
