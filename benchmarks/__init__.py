"""Measurements; each file says what it compares, and runs as a module."""
