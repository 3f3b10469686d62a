"""Healing: causes, verdicts, the playbook and the state machine. Pure: no clock, no process, no network."""
