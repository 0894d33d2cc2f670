"""``python -m gguf_fusion``."""

from gguf_fusion.cli import main

main()
