"""What a llama.cpp expert may be asked for, checked before native code sees it, and what it will cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from gguf_fusion.devices import DeviceKind, free_ram_bytes, usable_cores
from gguf_fusion.errors import LoadError, UsageError
from gguf_fusion.experts import native, native_devices, native_rpc
from gguf_fusion.gguf_info import ModelInfo

_MARGIN_BYTES = 128 << 20
_UNLIMITED = 2**31 - 1
_PLAIN_TYPES = ("f32", "f16", "bf16")
_SMALL_SCORES = 128 << 20
_HIDDEN_BATCH = 64
"""With hidden states every token of a batch has an output row: of 262,144 numbers with large vocabularies."""
_SEQUENCES = 2
"""The text and one branch beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one expert is loaded. Raises UsageError for values outside of their range."""

    n_ctx: int = 4096
    """Tokens a path may have; never the full training context by default."""
    n_batch: int = 512
    """Most tokens per native call."""
    n_ubatch: int = 128
    """Most tokens per compute step. Measured on a 2-core CPU: 512 is no faster and takes up to 100 MB more."""
    n_threads: int = 0
    """0 = the usable cores."""
    n_gpu_layers: int = 0
    """-1 = all."""
    tensor_split: tuple[float, ...] = ()
    """Shares of the layers on each device; empty = in proportion to their free memory."""
    rpc: tuple[str, ...] = ()
    """``host:port`` of workers: the layers lie there instead of on cards of this machine. Trusted networks only."""
    type_k: str = "f16"
    type_v: str = "f16"
    max_rows: int = 8
    """Most rows of one ``evaluate``; the output buffer holds so many."""
    flash_attn: bool | None = None
    """None = see ``flash``."""
    use_extra_bufts: bool = False
    """Repack some weights (a copy in memory).

    Off, because on CPUs with AMX the kernels behind it (llama-cpp-python 0.3.36, built for the native CPU) were seen to
    end the process at the first batch of two or more tokens. One-token steps gain a factor of 1.3 to 2.5 with it.
    """
    swa_full: bool = True
    """Keep the whole text in the cache of sliding-window layers, so that it can be cut anywhere."""

    hidden: bool = False
    """Keep the hidden states of the last rows (``LlamaExpert.hidden``), for a router. Batches are small then."""
    lora: str = ""
    """A LoRA adapter (GGUF) to compute with; empty = the model as it is."""

    def __post_init__(self) -> None:
        lowest = {"n_threads": 0, "n_gpu_layers": -1}
        highest = {"n_threads": native.MAX_THREADS}
        for field in fields(self):
            if field.type != "int":
                continue
            value, low, high = getattr(self, field.name), lowest.get(field.name, 1), highest.get(field.name, _UNLIMITED)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise UsageError(f"{field.name}: expected a whole number in {low}…{high}, got {value!r}")
        for key in ("type_k", "type_v"):
            if getattr(self, key) not in native.CACHE_TYPES:
                raise UsageError(f"{key}: expected one of {', '.join(native.CACHE_TYPES)}, got {getattr(self, key)!r}")
        for endpoint in self.rpc:
            native_rpc.check_endpoint(endpoint)
        if not all(math.isfinite(share) and share >= 0.0 for share in self.tensor_split):
            raise UsageError(f"tensor_split: expected shares that are not negative, got {self.tensor_split}")
        if self.max_rows > self.batch:
            raise UsageError(f"max_rows: expected at most n_batch and n_ctx ({self.batch}), got {self.max_rows}")

    @property
    def batch(self) -> int:
        """Tokens per native call, after the native library's own cut to the context."""
        return min(self.n_batch, self.n_ctx, _HIDDEN_BATCH if self.hidden else self.n_batch)

    @property
    def threads(self) -> int:
        """Threads to decode with."""
        return self.n_threads or usable_cores()

    def cells(self) -> int:
        """Cache cells the native library will allocate: padded to a multiple of 256."""
        return -(-self.n_ctx // 256) * 256


def flash(info: ModelInfo, settings: Settings) -> bool | None:
    """Whether to use flash attention; None leaves it to the native library.

    On the CPU it is left out where the attention scores fit into a small buffer: it splits long texts (512 cells and
    more) by thread, so that rows depend on the number of threads, and one-token steps were slower with it (at 750
    tokens, two threads: SmolLM2-135M 17 against 12 ms, Qwen2.5-0.5B 44 against 37 ms, Gemma-3-270M 22 against 23 ms).
    """
    if settings.flash_attn is not None:
        return settings.flash_attn
    plain_v = settings.type_v in _PLAIN_TYPES
    on_cpu = settings.n_gpu_layers == 0 or bool(settings.rpc)  # for all we know a worker is one too
    return False if on_cpu and plain_v and _score_bytes(info, settings) <= _SMALL_SCORES else None


def depends_on_threads(info: ModelInfo, settings: Settings) -> bool:
    """Whether rows of long texts change (within rounding) with the number of threads."""
    return flash(info, settings) is not False


def _score_bytes(info: ModelInfo, settings: Settings) -> int:
    """Bytes of one layer's attention scores without flash attention."""
    return 4 * min(settings.n_ubatch, settings.batch) * settings.cells() * max(info.n_head, default=1)


def cache_bytes(info: ModelInfo, settings: Settings) -> int:
    """Bytes of the K and V cache by the file's metadata; 0 where a model keeps none or does not say.

    Per token: sum over layers of n_head_kv (head_k bits_k + head_v bits_v) / 8. Models with compressed attention
    ("MLA") keep one latent vector of kv_lora_rank + rope dimensions per layer instead.
    """
    bits_k, bits_v = native.CACHE_BITS[settings.type_k], native.CACHE_BITS[settings.type_v]
    rank = info.metadata.get(f"{info.architecture}.attention.kv_lora_rank")
    if isinstance(rank, int) and rank:
        rope = info.metadata.get(f"{info.architecture}.rope.dimension_count")
        width = rank + (rope if isinstance(rope, int) else 0)
        return int(settings.cells() * info.n_layers * width * bits_k / 8)
    per_head = info.head_size_k * bits_k + info.head_size_v * bits_v
    return int(settings.cells() * sum(info.n_head_kv) * per_head / 8)


def cell_bytes(settings: Settings) -> int:
    """Bytes of the bookkeeping of cells (positions and the set of sequences of each), about 64 per cell."""
    return 64 * settings.cells()


def needed_bytes(info: ModelInfo, settings: Settings) -> int:
    """Bytes of RAM beyond the model file: cache, cell bookkeeping, output rows and a rough compute buffer."""
    rows = 4 * info.n_vocab * max(settings.max_rows, _SEQUENCES)
    compute = 4 * min(settings.n_ubatch, settings.batch) * max(1, info.n_embd) * 16 + rows
    if flash(info, settings) is False:
        compute += _score_bytes(info, settings)
    return cache_bytes(info, settings) + cell_bytes(settings) + rows + compute


def check_against_model(name: str, info: ModelInfo, settings: Settings) -> None:
    """Raise LoadError if the native library would refuse, crash, or take more memory than there is."""
    for key, head, needs_flash in (("type_k", info.head_size_k, False), ("type_v", info.head_size_v, True)):
        kind = getattr(settings, key)
        if kind in _PLAIN_TYPES:
            continue
        if needs_flash and settings.flash_attn is False:
            raise LoadError(
                f"expert {name!r}: {key}={kind!r} needs flash attention, which is switched off; "
                f"switch it on or use {key}='f16'"
            )
        if head % native.QUANT_BLOCK:
            raise LoadError(
                f"expert {name!r}: {key}={kind!r} stores blocks of {native.QUANT_BLOCK} values, which do not divide "
                f"the head size {head} of this model; use {key}='f16'"
            )
    needed, free = needed_bytes(info, settings), free_ram_bytes()
    if needed + _MARGIN_BYTES > free and settings.n_gpu_layers == 0:
        raise LoadError(load_message(name, info, settings, "not tried: it would not fit"))


def load_message(name: str, info: ModelInfo, settings: Settings, reason: str) -> str:
    """The text of a LoadError: what was asked, what it takes, what is free, the native reason, two remedies."""
    layers = "all" if settings.n_gpu_layers < 0 else settings.n_gpu_layers
    cards = [d for d in native_devices.devices() if d.kind in (DeviceKind.GPU, DeviceKind.SHARED)]
    on_cards = "".join(f", {card.free_bytes / 1e6:.0f} MB on {card.name}" for card in cards)
    fewer = "fewer layers (-ngl), " if settings.n_gpu_layers else ""
    return (
        f"expert {name!r} ({info.path.name}) could not be loaded with a context of {settings.n_ctx} tokens, "
        f"batches of {settings.n_batch} and {layers} layers on a GPU: "
        f"about {needed_bytes(info, settings) / 1e6:.0f} MB asked beside the {info.size_bytes / 1e6:.0f} MB "
        f"of weights, {free_ram_bytes() / 1e6:.0f} MB free{on_cards}; "
        f"try {fewer}a smaller context (n_ctx, -c) or batch, or a smaller quant of the model. Native library: {reason}"
    )
