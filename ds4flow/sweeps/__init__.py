"""Sweeps: many runs from one command, frozen when they start, resumed where they stopped."""

from ds4flow.sweeps.command import Given, resume, start

__all__ = ["Given", "resume", "start"]
