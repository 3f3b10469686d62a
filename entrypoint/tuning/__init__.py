"""Measure a running server, check what it answers, try other plans, and write down what was found."""
