"""Bridges of the literature that go from token to token: not for use, but to be compared with the byte bridge."""
