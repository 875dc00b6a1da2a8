"""Synthetic DeepSeek-V4 models: random weights of any dimensions, made directly in GGUF blocks."""

from ds4flow.synth.command import synth_command
from ds4flow.synth.presets import FLASH, KEYS, PRESETS, Recipe, recipe
from ds4flow.synth.write import SynthReport, synthesize

__all__ = [
    "FLASH",
    "KEYS",
    "PRESETS",
    "Recipe",
    "SynthReport",
    "recipe",
    "synth_command",
    "synthesize",
]
