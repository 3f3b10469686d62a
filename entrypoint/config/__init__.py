"""Settings: each declared once, read from the environment and presets, with where every value came from."""
