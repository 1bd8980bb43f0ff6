"""Training from start to end: claim the folder, train or resume the towers, test them, then run later stages."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sparring.core import files, manifest
from sparring.core.devices import pick_device
from sparring.core.errors import UserError
from sparring.core.ranks import join, launched
from sparring.core.types import ALONE, Ranks
from sparring.data.histories import Histories, past_of
from sparring.data.interactions import Ids, Interactions, Split
from sparring.evaluation.metrics import PROPENSITY_METRICS, parse
from sparring.evaluation.ranking import Encoder, Evaluation, Lister, evaluate
from sparring.evaluation.tfidf import TfIdf
from sparring.models.retriever import Retriever
from sparring.recipes import finding, settings
from sparring.recipes.run import Run
from sparring.recipes.setup import flat
from sparring.training import checkpoint
from sparring.training import folder as run_folder
from sparring.training.baselines import baselines as solve_baselines
from sparring.training.baselines import text_columns
from sparring.training.closed_form import ClosedFormChoice, add_closed_form
from sparring.training.eligibility import Eligibility, listed_items, seen_tensors
from sparring.training.loop import Trainer, TrainingProgress, selected
from sparring.training.novelty import check_correctable, novel
from sparring.training.progress import inner, reporting
from sparring.training.stages import classifier_run, fuse
from sparring.training.step import check_rows
from sparring.training.temperature import choose_tau, with_tau
from sparring.training.trained import TrainedModel, load
from sparring.training.trend import TrendChoice, add_trend, count, has_newcomers
from sparring.training.warm_start import warm_start

METRICS = ("recall", "ndcg", "hit", "mrr", "map", "precision", "coverage", "popularity")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fitted:
    """A trained run: the model of the chosen epoch, one record per epoch, and the test metrics."""

    run: Run
    history: list[dict[str, Any]]
    best_epoch: int
    test: Evaluation | None
    seconds: float
    recommender: Callable[[], TrainedModel] = field(repr=False)
    stages: dict[str, Evaluation] = field(default_factory=dict)  # test metrics of knn, clf and fusion (stages.py)
    ranking: str = "towers"  # that commands use: the best of towers, classifiers and fused on the validation part
    rankings: dict[str, float] = field(default_factory=dict)  # the validation metric of each, where they were compared
    selection: Fitted | None = None  # of a refit: the training that chose the number of epochs
    baselines: dict[str, Evaluation] = field(default_factory=dict)  # test metrics by recipe (baselines.py)
    best_is_last: bool = False  # the best epoch is the last that was allowed: more may do better
    closed_form: ClosedFormChoice | None = None  # beside the towers, where the run has one (closed_form.py)
    trend: TrendChoice | None = None  # of the model, where the run has one (trend.py)

    @cached_property
    def _recommender(self) -> TrainedModel:
        return self.recommender()

    def recommend(
        self, queries: Sequence[object] | str | int, k: int = 10, with_seen: bool | None = None
    ) -> pl.DataFrame:
        """The k best items of each query (original ids), as `load` of the run's folder recommends them."""
        return self._recommender.recommend(queries, k, with_seen)

    def to_dict(self) -> dict[str, Any]:
        """The outcome of the towers' training, ready for JSON."""
        record: dict[str, Any] = {"best_epoch": self.best_epoch, "epochs": len(self.history)}
        record |= {"best_is_last": self.best_is_last, "train_seconds": round(self.seconds, 3)}
        if self.closed_form is not None:
            record["closed_form"] = self.closed_form.to_dict()
        if self.trend is not None:
            record["trend"] = self.trend.to_dict()
        if self.test is not None:
            record["test"] = self.test.to_dict()
        if self.baselines:
            record["baselines"] = {name: each.to_dict() for name, each in self.baselines.items()}
        return record


def fit(
    run: Run,
    split: Split,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    k: Sequence[int] = (10, 20, 50),
    metrics: Sequence[str] = METRICS,
    progress: TrainingProgress | bool | None = None,
    source: Mapping[str, Any] | None = None,
    save_seconds: float | None = None,
    warm: str | Path | None = None,
    refit: bool | Callable[[Interactions], Run] = False,
    baselines: bool = False,
    callbacks: Sequence[TrainingProgress] = (),
) -> Fitted:
    """Train a run on a split and keep the epoch that does best on the validation part (without one, the last epoch).

    With `out` everything is written to that folder (folder.py), which must be new or empty. `resume` continues from its
    last checkpoint; on the same CPU the result is bitwise that of an uninterrupted run. `overwrite` deletes the run in
    it. `source` is recorded in run.json: where the data came from. `warm` is an earlier run whose vectors the towers
    start with. A checkpoint is saved when `save_seconds` have passed since the last one (default: 600 within an epoch,
    10 after it). Where torchrun started several processes, all of them train the run as one would, and rank 0 writes.

    `refit` trains twice: first as usual, without the test, to choose the epoch (in the folder `selection` of `out`, and
    as `selection` of the result); then from the start on the training and validation parts together, up to that epoch
    of the same schedule. The second run is the result. Its recipe builds it with the settings of the first; a run of
    your own needs the function that builds it from data, such as refit=recipes.xir.
    `progress` is a bar and a line per epoch on stderr, by default if that is a terminal; or callbacks.
    `callbacks` are called beside it: trackers (tracking.py), or functions of yours. `baselines` also measures
    popularity, TF-IDF of texts and the best cheap baseline on the test part (baselines.py).

    If the run has classifiers, they are trained after the towers, and `stages` of the result has the test metrics of
    each ranking: knn (towers), clf (classifiers) and fusion (stages.py).

        fitted = sparring.fit(recipes.xir(split.train), split, "runs/xir");  print(fitted.test)
        fitted.recommend([1042], k=10)
    """
    _check(run, split, k, metrics)
    rebuild = _builder(run, split, refit)
    if (resume or overwrite) and out is None:
        raise UserError(f"{'resume' if resume else 'overwrite'} needs `out`, the folder of the run")
    where, folder = pick_device(device), None if out is None else Path(out)
    ranks = join(where)
    if where.type == "cuda":
        torch.set_float32_matmul_precision("highest" if run.setup.training.precision == "float32" else "high")
    held = (
        nullcontext() if folder is None else run_folder.claimed(folder, resume, overwrite, ranks, rebuild is not None)
    )
    with held, reporting(progress, callbacks, _flat_settings(run, split), ranks.rank == 0) as shown:
        selection, chosen = None, None
        if rebuild is not None:
            if overwrite and folder is not None and ranks.rank == 0:
                run_folder.delete_run(folder)
            overwrite, first = False, Split(split.train, split.valid)
            place = None if folder is None else folder / run_folder.SELECTION
            shown.stage("selection")
            selection = _finished(run, first, place if resume else None, source, ranks) or fit(
                run,
                first,
                place,
                resume=resume,
                device=device,
                progress=inner(shown),
                source=source,
                save_seconds=save_seconds,
                warm=warm,
            )
            shown.stage("")
            split = split.joined()
            log.info("refit: epochs 1 to %s on %s interactions", selection.best_epoch, f"{len(split.train):,}")
            run, chosen = rebuild(split.train), _choice(selection, first, split)
            chosen_tau = selection.run.setup.temperature.tau
            if run.setup.temperature.tau is None and chosen_tau is not None:
                run = with_tau(run, chosen_tau)
            _check(run, split, k, metrics)
        tried: dict[float, float] = {}
        if folder is not None and ranks.share(resume and run_folder.has_run(folder)):
            run = _as_recorded(run, run_folder.read_meta(folder))
        else:
            run, tried = _with_temperature(_with_epochs(run, where), split, where, ranks)
        epochs = None if selection is None else selection.best_epoch
        trainer = Trainer(run, split, where, folder, shown, ranks, save_seconds, epochs)
        batch, warmed = _start(trainer, resume, overwrite, source, warm, tried, chosen)
        shown.start(trainer.epochs, trainer.epoch_steps)
        for line in batch:
            log.info("  %s", line)
        with trainer.checkpoints:
            trainer.train()
        state = trainer.state
        trainer.checkpoints.load_best(state.best_epoch)
        run, closed, trend = _completed(trainer, selection)
        test = None
        past = _past_for_test(run.model, split)
        if past is not None:
            run.model.remember(past)
        if split.test is not None:
            log.info("ranking the complete catalogue for every test query")
            ranked = novel(run.model, run.setup.ranking.novelty, split.before("test"), trainer.listed)
            test = _test(ranked, split, k, metrics, where, ranks, trainer.listed)
        ready = partial(_recommender, run, split, folder, warmed)
        fitted = Fitted(run, state.history, state.best_epoch, test, state.seconds, ready, selection=selection)
        fitted = replace(fitted, best_is_last=trainer.best_is_last, closed_form=closed, trend=trend)
        if baselines and test is not None:
            fitted = replace(fitted, baselines=_baselines(run, split, k, metrics, where, ranks, state.seconds))
        if folder is not None and ranks.rank == 0:
            run_folder.write_end(folder, run, state.history, fitted.to_dict(), test)
        if run.classifiers is None:
            shown.end({} if test is None else test.metrics)  # before the files are hashed: TensorBoard's are there
            if folder is not None and ranks.rank == 0:
                run_folder.finish(folder)
            return fitted
        log.info("classifiers: one vector for each of %s items over frozen query vectors", f"{split.train.n_items:,}")
        shown.stage("classifiers")
        second = fit(
            classifier_run(run, split),
            split,
            None if folder is None else folder / "classifiers",
            resume=resume,
            device=device,
            k=k,
            metrics=metrics,
            progress=inner(shown),
            source=source,
            save_seconds=save_seconds,
        )
        tests, ranking, rankings = {"knn": test, "clf": second.test}, "towers", dict[str, float]()
        if run.classifiers.fusion:
            fused = fuse(run, second.run, split, where, folder, ranks, trainer.listed)
            ranking, rankings = fused.ranking, fused.valid
            if split.test is not None:
                log.info("ranking by towers and classifiers for every test query")
                tests["fusion"] = _test(fused, split, k, metrics, where)
        stages = {name: result for name, result in tests.items() if result is not None}
        shown.end(
            {f"{name}/{metric}": value for name, each in stages.items() for metric, value in each.metrics.items()}
        )
        if folder is not None and ranks.rank == 0:
            run_folder.write_stages(folder, stages, state.history, ranking, rankings)
            run_folder.finish(folder)
        return replace(fitted, stages=stages, ranking=ranking, rankings=rankings)


def _flat_settings(run: Run, split: Split) -> dict[str, Any]:
    """The recipe, its arguments, all settings by flat name and the sizes of the data, for trackers."""
    values = run.setup.flat()
    options = {f"model.{name}": value for name, value in values.pop("model_options").items()}
    sizes = {"queries": split.train.n_queries, "items": split.train.n_items, "interactions": len(split.train)}
    return {
        "recipe": run.recipe,
        "model": values.pop("model_name"),
        **values,
        **options,
        **(run.arguments or {}),
        **sizes,
    }


def _check(run: object, split: object, k: Sequence[int], metrics: Sequence[str]) -> None:
    """Fail before training if training or the evaluation after it would fail."""
    if not isinstance(run, Run):
        raise UserError(f"fit trains a Run, from compose(...) or a recipe; got {type(run).__name__}")
    if not isinstance(split, Split):
        hint = ": pass sparring.split(data), or Split(data) to train on all of it" * isinstance(split, Interactions)
        raise UserError(f"fit needs a Split, got {type(split).__name__}{hint}")
    if run.solver is not None and launched() > 1:
        raise UserError(f"{run.recipe} is solved by one process: start it without torchrun or --nproc")
    if run.setup.ranking.novelty:
        check_correctable(run.model)
    check_rows(run.setup, split.train)
    weight, n_items = split.train.weight, split.train.n_items
    if weight is not None and len(weight) and not weight.any():
        reason = "the weights of the training pairs are all 0, so there is nothing to learn"
        raise UserError(f"{reason}: choose another column, or none", "weight", '""')
    select = run.setup.validation.select
    metric, cutoff = selected(select)
    for name in (metric, *metrics):
        parse(name)
    if split.valid is not None and cutoff > n_items:
        raise UserError(f"the cutoff of select={select} exceeds the {n_items:,} items: choose a smaller one")
    if split.test is not None and (not k or min(k) < 1 or max(k) > n_items):
        raise UserError(f"the cutoffs k={tuple(k)} must be between 1 and the {n_items:,} items of the catalogue")


def _with_epochs(run: Run, device: torch.device) -> Run:
    """The run with the epochs for the device, where none are set."""
    training = run.setup.training
    if training.epochs is not None:
        return run
    log.info("epochs are not set: %s on a CPU, %s on a GPU", training.epochs_on("cpu"), training.epochs_on())
    return replace(run, setup=run.setup.replaced(epochs=training.epochs_on(device.type)))


def _with_temperature(run: Run, split: Split, device: torch.device, ranks: Ranks) -> tuple[Run, dict[float, float]]:
    """The run with the temperature that was chosen for it, and what was tried."""
    if not _chooses_tau(run):
        return run, {}
    tau, tried = choose_tau(run, split, device, ranks)
    return with_tau(run, tau), tried


def _as_recorded(run: Run, meta: Mapping[str, Any]) -> Run:
    """The run with the epochs and the temperature that its training recorded when it began."""
    recorded = flat(meta["setup"])
    if run.setup.training.epochs is None:
        run = replace(run, setup=run.setup.replaced(epochs=recorded["epochs"]))
    return with_tau(run, recorded["tau"]) if _chooses_tau(run) else run


def _chooses_tau(run: Run) -> bool:
    return run.setup.temperature.tau is None and run.solver is None


def _completed(trainer: Trainer, selection: Fitted | None) -> tuple[Run, ClosedFormChoice | None, TrendChoice | None]:
    """The run with its closed form and trend, as chosen before a refit or on the validation part; its folder gets all.

    If the model changed, the record of the best epoch has its metrics on the validation part, and `towers` that of the
    towers alone. Choices know the training part alone; then the trend counts what came before the test part.
    """
    run, ranks, split = trainer.run, trainer.ranks, trainer.split
    select, seed = run.setup.validation.select, run.setup.seed
    rank = None if trainer.valid is None else trainer.ranked
    model, closed, trend = run.model, None, None
    if selection is not None:
        closed, trend = selection.closed_form, selection.trend
    if run.closed_form:
        pairs = split.train.positives().to(trainer.device)
        model, closed = add_closed_form(model, pairs, run.closed_form, closed, rank, select, seed, ranks)
    if (run.trend or has_newcomers(run)) and model.item_shard() is None:
        trend = trend if run.trend else TrendChoice()
        tau = float(run.temperature(torch.zeros(1, dtype=torch.long, device=trainer.device)).detach())
        model, trend = add_trend(model, split, tau, trend, rank, select, ranks)
    if model is run.model:
        return run, closed, trend
    state, folder = trainer.state, trainer.folder
    if rank is not None:
        record = state.history[state.best_epoch - 1]
        record |= {"towers": record[select]} | rank(model).metrics
    count(model, split.joined().train, ranks)
    if folder is not None and ranks.rank == 0:
        trainer.checkpoints.write_model(model, state.best_epoch)
        trainer.checkpoints.write_metrics(state.history)
    return replace(run, model=model), closed, trend if run.trend else None


def _builder(
    run: Run, split: Split, refit: bool | Callable[[Interactions], Run]
) -> Callable[[Interactions], Run] | None:
    """The function that builds the run again from more data; None without a refit."""
    if refit is False:
        return None
    if split.valid is None:
        raise UserError("refit needs a validation part, which chooses the epoch, and this split has none")
    if run.classifiers is not None:
        raise UserError("refit is for towers alone, and this run has classifiers: set clf_epochs=0")
    if refit is not True:
        again = refit(split.train)
        if not isinstance(again, Run) or again.setup != run.setup:
            kind = "other settings than the run's" if isinstance(again, Run) else f"a {type(again).__name__}, not a Run"
            raise UserError(f"refit must build the run again, with the same settings, and it returned {kind}")
        return refit
    if run.recipe == "custom":
        raise UserError("refit=True builds the run again by its recipe, and this one has none: pass refit=FUNCTION")
    settings.resolve(finding.find(run.recipe), run.arguments or {}, setup=run.setup)
    return lambda data: settings.build(run.recipe, data, run.arguments, setup=run.setup)


def _finished(
    run: Run, split: Split, folder: Path | None, source: Mapping[str, Any] | None, ranks: Ranks
) -> Fitted | None:
    """The finished training in a folder, read from its files; None if there is none, or its tables are spread."""
    alone = ranks.world == 1 and run.setup.model.tables != "sharded"
    if folder is None or not alone or not manifest.is_finished(folder):
        return None
    listed, meta = run_folder.read_manifest(folder), run_folder.read_meta(folder)
    run = _as_recorded(run, meta)
    run_folder.check_same(folder, run_folder.description(run, split, source), run.setup)
    model = run_folder.read_run(folder, run.model)[0]
    past = _past_for_test(model, split)
    if past is not None:
        model.remember(past)
    result = files.read_json(listed.path("result.json"))
    history = [json.loads(line) for line in listed.path("metrics.jsonl").read_text().splitlines()]
    return Fitted(
        replace(run, model=model),
        history,
        result["best_epoch"],
        None,
        result["train_seconds"],
        partial(load, folder, model),
        best_is_last=result["best_is_last"],
        closed_form=ClosedFormChoice(**result["closed_form"]) if "closed_form" in result else None,
        trend=TrendChoice(**result["trend"]) if "trend" in result else None,
    )


def _choice(selection: Fitted, first: Split, joined: Split) -> dict[str, Any]:
    """The record of a refit: its epochs, the validation that chose them, and the interactions of both trainings."""
    select = selection.run.setup.validation.select
    figures = selection.history[selection.best_epoch - 1]
    return {
        "epochs": selection.best_epoch,
        "of": len(selection.history),
        "select": select,
        "value": figures[select],
        "train": len(first.train),
        "interactions": len(joined.train),
    }


def _start(
    trainer: Trainer,
    resume: bool,
    overwrite: bool,
    source: Mapping[str, Any] | None,
    warm: str | Path | None,
    temperatures: Mapping[float, float],
    chosen: Mapping[str, Any] | None = None,
) -> tuple[list[str], dict[str, np.ndarray] | None]:
    """Prepare the first step: copy the vectors of a warm start, then resume the run in the folder or start one.

    `chosen` is the record of a refit. Returns the description of the first batch where there is a folder, and the
    ids that started warm.
    """
    run, split, folder, ranks = trainer.run, trainer.split, trainer.folder, trainer.ranks
    saved = resume and folder is not None and any(folder.glob("checkpoint*.safetensors"))  # it has the vectors
    began = None if warm is None or saved else warm_start(run.model, split, warm)
    ids = None if began is None else {"queries": began.queries, "items": began.items}
    if began is not None:
        trainer.listed = listed_items(run.model, split.train, began.items)
    if folder is None:
        if began is not None:
            began.report()
        return [], ids
    described = run_folder.description(run, split, source)
    if temperatures:
        described["temperatures"] = {str(tau): round(score, 6) for tau, score in temperatures.items()}
    if began is not None:
        described["warm"] = began.described()
    if chosen is not None:
        described["refit"] = chosen
    if ranks.share(resume and run_folder.has_run(folder)):
        run_folder.check_same(folder, described, run.setup)
        if not saved and run_folder.read_meta(folder).get("warm") != described.get("warm"):
            raise UserError(
                f"{folder} was started from other vectors than those of warm={warm}: resume cannot change that"
            )
        trainer.load()
        trainer.listed = run_folder.listed_items(folder)  # a warm start trains items without pairs
        if ranks.rank == 0:
            run_folder.reopen(folder)  # not before: a run that cannot be resumed stays as it was
    elif ranks.rank == 0:
        if overwrite:
            run_folder.delete_run(folder)
        checkpoint.clear_tables(folder)
        seen = split.before("test")
        past = _past_for_test(run.model, split)
        run_folder.write_start(folder, split.train, seen, described, run.setup, run.model, split.test, ids, past)
    if began is not None:
        began.report()
    batch: list[str] = described["batch"]
    return batch, ids


def _recommender(run: Run, split: Split, folder: Path | None, warm: Mapping[str, np.ndarray] | None) -> TrainedModel:
    """A copy of a trained model that recommends; with later stages, the run in its folder."""
    if run.model.item_shard() is not None:
        raise UserError("the tables are spread over several processes: sparring.load(out) recommends")
    model = copy.deepcopy(run.model).cpu().eval()
    if run.classifiers is not None:
        if folder is None:
            raise UserError("a run with classifiers recommends from its folder: train it with `out`")
        return load(folder, model)
    train = split.train
    if folder is None:
        tensors = seen_tensors(train, split.before("test"), split.test, model, warm)
        eligibility = Eligibility.read(tensors, train.n_queries, train.n_items)
    else:
        eligibility = run_folder.eligibility(folder)
    ids = Ids(train.query_ids, train.item_ids, train.query_table, train.item_table)
    novelty = run.setup.ranking.novelty
    ranked = novel(model, novelty, split.before("test"), eligibility.listed(train.n_items))
    return TrainedModel(ranked, ids, eligibility, repeats=train.repeats, novelty=novelty)


def _past_for_test(model: Retriever, split: Split) -> Histories | None:
    """The histories that the test part is ranked by, validation part included, as long as the model reads them."""
    readers = model.past_readers()
    return past_of(split, "test").latest(max(reader.last for reader in readers)) if readers else None


def _baselines(
    run: Run,
    split: Split,
    k: Sequence[int],
    metrics: Sequence[str],
    device: torch.device,
    ranks: Ranks,
    seconds: float,
) -> dict[str, Evaluation]:
    """The test metrics of popularity, for texts of TF-IDF, and of the best cheap baseline."""
    assert split.test is not None
    if ranks.world > 1:
        log.info("no baselines: they are solved by one process; `sparring evaluate` of this run shows them")
        return {}
    log.info("baselines: popularity, and the best on the validation part that takes seconds")
    texts = text_columns(run.setup.flat())

    def rank(model: Retriever | TfIdf, listed: Tensor | None) -> Evaluation:
        return _test(model, split, k, metrics, device, among=listed)

    select, seed = run.setup.validation.select, run.setup.seed
    return solve_baselines(
        split, split.test, rank, device, select=select, seed=seed, seconds=seconds, apart=(run.recipe,), texts=texts
    )


def _test(
    model: Encoder | Lister,
    split: Split,
    k: Sequence[int],
    metrics: Sequence[str],
    device: torch.device,
    ranks: Ranks = ALONE,
    among: Tensor | None = None,
) -> Evaluation:
    assert split.test is not None
    metrics = (*metrics, *(PROPENSITY_METRICS if split.test.propensity is not None else ()))
    seen = split.seen_for("test").to(device)
    return evaluate(model, split.test, seen, k, metrics, counts=split.train.counts(), ranks=ranks, among=among)
