"""Settings, checkpoint and GPUs in; the account per GPU and the engine's flags out. Pure."""

from .make import make
from .plan import Account, Change, Decision, Learned, Plan

__all__ = ["Account", "Change", "Decision", "Learned", "Plan", "make"]
