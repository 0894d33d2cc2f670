"""What a GGUF file says about itself, read in a fraction of a second.

The reader steps over the long arrays of the header (a vocabulary has hundreds of thousands of entries) instead of
decoding them, and never touches the weights. It checks that the header is whole and that every tensor lies inside
the file, so a truncated download is found before native code sees it. Layout: the GGUF specification of ggml.
"""

from gguf_fusion.gguf_info.diagnosis import diagnose
from gguf_fusion.gguf_info.header import TensorInfo
from gguf_fusion.gguf_info.info import SHARD, ModelInfo, read, require_generative, shard_paths

__all__ = ["SHARD", "ModelInfo", "TensorInfo", "diagnose", "read", "require_generative", "shard_paths"]
