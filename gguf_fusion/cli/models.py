"""``pull``, ``list``, ``show`` and ``rm``: model files on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gguf_fusion import gguf_info, hub
from gguf_fusion.cli._output import ConsoleProgress, human_size, note, print_json, print_line, print_pairs, print_table
from gguf_fusion.cli._registry import registry_option
from gguf_fusion.config import EnsembleSpec, ExpertSpec, Registry
from gguf_fusion.errors import ModelFileError, NotCachedError

json_option = click.option("--json", is_flag=True, help="Print JSON.")


@click.command()
@click.argument("refs", nargs=-1, required=True, metavar="NAME|REF...")
@click.option("--source", type=click.Choice(sorted(hub.KINDS)), help="Use only this kind of source.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hugging Face repository.")
@click.option("--offline", is_flag=True, help="Never use the network.")
@click.option("--dry-run", is_flag=True, help="Say what would be fetched, with sizes, and stop.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@json_option
@registry_option
def pull(
    refs: tuple[str, ...],
    source: str | None,
    revision: str | None,
    offline: bool,
    dry_run: bool,
    quiet: bool,
    json: bool,
    registry: Registry,
) -> None:
    """Fetch models: an ensemble, an expert, user/repo:Q4_K_M, hf.co/..., a URL or a path.

    Without a quant the first of Q4_K_M, Q4_K_S, Q5_K_M, Q5_K_S, Q4_0, IQ4_XS, IQ4_NL, Q4_1, Q6_K, Q8_0, Q3_K_M,
    MXFP4, BF16, F16, F32 that the repository holds is taken. What is here already needs no network.
    """
    progress = ConsoleProgress(quiet=quiet)
    if dry_run:
        _dry_run(refs, registry, source, revision, offline, json)
        return
    results = []
    for ref in refs:
        try:
            paths = hub.pull(ref, registry, progress=progress, offline=offline, source=source, revision=revision)
        except KeyboardInterrupt:
            note("nothing unfinished was kept; run the same command again to go on")
            raise
        results += [
            {"name": target.label, "path": str(path)}
            for target, path in zip(hub.resolve(ref, registry), paths, strict=True)
        ]
    if json:
        print_json(results)
    else:
        for result in results:
            print_line(f"{result['name']}  {result['path']}")


def _dry_run(
    refs: tuple[str, ...], registry: Registry, source: str | None, revision: str | None, offline: bool, as_json: bool
) -> None:
    rows = [
        entry for ref in refs for entry in hub.plan(ref, registry, offline=offline, source=source, revision=revision)
    ]
    to_fetch = sum(row.size_bytes or 0 for row in rows if not row.present)
    if as_json:
        print_json(
            {
                "models": [
                    {"name": r.label, "source": str(r.source), "size_bytes": r.size_bytes, "present": r.present}
                    for r in rows
                ],
                "to_fetch_bytes": to_fetch,
            }
        )
        return
    table = [[r.label, human_size(r.size_bytes), "present" if r.present else "to fetch", str(r.source)] for r in rows]
    print_table(["NAME", "SIZE", "STATE", "SOURCE"], table)
    print_line(f"{human_size(to_fetch)} to fetch")


@click.command("list")
@click.option(
    "-a",
    "--all",
    "everything",
    is_flag=True,
    envvar="GGUF_FUSION_LIST_ALL",
    help="Also the experts that are not on this machine.",
)
@json_option
@registry_option
def list_models(everything: bool, json: bool, registry: Registry) -> None:
    """List ensembles, and the models that are on this machine."""
    models = [_model_row(spec) for spec in registry.experts.values()]
    models += [_stray_row(found) for found in hub.fetched_outside(registry)]
    ensembles: list[dict[str, Any]] = [
        {
            "name": spec.name,
            "experts": list(spec.experts),
            "present": all(hub.find_local(t) is not None for t in hub.resolve(spec.name, registry)),
            "size_bytes": _sum_known(spec, registry),
            "description": spec.description,
        }
        for spec in registry.ensembles.values()
    ]
    if json:
        print_json({"experts": models, "ensembles": ensembles})
        return
    shown = [model for model in models if everything or model["present"]]
    if shown:
        rows = [[m["name"], m["quant"], human_size(m["size_bytes"]), _state(m["present"]), m["role"]] for m in shown]
        print_table(["NAME", "QUANT", "SIZE", "HERE", "ROLE"], rows)
    else:
        print_line("No models here yet. Fetch the default ensemble with: gguf-fusion pull pocket")
    print_line()
    rows = [[e["name"], human_size(e["size_bytes"]), _state(e["present"]), ", ".join(e["experts"])] for e in ensembles]
    print_table(["ENSEMBLE", "SIZE", "HERE", "EXPERTS"], rows)


def _state(present: bool) -> str:
    return "yes" if present else "no"


def _sum_known(spec: EnsembleSpec, registry: Registry) -> int | None:
    sizes = [hub.expected_size(target) for target in hub.resolve(spec.name, registry)]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _model_row(spec: ExpertSpec) -> dict[str, Any]:
    target = hub.of_expert(spec)
    found = hub.find_local(target)
    row = {
        "name": spec.name,
        "role": spec.role,
        "licence": spec.licence,
        "present": found is not None,
        "path": str(found.paths[0]) if found else None,
        "size_bytes": found.size_bytes if found else hub.expected_size(target),
        "quant": "",
    }
    if found:
        row["quant"] = _quant_of(found.paths[0])
    return row


def _stray_row(found: hub.Found) -> dict[str, Any]:
    return {
        "name": found.target.label,
        "role": "",
        "licence": "",
        "present": True,
        "path": str(found.paths[0]),
        "size_bytes": found.size_bytes,
        "quant": _quant_of(found.paths[0]),
    }


def _quant_of(path: Path) -> str:
    try:
        return gguf_info.read(path).quant
    except ModelFileError:
        return "damaged"


@click.command()
@click.argument("ref", metavar="NAME|REF")
@click.option("--template", is_flag=True, help="Print the chat template only.")
@click.option("--prompt", metavar="TEXT", help="Print what every expert would read of this question.")
@click.option("-s", "--system", metavar="TEXT", help="A system text for --prompt.")
@json_option
@registry_option
def show(ref: str, template: bool, prompt: str | None, system: str | None, json: bool, registry: Registry) -> None:
    """Describe an ensemble, an expert, or a model file that is on this machine."""
    if prompt is not None:
        _show_prompt(ref, registry, prompt, system, json)
        return
    if ref in registry.ensembles:
        _show_ensemble(registry.ensembles[ref], registry, json)
        return
    target = hub.resolve_one(ref, registry)
    found = hub.find_local(target)
    if found is None and (target.expert is None or template):
        hub.locate(ref, registry)  # raises with what to do
    info = gguf_info.read(found.paths[0]) if found else None
    if template:
        _print_template(target.label, info)
        return
    facts = _expert_facts(target, found, info)
    if json:
        print_json(facts)
        return
    print_pairs({key: _readable(key, value) for key, value in facts.items() if value not in (None, "", [])})


def _show_prompt(ref: str, registry: Registry, prompt: str, system: str | None, as_json: bool) -> None:
    from gguf_fusion.chat import as_messages
    from gguf_fusion.members import members_from, members_of
    from gguf_fusion.preview import previews

    messages = as_messages(prompt, system)
    spec = registry.ensembles.get(ref)
    members = members_from([ref], registry) if spec is None else members_of(spec, registry)
    taking_part = [member for member in members if member.weight > 0.0]
    found = previews(taking_part, messages, registry=registry, plain_chat=spec.plain_chat if spec else None)
    if as_json:
        print_json({"experts": [{**asdict(one), "n_tokens": len(one.ids)} for one in found]})
        return
    for one in found:
        ends = " ".join(one.end_tokens)
        print_line(f"--- {one.name}: template {one.template}, {len(one.ids)} tokens, ends with any of {ends}")
        print_line(one.prompt)


def _print_template(label: str, info: gguf_info.ModelInfo | None) -> None:
    if info is None or info.chat_template is None:
        raise NotCachedError(f"{label}: the file holds no chat template, so it can only continue raw text")
    print_line(info.chat_template)


def _readable(key: str, value: Any) -> str:
    if key == "size_bytes":
        return f"{value} ({human_size(value)})"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _expert_facts(target: hub.Target, found: hub.Found | None, info: gguf_info.ModelInfo | None) -> dict[str, Any]:
    expert = target.expert
    facts: dict[str, Any] = {
        "name": target.label,
        "path": str(found.paths[0]) if found else None,
        "files": [str(path) for path in found.paths] if found and len(found.paths) > 1 else [],
        "size_bytes": found.size_bytes if found else hub.expected_size(target),
        "sources": [str(source) for source in target.sources],
    }
    if expert is not None:
        facts |= {
            "role": expert.role,
            "description": expert.description,
            "licence": expert.licence,
            "licence_url": expert.licence_url,
            "terms": expert.needs_acceptance,
            "template": str(expert.template) if expert.template is not None else "from the file",
            "n_ctx": expert.n_ctx,
        }
    if info is not None:
        facts |= {
            "model": info.name,
            "architecture": info.architecture,
            "n_params": info.n_params,
            "quant": info.quant,
            "bpw": round(info.bpw, 2),
            "n_layers": info.n_layers,
            "n_embd": info.n_embd,
            "n_head": max(info.n_head, default=0),
            "n_head_kv": max(info.n_head_kv, default=0),
            "n_ctx_train": info.n_ctx_train,
            "sliding_window": info.sliding_window,
            "n_vocab": info.n_vocab,
            "tokenizer": info.tokenizer,
            "add_bos": info.add_bos,
            "chat_templates": sorted(info.chat_templates),
        }
    return facts


def _show_ensemble(spec: EnsembleSpec, registry: Registry, as_json: bool) -> None:
    members = [
        _model_row(registry.experts[name]) | {"weight": w} for name, w in zip(spec.experts, spec.weights, strict=True)
    ]
    if as_json:
        print_json(
            {
                "name": spec.name,
                "description": spec.description,
                "strategy": spec.strategy,
                "epsilon": spec.epsilon,
                "bridge": spec.bridge,
                "size_bytes": _sum_known(spec, registry),
                "experts": members,
            }
        )
        return
    print_line(f"{spec.name}: {spec.description}" if spec.description else spec.name)
    rows = [
        [m["name"], f"{m['weight']:g}", human_size(m["size_bytes"]), _state(m["present"]), m["role"], m["licence"]]
        for m in members
    ]
    print_table(["EXPERT", "WEIGHT", "SIZE", "HERE", "ROLE", "LICENCE"], rows)
    print_line(f"{human_size(_sum_known(spec, registry))} in all, strategy {spec.strategy or 'default'}")


@click.command()
@click.argument("refs", nargs=-1, required=True, metavar="NAME|REF...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be freed and stop.")
@json_option
@registry_option
def rm(refs: tuple[str, ...], yes: bool, dry_run: bool, json: bool, registry: Registry) -> None:
    """Delete fetched model files. Files that you named by path stay: those are yours."""
    targets = [target for ref in refs for target in hub.resolve(ref, registry)]
    found = [item for target in targets for item in hub.fetched(target)]
    if not found:
        raise NotCachedError(
            f"nothing to delete: {', '.join(refs)} {'is' if len(refs) == 1 else 'are'} not on this machine"
        )
    freed = sum(item.size_bytes for item in found)
    if not json:
        for item in found:
            print_line(f"{item.target.label}  {human_size(item.size_bytes)}  {item.paths[0]}")
    if not dry_run:
        if not yes:
            click.confirm(f"Delete {human_size(freed)}?", abort=True, err=True)
        freed = sum(hub.remove(item) for item in found)
    if json:
        removed = [{"name": item.target.label, "path": str(item.paths[0])} for item in found]
        print_json({"removed": removed, "freed_bytes": freed, "dry_run": dry_run})
    else:
        print_line(f"{human_size(freed)} {'would be freed' if dry_run else 'freed'}")
