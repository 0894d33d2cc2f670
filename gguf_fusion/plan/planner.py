"""Choosing where layers lie: all experts together, for the least predicted time per step within the budgets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gguf_fusion.arrays import F64
from gguf_fusion.plan.memory import ROWS, UBATCH, Shape

MARGIN_RAM = 256 << 20
GPU_MARGIN = 0.05
"""Share of a card's free memory that stays free: drivers and screens take some at any time."""

GPU_CONTEXT = 128 << 20
"""Bytes that the first layer of an expert on a card costs beside itself (scratch space, a mirror of small tensors)."""

RAM_SPEED, VRAM_SPEED, WORKER_SPEED = 10e9, 300e9, 100e9
"""Bytes of weights read per second where nothing was measured: two channels of laptop memory, a small card, and a
card behind a network."""

STEP_OVERHEAD = 0.002
"""Seconds per decode beside reading weights."""

OWN = ""
"""The pool of this machine's own cards; other pools are workers on other machines, see ``Request.pools``."""

_MOST_COMBINATIONS = 400_000


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory there is.

    vram: free bytes of each card;  ram: free bytes;  cores: for lanes on the CPU;  workers: free bytes of the devices
    in each pool of other machines;  margin: share of every device that stays free
    """

    vram: tuple[int, ...] = ()
    ram: int = 0
    cores: int = 1
    workers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    margin: float = GPU_MARGIN

    def usable(self, pool: str) -> int:
        """Bytes of all devices of a pool that may be planned with."""
        devices = self.vram if pool == OWN else self.workers.get(pool, ())
        return sum(int(device * (1.0 - self.margin)) for device in devices)

    @property
    def usable_vram(self) -> int:
        """Bytes of this machine's cards that may be planned with."""
        return self.usable(OWN)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    contexts, types : by expert, where they are other than ``n_ctx`` (which is an upper limit) and ``type_k, type_v``
    layers : fixed numbers by expert;  ``most_layers``: upper limits
    speeds : measured bytes per second on the CPU by expert;  ``card_speeds``: on whatever holds its layers
    pools  : experts whose layers go to workers on other machines -> the name of that pool in ``Budget.workers``
    """

    n_ctx: int = 4096
    type_k: str = "f16"
    type_v: str = "f16"
    ubatch: int = UBATCH
    rows: int = ROWS
    layers: Mapping[str, int] = field(default_factory=dict)
    most_layers: Mapping[str, int] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    card_speeds: Mapping[str, float] = field(default_factory=dict)
    pools: Mapping[str, str] = field(default_factory=dict)
    contexts: Mapping[str, int] = field(default_factory=dict)
    types: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    vram_speed: float = VRAM_SPEED
    allow_kv_quant: bool = False
    allow_short_ctx: bool = False

    def ctx_of(self, name: str) -> int:
        """Context of an expert in tokens."""
        return min(self.contexts.get(name, self.n_ctx), self.n_ctx)

    def types_of(self, name: str) -> tuple[str, str]:
        """Types of an expert's K and V cache."""
        return self.types.get(name, (self.type_k, self.type_v))

    def card_speed(self, name: str) -> float:
        """Bytes per second of the layers that are not on this machine's CPU."""
        return self.card_speeds.get(name, WORKER_SPEED if name in self.pools else self.vram_speed)


@dataclass(frozen=True, slots=True)
class Placed:
    """One expert in a plan. Bytes are those of weights, cache and buffers; ``vram`` and ``ram`` where they lie."""

    name: str
    n_gpu_layers: int
    n_layers: int
    weights_bytes: int
    kv_bytes: int
    buffers_bytes: int
    vram_bytes: int
    ram_bytes: int
    step_s: float
    estimated: bool
    pool: str = OWN
    card_s: float = 0.0
    """The part of ``step_s`` that its layers on a card or a worker take."""
    n_ctx: int = 0
    type_k: str = "f16"
    type_v: str = "f16"


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything lies. ``fits``: within both budgets;  ``remedies``: what to change where it does not."""

    fits: bool
    experts: tuple[Placed, ...]
    request: Request
    budget: Budget
    step_s: float
    remedies: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    """What was placed, in the order of ``experts``."""
    smaller: Mapping[str, int] = field(default_factory=dict)
    """Experts that were planned with a smaller quant -> which of those that were offered, counted from 0."""

    @property
    def vram_bytes(self) -> int:
        """Bytes on this machine's cards."""
        return self.bytes_in(OWN)

    def bytes_in(self, pool: str) -> int:
        """Bytes on the devices of a pool."""
        return sum(one.vram_bytes for one in self.experts if one.pool == pool)

    @property
    def ram_bytes(self) -> int:
        """Bytes in RAM."""
        return sum(one.ram_bytes for one in self.experts)

    @property
    def tensor_split(self) -> tuple[float, ...]:
        """Shares of the cards, in proportion to what is free on them."""
        total = sum(self.budget.vram)
        return tuple(card / total for card in self.budget.vram) if total else ()


def place(shape: Shape, n_gpu: int, request: Request) -> Placed:
    """One expert with its last ``n_gpu`` layers on the card; one more than all puts the output there too.

    llama.cpp fills a card from the output backwards and keeps each layer's cache beside it.
    """
    n_layers = shape.n_layers
    on_card = min(n_gpu, n_layers)
    output = n_gpu > n_layers
    n_ctx, types = request.ctx_of(shape.name), request.types_of(shape.name)
    card = range(n_layers - on_card, n_layers)
    weights = sum(shape.layer_bytes[i] for i in card) + (shape.output_bytes if output else 0)
    kv = sum(shape.kv_layer(i, n_ctx, *types) for i in card)
    total_kv = shape.kv(n_ctx, *types)
    buffers = shape.buffers(n_ctx, request.ubatch, request.rows)
    scratch = GPU_CONTEXT + shape.compute(n_ctx, request.ubatch, request.rows) if n_gpu else 0
    # The embeddings stay in RAM even where the output matrix, tied to them, has a copy on the card.
    left = shape.weights - sum(shape.layer_bytes[i] for i in card)
    slow = sum(shape.layer_bytes[: n_layers - on_card]) + (0 if output else shape.output_bytes)
    card_s = weights / request.card_speed(shape.name)
    return Placed(
        name=shape.name,
        n_gpu_layers=n_gpu,
        n_layers=n_layers,
        weights_bytes=shape.weights,
        kv_bytes=total_kv,
        buffers_bytes=buffers + scratch,
        vram_bytes=weights + kv + scratch,
        ram_bytes=left + total_kv - kv + buffers,
        step_s=STEP_OVERHEAD + slow / request.speeds.get(shape.name, RAM_SPEED) + card_s,
        estimated=shape.estimated,
        pool=request.pools.get(shape.name, OWN),
        card_s=card_s,
        n_ctx=n_ctx,
        type_k=types[0],
        type_v=types[1],
    )


def step_seconds(experts: Sequence[Placed]) -> float:
    """Seconds until every expert has decoded one token.

    Work of one pool comes one after the other, work on the CPU in lanes that share its memory; all of them overlap, but
    no expert is done before its own layers are.
    """
    pools: dict[str, float] = {}
    for one in experts:
        pools[one.pool] = pools.get(one.pool, 0.0) + one.card_s
    cpu = sum(one.step_s - one.card_s for one in experts)
    return max(cpu, *pools.values(), max((one.step_s for one in experts), default=0.0)) if experts else 0.0


def _excess(experts: Sequence[Placed], budget: Budget) -> tuple[int, int]:
    """(bytes too many on cards and workers, bytes too many in RAM)."""
    over = 0
    for pool in {one.pool for one in experts}:
        over += max(0, sum(one.vram_bytes for one in experts if one.pool == pool) - budget.usable(pool))
    return over, max(0, sum(one.ram_bytes for one in experts) + MARGIN_RAM - budget.ram)


def plan(
    shapes: Sequence[Shape], budget: Budget, request: Request, smaller: Mapping[str, Sequence[Shape]] | None = None
) -> Plan:
    """The fastest placement that fits; where none does, the nearest one with what to change.

    ``smaller``: by expert, smaller quants that may be taken where the usual ones do not fit; then as many bytes of
    weights are kept as possible. What is given up, in this order: bits of the cache, bits of the weights, context.
    Deterministic, and independent of the order of the experts.
    """
    requests, offered = _requests(request), _quants(shapes, smaller or {})
    whole = [candidate for candidate in requests if candidate.n_ctx == request.n_ctx]
    attempts = itertools.chain(
        ((candidate, {}) for candidate in whole),
        ((whole[-1], quants) for quants in offered),
        ((candidate, quants) for candidate in requests[len(whole) :] for quants in ({}, *offered)),
    )
    first: Plan | None = None
    for candidate, quants in attempts:
        taken = [shape if shape.name not in quants else (smaller or {})[shape.name][quants[shape.name]]
                 for shape in shapes]  # fmt: skip
        made = replace(_best(taken, budget, candidate), smaller=quants)
        if made.fits:
            return made
        first = first or made
    assert first is not None
    return replace(first, remedies=_remedies(shapes, budget, first))


def _quants(shapes: Sequence[Shape], smaller: Mapping[str, Sequence[Shape]]) -> list[dict[str, int]]:
    """All ways to take smaller quants of some experts, most bytes of weights first."""
    ordered = sorted(shapes, key=lambda shape: shape.name)
    choices = [[shape, *smaller.get(shape.name, ())] for shape in ordered]
    found = []
    for picked in itertools.product(*(range(len(options)) for options in choices)):
        size = sum(options[i].weights for options, i in zip(choices, picked, strict=True))
        found.append((-size, {shape.name: i - 1 for shape, i in zip(ordered, picked, strict=True) if i}))
    return [quants for _, quants in sorted(found, key=lambda one: (one[0], sorted(one[1].items()))) if quants]


def _requests(request: Request) -> list[Request]:
    """What is asked for, then what may be given instead, mildest change first."""
    found = [request]
    quantized = replace(request, type_k="q8_0", type_v="q8_0", types={})
    if request.allow_kv_quant and request.type_k == request.type_v == "f16" and not request.types:
        found.append(quantized)
    if request.allow_short_ctx:
        n_ctx = request.n_ctx // 2
        while n_ctx >= 512:
            found.append(replace(found[-1], n_ctx=n_ctx))
            n_ctx //= 2
    return found


def _best(shapes: Sequence[Shape], budget: Budget, request: Request) -> Plan:
    ordered = sorted(shapes, key=lambda shape: shape.name)
    options = [_options(shape, budget, request) for shape in ordered]
    counts = _exhaustive(options, budget) if _size(options) <= _MOST_COMBINATIONS else None
    if counts is None:
        counts = _climbed(options, budget)
    by_name = {shape.name: place(shape, n, request) for shape, n in zip(ordered, counts, strict=True)}
    experts = tuple(by_name[shape.name] for shape in shapes)
    fits = _excess(experts, budget) == (0, 0)
    return Plan(fits, experts, request, budget, step_seconds(experts), shapes=tuple(shapes))


def _options(shape: Shape, budget: Budget, request: Request) -> list[Placed]:
    fixed = request.layers.get(shape.name)
    most = shape.n_layers + 1
    if fixed is not None:
        counts = [most if fixed < 0 else min(fixed, most)]
    elif budget.usable(request.pools.get(shape.name, OWN)):
        counts = list(range(min(most, request.most_layers.get(shape.name, most)) + 1))
    else:
        counts = [0]
    return [place(shape, n, request) for n in counts]


def _size(options: Sequence[Sequence[Placed]]) -> int:
    total = 1
    for choices in options:
        total *= len(choices)
    return total


def _exhaustive(options: Sequence[Sequence[Placed]], budget: Budget) -> list[int]:
    """Layers per expert, all combinations compared at once; ties go to fewer bytes on the card."""
    grids = np.meshgrid(*[np.arange(len(choices)) for choices in options], indexing="ij")
    at = [grid.ravel() for grid in grids]

    def total(values: Sequence[F64]) -> F64:
        added: F64 = np.sum([column[index] for column, index in zip(values, at, strict=True)], axis=0)
        return added

    def of_pool(pool: str, values: Sequence[F64]) -> F64:
        return total([column * (choices[0].pool == pool) for choices, column in zip(options, values, strict=True)])

    pools = sorted({choices[0].pool for choices in options})
    on_card = [np.array([one.vram_bytes for one in choices], np.float64) for choices in options]
    vram = total(on_card)
    ram = total([np.array([one.ram_bytes for one in choices], np.float64) for choices in options])
    steps = [np.array([one.step_s for one in choices]) for choices in options]
    cards = [np.array([one.card_s for one in choices]) for choices in options]
    longest = np.max([column[index] for column, index in zip(steps, at, strict=True)], axis=0)
    step = np.maximum.reduce([total(steps) - total(cards), longest, *(of_pool(pool, cards) for pool in pools)])
    over = np.sum([np.maximum(0.0, of_pool(pool, on_card) - budget.usable(pool)) for pool in pools], axis=0)
    short = np.maximum(0.0, ram + MARGIN_RAM - budget.ram)
    order = np.lexsort((vram, np.round(step, 9), short, over))
    best = order[0]
    return [choices[int(index[best])].n_gpu_layers for choices, index in zip(options, at, strict=True)]


def _climbed(options: Sequence[Sequence[Placed]], budget: Budget) -> list[int]:
    """For many experts: move one or two of them at a time as long as that helps, from all on the CPU."""

    def cost(chosen: Sequence[int]) -> tuple[float, float, float, float]:
        placed = [choices[i] for choices, i in zip(options, chosen, strict=True)]
        return *_excess(placed, budget), round(step_seconds(placed), 9), sum(p.vram_bytes for p in placed)

    chosen = [0] * len(options)
    best = cost(chosen)
    improved = True
    while improved:
        improved = False
        for a, b in itertools.combinations_with_replacement(range(len(options)), 2):
            for i in range(len(options[a])):
                steps = range(len(options[b])) if a != b else [chosen[b]]
                for j in steps[:: max(1, len(options[b]) // 12)] if a != b else steps:
                    trial = list(chosen)
                    trial[b], trial[a] = j, i
                    here = cost(trial)
                    if here < best:
                        chosen, best, improved = trial, here, True
    return [choices[i].n_gpu_layers for choices, i in zip(options, chosen, strict=True)]


def _remedies(shapes: Sequence[Shape], budget: Budget, failed: Plan) -> tuple[str, ...]:
    """What would make it fit, tried out one by one; general advice where nothing alone does."""
    request = failed.request
    lacking = max(0, failed.ram_bytes + MARGIN_RAM - budget.ram)
    found = (
        [f"{_megabytes(lacking)} of RAM are missing: close other programs, or use a machine with more"]
        if lacking
        else []
    )
    for pool in sorted({one.pool for one in failed.experts}):
        over = failed.bytes_in(pool) - budget.usable(pool)
        if over > 0:
            where = f"the workers {pool} have" if pool else "the card has"
            found.append(f"the layers asked for take {_megabytes(over)} more than {where}: ask for fewer (-ngl)")
    n_ctx = request.n_ctx // 2
    while n_ctx >= 256:
        if _best(shapes, budget, replace(request, n_ctx=n_ctx)).fits:
            found.append(f"a context of {n_ctx} tokens fits (--n-ctx {n_ctx})")
            break
        n_ctx //= 2
    eight = replace(request, type_k="q8_0", type_v="q8_0", types={})
    if request.type_k == "f16" and not request.types and _best(shapes, budget, eight).fits:
        found.append("a cache of 8 bits fits (--type-k q8_0 --type-v q8_0)")
    largest = max(shapes, key=lambda shape: (shape.weights, shape.name))
    if len(shapes) > 1:
        rest = [shape for shape in shapes if shape is not largest]
        verb = "fits" if _best(rest, budget, request).fits else "would need less"
        found.append(f"without {largest.name} it {verb}")
    found.append(f"a smaller quant of {largest.name}, the largest expert ({_megabytes(largest.weights)})")
    return tuple(found)


def _megabytes(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"
