"""The model card of a run: data, training, test metrics, use and limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.core.choices import RANKINGS
from sparring.models import finding as models
from sparring.models.settings import ModelSettings
from sparring.recipes import finding
from sparring.recipes.run import OWN
from sparring.recipes.setup import flat
from sparring.training.eligibility import untrained_line


def model_card(meta: Mapping[str, Any], result: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str:
    """Markdown from run.json, result.json and metrics.jsonl; every figure in it is in those files.

    model_card(read_meta(folder), {"best_epoch": 7, "epochs": 12, "train_seconds": 41.2}, history)
    """
    setup, data, source = flat(meta["setup"]), meta["data"], meta["source"]
    parts = ", ".join(f"{data[name]:,} {name}" for name in ("train", "valid", "test") if name in data)
    origin = Path(source["data"]).name if source.get("data") else "not recorded"
    model = "" if setup["model_name"] in (OWN, ModelSettings().name) else f" and the model `{_function(setup)}`"
    lines = [
        f"# A retriever trained with `{meta['recipe'].rpartition(':')[2]}`{model}",
        "",
        (
            "An item-item matrix"
            if setup["query_tower"] == "items"
            else f"{_tower(meta, 'query')} query tower, {_tower(meta, 'item')} item tower, "
            f"{meta['dim']} dimensions, {setup['score']} score"
        )
        + f". Trained with Sparring {meta['versions']['sparring']}.",
        "",
        "## Data",
        f"{data['queries']:,} queries x {data['items']:,} items; interactions: {parts}. Source: {origin}"
        + (f", split {_split(source['split'])}." if source.get("split") else ".")
        + (" Repeats of a pair are kept." if meta.get("repeats") == "keep" else "")
        + (f" {line}." if (line := untrained_line(meta["untrained"])) else ""),
        "",
        "## Training",
        _kept(meta, result),
        f"{result['train_seconds']:,.1f} s of training, without validation."
        + (f" Loss {history[0]['loss']:.4f} to {history[-1]['loss']:.4f}. ![curve](curve.png)" if history else ""),
        *_added(result),
        "",
        "How it was solved:" if setup["optimizer"] == "solver" else "Each query of a batch was contrasted with:",
        "```",
        *meta["batch"],
        "```",
        "Settings: "
        + ", ".join(f"{name}={_text(value)}" for name, value in {**meta["arguments"], **setup}.items())
        + ".",
        "",
        "## Test",
        *([f"Ranked with novelty {novelty:g}.", ""] if (novelty := setup.get("novelty")) else []),
        *_tests(result, meta.get("repeats") == "keep"),
        *_beside(result),
        "",
        "## Use",
        "```python",
        "import sparring",
        "",
        f'sparring.load("THIS_FOLDER"{_code(meta, setup)}).recommend([QUERY_ID], k=10)',
        "```",
        "",
        "## Limits",
        "It knows the queries and items of its training data"
        + _NEW.get(setup["query_tower"], " only.")
        + " The metrics count interactions with items that people happened to see, so they favour popular items;"
        " the rows by popularity show by how much.",
    ]
    return "\n".join(lines) + "\n"


def published_card(card: str, name: str, meta: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """A model card as the Hugging Face hub reads it: a head of YAML, and how to load the run from there."""
    source = str(meta.get("source", {}).get("data") or "")
    on_hub = re.match(r"hf://datasets/([^/@]+/[^/@]+)", source)
    test = result.get("stages", {}).get(RANKINGS.get(result.get("ranking", ""))) or result.get("test")
    head: dict[str, Any] = {"library_name": "sparring", "tags": ["sparring", "recommendation", "retrieval"]}
    if on_hub:
        head["datasets"] = [on_hub[1]]
    if test:
        metrics = [{"type": key, "name": key, "value": value} for key, value in test["metrics"].items()]
        data = {"type": on_hub[1] if on_hub else "private", "name": on_hub[1] if on_hub else source or "not recorded"}
        task = {"type": "recommendation", "name": "Full ranking of the catalogue"}
        head["model-index"] = [{"name": name, "results": [{"task": task, "dataset": data, "metrics": metrics}]}]
    yaml = "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items())  # JSON is YAML
    if meta.get("histories"):
        card += (
            "\nThe histories of its queries were not published: lists may hold items that a query has taken, and a"
            " query tower that reads histories knows new queries only (`recommend_history`).\n"
        )
    return f"---\n{yaml}---\n\n" + card.replace("THIS_FOLDER", f"hf://{name}")


def _kept(meta: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Which epoch was kept, and why."""
    refit, setup = meta.get("refit"), flat(meta["setup"])
    if refit:
        chosen = f"Epoch {refit['epochs']} of {refit['of']} was chosen by {setup['select']} on the validation part"
        again = f"then the model was trained from the start on all {refit['interactions']:,} interactions of both parts"
        curve = "![curve of the first training](selection/curve.png)"
        return f"{chosen} ({refit['value']:.4f}) with {refit['train']:,} training interactions; {again}. {curve}"
    if "valid" in meta["data"]:
        return (
            f"Epoch {result['best_epoch']} of {result['epochs']} was kept, by {setup['select']} on the validation part."
        )
    return f"The last of {result['epochs']} epochs was kept: there was no validation part."


def _added(result: Mapping[str, Any]) -> list[str]:
    """A line for each thing that was added to the trained towers."""
    closed, trend = result.get("closed_form") or {}, result.get("trend") or {}
    lines = []
    if closed.get("weight"):
        few = f" with {closed['neighbours']} weights per item" if closed.get("neighbours") else " at low rank"
        lines.append(f"EASE{few} (lam {closed['lam']:g}) has weight {closed['weight']:g} in the scores.")
    if trend.get("weight"):
        share = f"{trend['half_life']:.1%} of the time that the data spans"
        lines.append(
            f"Items are ranked by recent demand too: weight {trend['weight']:g}, counts halve in {share}."
            " Train again as it grows older."
        )
    return lines


def _function(setup: Mapping[str, Any]) -> str:
    return str(setup["model_name"].rpartition(":")[2])


def _code(meta: Mapping[str, Any], setup: Mapping[str, Any]) -> str:
    """The argument of `load` for a run whose model is not ours."""
    if not (models.is_ours(setup["model_name"]) or setup["model_name"] == OWN):
        return f', model="FILE.py:{_function(setup)}"'
    if setup["model_name"] != OWN and not meta.get("towers"):
        return ""
    recipe = meta["recipe"]
    return ", model=YOUR_RETRIEVER" if recipe == "custom" else f', recipe="FILE.py:{finding.short(recipe)}"'


_NEW = {  # how a query tower encodes new queries
    **dict.fromkeys(("history", "items", "ridge"), " (new queries by their items: `recommend_history`)."),
    "text": ", and new queries by their texts: `recommend_text`.",
}


def _tower(meta: Mapping[str, Any], side: str) -> str:
    """The kind of a tower in a word or two."""
    if side in meta.get("towers", {}):
        return f"`{meta['towers'][side].rpartition(':')[2]}`"
    setup = flat(meta["setup"])
    kind, described = str(setup[f"{side}_tower"]), setup[f"{side}_features"] or setup[f"{side}_vectors"]
    return f"features and {kind}" if described and kind != "features" else kind


def _tests(result: Mapping[str, Any], repeats: bool) -> list[str]:
    """The test metrics of the ranking that recommends; if that is not the towers', those of the towers too."""
    ranking, towers = result.get("ranking", "towers"), result.get("test")
    chosen = result.get("stages", {}).get(RANKINGS.get(ranking))  # earlier versions wrote encoder for towers
    if ranking not in _BY or not chosen or not towers:
        return _test(towers, repeats)
    cutoffs = sorted({int(name.split("@")[1]) for name in towers["metrics"]})
    k = cutoffs[len(cutoffs) // 2]
    figures = ", ".join(
        f"{name}@{k} {_figure(towers['metrics'].get(f'{name}@{k}'))}" for name in ("recall", "ndcg", "precision")
    )
    valid = ", ".join(f"{name} {value:.4f}" for name, value in result.get("rankings", {}).items())
    why = f", chosen on the validation part ({valid})" if valid else ""
    also = "Ranked by the towers alone (`--ranking towers`)"
    return [f"Ranked by {_BY[ranking]}{why}.", "", *_test(chosen, repeats), "", f"{also}: {figures}."]


_BY = {"fused": "towers and classifiers fused", "classifiers": "the classifiers alone"}


def _test(test: Mapping[str, Any] | None, repeats: bool) -> list[str]:
    if not test:
        return ["There was no test part."]
    metrics, strata = test["metrics"], test.get("strata", {})
    cutoffs = sorted({int(name.split("@")[1]) for name in metrics})
    labels = dict.fromkeys(name.split("@")[0] for name in metrics)
    taken = "with the" if repeats else "without"
    lines = [
        f"Full ranking of the catalogue for {test['queries']:,} queries, {taken} items they had already taken.",
        "",
        "| metric | " + " | ".join(f"@{k}" for k in cutoffs) + " |",
        "|---|" + "---:|" * len(cutoffs),
    ]
    lines += [
        f"| {label} | " + " | ".join(_figure(metrics.get(f"{label}@{k}")) for k in cutoffs) + " |" for label in labels
    ]
    for stratum, values in strata.items():
        for label in ("recall", "ndcg"):
            lines.append(
                f"| {label}, {stratum} items | "
                + " | ".join(_figure(values.get(f"{label}@{k}")) for k in cutoffs)
                + " |"
            )
    return lines


def _beside(result: Mapping[str, Any]) -> list[str]:
    """The baselines that were measured on the same part, at the cutoffs of recall and ndcg."""
    if not result.get("baselines"):
        return []
    metrics = {name: each["metrics"] for name, each in result["baselines"].items()}
    names = [name for name in next(iter(metrics.values())) if name.startswith(("recall@", "ndcg@"))]
    return [
        "",
        "Baselines, solved on the same training part:",
        "",
        "| baseline | " + " | ".join(names) + " |",
        "|---|" + "---:|" * len(names),
        *(
            f"| {baseline} | " + " | ".join(_figure(values.get(name)) for name in names) + " |"
            for baseline, values in metrics.items()
        ),
    ]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _split(split: Mapping[str, Any]) -> str:
    return f"`{split['how']}` (valid {split['valid']:g}, test {split['test']:g}, seed {split['seed']})"


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_text(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
