"""The vocabulary bridge: tables that carry token rows into the shared byte space."""
