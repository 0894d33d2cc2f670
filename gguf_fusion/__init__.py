"""gguf-fusion: several small GGUF experts, one text."""

__version__ = "0.1.0"
