"""``gguf-fusion serve``: the OpenAI interface and a page, over HTTP. Needs the extra ``server``."""
