"""relaunch: serve big models with sglang, and keep them served."""

__version__ = "0.1.0"
