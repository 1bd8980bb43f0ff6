"""The codes that methods of a reproduction need: learned once for each set of modalities and sizes of codebooks, then read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from sparring.core import files, workers
from sparring.core.errors import UserError
from sparring.core.workers import Failure, Listener, Tasks, perform
from sparring.experiments.papers.cells import read_json
from sparring.experiments.papers.plan import Catalogue, Clustering, Given, Plan, Protocol

if TYPE_CHECKING:
    from sparring.models.clusters import MSACSettings

NOTES = "modalities.json"  # beside the codes: where the modalities came from, and what was asked for
LEAST = 10  # items for each primary cluster on average: twice the 5 that are drawn of one


def most(given: Given) -> int:
    """How many primary clusters the items of a data set allow."""
    return max(2, given.data.n_items // LEAST)


def wanted(plan: Plan) -> list[tuple[Given, Clustering]]:
    """Every clustering that a method of the plan names, once for each data set."""
    return list(
        {
            (given.name, method.clustering.name): (given, method.clustering)
            for given in plan.data
            for method in plan.methods[given.name]
            if method.clustering is not None
        }.values()
    )


def learn(plan: Plan, jobs: int, listener: Listener) -> list[Failure]:
    """Learn the codes that are missing; what failed.

    The modalities are encoded here, once; the processes that learn find them in the cache. A folder that several tables share must hold
    codes of what is asked for now.
    """
    every = wanted(plan)
    tasks: Tasks = {}
    for given, clustering in every:
        assert given.catalogue is not None
        said = given.catalogue.folder / NOTES
        if said.is_file() and read_json(said).get("asked", {}) != asked(given):
            raise UserError(
                f"{said.parent} holds codes of other modalities or settings: choose another folder for --codes"
            )
        if not clustering.path(given.catalogue).is_file():
            work = (given, clustering, plan.experiment.protocol, plan.device)
            tasks[given.name, clustering.name, "clusters"] = workers.Task(
                f"{given.name} clusters {clustering.name}", _learn_one, work
            )
    if not tasks:
        return []
    for given in plan.data:
        if given.catalogue is not None and any(data == given.name for data, _, _ in tasks):
            notes = _modalities(given, plan.experiment.protocol, tuple(given.catalogue.specs), plan.device).notes
            files.write_json(given.catalogue.folder / NOTES, {"notes": notes, "asked": asked(given)})
    return perform(tasks, len(every), "clusters", jobs, listener)


def asked(given: Given) -> dict[str, Any]:
    """What the codes of a data set depend on, but for the interactions."""
    assert given.catalogue is not None
    return {
        "specs": dict(given.catalogue.specs),
        "settings": dict(given.catalogue.settings),
        "text_encoder": given.catalogue.text_encoder,
    }


def settings_of(catalogue: Catalogue, clustering: Clustering) -> MSACSettings:
    """The robust settings of MSAC with what was asked for."""
    from sparring.models.clusters import ROBUST, MSACSettings
    from sparring.recipes.setup import nearest, parse

    kinds = get_type_hints(MSACSettings)
    for name in catalogue.settings:
        if name not in kinds or name in ("k_primary", "k_secondary"):
            raise UserError(f"no setting of the clusters: msac.{name}{nearest(name, kinds)}")
    asked: dict[str, Any] = {name: parse(name, value, kinds[name]) for name, value in catalogue.settings.items()}
    return replace(ROBUST, k_primary=clustering.k_primary, k_secondary=clustering.k_secondary, **asked)


def _modalities(given: Given, protocol: Protocol, names: tuple[str, ...], device: str) -> Any:
    from sparring.data.modalities.sources import load_modalities
    from sparring.training.trained import run_vectors

    catalogue = given.catalogue
    assert catalogue is not None
    specs = {name: catalogue.specs[name] for name in names}
    parts = protocol.parts(given.data, 0)
    return load_modalities(
        specs, parts, text_encoder=catalogue.text_encoder, cache=catalogue.cache, device=device, run_vectors=run_vectors
    )


def _learn_one(say: workers.Say, given: Given, clustering: Clustering, protocol: Protocol, device: str) -> None:
    from sparring.core.devices import pick_device
    from sparring.models.clusters import MSAC

    assert given.catalogue is not None
    modalities = _modalities(given, protocol, clustering.modalities, device)
    settings = settings_of(given.catalogue, clustering)
    msac = MSAC(dict(modalities.widths), settings, pick_device(device))
    codes = msac.fit(modalities, given.data.item_ids)
    path = clustering.path(given.catalogue)
    Path(path.parent).mkdir(parents=True, exist_ok=True)
    (codes if clustering.secondary else codes.without_secondary()).save(path)


def table_rows(plan: Plan) -> list[dict[str, Any]]:
    """What the learned clusters are like: how many are used, how large, how pure."""
    from sparring.experiments.report.cluster_tables import labels_of, summary
    from sparring.models.clusters import Codes

    rows = []
    for given, clustering in wanted(plan):
        assert given.catalogue is not None
        path, table = clustering.path(given.catalogue), given.data.item_table
        if path.is_file():
            known = table is not None and given.catalogue.category in table.columns
            found = summary(
                Codes.load(path).aligned(given.data.item_ids),
                labels_of(given.data, given.catalogue.category) if known else None,
            )
            rows.append({"data": given.shown, "modalities": " + ".join(clustering.modalities), **found})
    return rows
