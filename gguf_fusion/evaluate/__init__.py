"""How good experts, their bridges and their fusions are: bits per byte on given text, with statistics."""
