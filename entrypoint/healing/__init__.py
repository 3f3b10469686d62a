"""Healing: causes, verdicts, the ladder and the state machine. Pure: no clock, no file, no process."""
