"""The tests that every tower passes."""

from __future__ import annotations

import copy
import dataclasses
import unittest

import torch
from torch import Tensor, nn

from sparring.core.part import n_ids
from sparring.data.histories import Before, Context, SequenceBatches, Windows
from sparring.models.histories import past_readers, reading
from sparring.models.towers import HistoryReader

_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (5,), (2, 3), (2, 1, 2))


class TowersContract:
    """The tests that every tower passes: inherit it, build your tower, run pytest.

        class TestMine(TowersContract):
            make = lambda self: MyTower(n=12, dim=4)

    `make` builds a tower of a few ids; it is called with a fixed seed, so two calls give equal towers. The tower maps
    ids of any shape to vectors, and has `n` ids (a plain nn.Embedding has `num_embeddings`). Before the tests all
    parameters are moved by small random numbers, so that no start hides a gradient. `frozen` names parameters that
    are not trained. A test that cannot run here is skipped with a reason.
    """

    frozen: tuple[str, ...] = ()
    tolerance: float = 1e-5

    def make(self) -> nn.Module:
        raise TypeError(f"{type(self).__name__} must define make(self) -> nn.Module")

    def built(self, seed: int = 0) -> nn.Module:
        """A tower whose parameters have moved from their start."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tower = self.make()
            torch.manual_seed(1 + seed)
            with torch.no_grad():
                for parameter in tower.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return tower

    def vectors(self, tower: nn.Module) -> Tensor:
        """(n, D) the vectors of all ids, in the tower's present mode."""
        vectors: Tensor = tower(torch.arange(_count(tower)))
        return vectors

    def test_shapes(self) -> None:
        """Ids of any shape and any integer type give finite vectors (..., D) of floating-point numbers."""
        tower = self.built().eval()
        n = _count(tower)
        width = self.vectors(tower).shape[-1]
        for shape in _SHAPES:
            ids = torch.randint(n, shape, generator=torch.Generator().manual_seed(2))
            vectors = tower(ids)
            assert vectors.shape == (*shape, width), f"ids {shape} gave vectors of shape {tuple(vectors.shape)}"
            assert vectors.dtype.is_floating_point, f"vectors are {vectors.dtype}"
            assert torch.equal(tower(ids.int()), vectors), "int32 ids have other vectors than int64 ids"
        assert bool(self.vectors(tower).isfinite().all()), "a vector is not finite"

    def test_evaluation_is_deterministic(self) -> None:
        """In evaluation mode two passes give the same bits, and a pass changes neither parameters nor buffers."""
        tower = self.built().eval()
        before = copy.deepcopy(tower.state_dict())
        passes = []
        for seed in (5, 6):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                passes.append(self.vectors(tower))
        assert torch.equal(*passes), "two passes in evaluation mode differ: is there dropout?"
        changed = [name for name, value in tower.state_dict().items() if not torch.equal(value, before[name])]
        assert not changed, f"forward changed {changed}"

    def test_batches_of_one(self) -> None:
        """An id alone, as a scalar and as a batch of one, has its vector of the batch."""
        tower = self.built().eval()
        together = self.vectors(tower)
        for i, vector in enumerate(together):
            for alone in (tower(torch.tensor(i)), tower(torch.tensor([i]))[0]):
                self._close(alone, vector, f"id {i} alone has another vector than in a batch")

    def test_rows_are_independent(self) -> None:
        """A vector depends on its own id only: not on the order, the repetitions or the others, in training either.

        The modules nn.Dropout are switched off for this test, because the rows of a batch draw their own masks; build
        a tower that drops in other ways with a rate of 0.
        """
        tower = self.built()
        for mode in ("evaluation", "training"):
            tower.train(mode == "training")
            for module in tower.modules():
                if isinstance(module, nn.Dropout):
                    module.eval()
            together, n = self.vectors(tower).detach(), _count(tower)
            order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
            batches = (order, order[: n // 2 + 1], torch.cat([order, order[:1], order[:1]]))
            for ids in batches:
                self._close(tower(ids), together[ids], f"a vector depends on the rest of its batch in {mode}")

    def test_gradients_reach_every_parameter(self) -> None:
        """Every parameter that is not frozen gets a finite gradient that is not all zero; frozen ones get none."""
        tower = self.built().train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            vectors = self.vectors(tower)
            if not vectors.requires_grad:
                left = [name for name, _ in tower.named_parameters() if name not in self.frozen]
                assert not left, f"no gradient reaches {left}"
                return
            (vectors * torch.randn_like(vectors)).sum().backward()
        for name, parameter in tower.named_parameters():
            grad = parameter.grad
            if name in self.frozen:
                assert grad is None or not bool(grad.to_dense().any()), f"{name} is frozen and has a gradient"
                continue
            assert grad is not None, f"no gradient reaches {name}: is it detached, or unused?"
            values = grad.to_dense() if grad.is_sparse else grad
            assert bool(values.isfinite().all()), f"the gradient of {name} is not finite"
            assert bool(values.any()), f"the gradient of {name} is 0"

    def test_state_round_trip(self) -> None:
        """A tower that loads the state of another has its vectors, bit by bit."""
        first, second = self.built(0).eval(), self.built(1).eval()
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert torch.equal(self.vectors(first), self.vectors(second)), "the state does not hold everything"

    def test_state_is_registered(self) -> None:
        """Tensors are parameters or buffers, which move to a device and are saved; none is a plain attribute."""
        for name, module in self.built().named_modules():
            plain = [key for key, value in vars(module).items() if isinstance(value, Tensor)]
            assert not plain, f"{name or type(module).__name__} holds {plain} as plain attributes: register buffers"

    def test_devices(self) -> None:
        """On a GPU the vectors are those of the CPU, up to rounding."""
        if not torch.cuda.is_available():
            raise unittest.SkipTest("there is no GPU: vectors were compared on the CPU only")
        tower = self.built().eval()
        here, moved = self.vectors(tower), copy.deepcopy(tower).cuda()
        there = moved(torch.arange(_count(tower), device="cuda")).cpu()
        torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-4)

    def test_histories(self) -> None:
        """A tower that encodes histories (B, L) gives finite vectors (B, D), empty ones too, each from its own row."""
        tower = self.built().eval()
        if not isinstance(tower, HistoryReader):
            raise unittest.SkipTest("the tower is no HistoryReader: histories were not tested")
        items = torch.tensor([[0, 1, 2], [-1, -1, -1], [2, 0, 1]])
        vectors = tower.encode_history(items)
        assert vectors.shape == (3, self.vectors(tower).shape[-1])
        assert bool(vectors.isfinite().all()), "the vector of a history is not finite"
        for row, vector in zip(items, vectors, strict=True):
            self._close(tower.encode_history(row[None])[0], vector, "a history's vector depends on other rows")

    def test_the_future_changes_nothing(self) -> None:
        """Where a HistoryTower or SequenceTower inside reads an order, the vector that predicts an item depends on the
        items of its query before that one alone: other items everywhere else, in the same window too, change nothing.
        """
        tower = self.built().eval()
        readers = past_readers(tower)
        past = readers[0].past if readers else None
        if past is None or not past.ordered or int(past.start.diff().max()) < 2:
            raise unittest.SkipTest("the tower reads no histories in an order: the future was not tested")
        places, slots, windows = next(SequenceBatches(past, readers[0].last, len(past.items)).steps(0))
        owners = torch.searchsorted(past.start, places, right=True) - 1

        def read(items: Tensor, context: Context) -> Tensor:
            for reader in readers:
                reader.remember(dataclasses.replace(past, items=items))
            with reading(tower, context):
                vectors: Tensor = tower(owners)
            return vectors

        others = (past.items + 1) % (past.items.max() + 1)
        for context in (Before(places), Windows(windows, slots)):
            known = read(past.items, context)
            for row, place in enumerate(places.tolist()):
                before, changed = slice(int(past.start[owners[row]]), place), others.clone()
                changed[before] = past.items[before]
                self._close(read(changed, context)[row], known[row], "the vector that predicts an item knows others")

    def _close(self, found: Tensor, wanted: Tensor, why: str) -> None:
        assert torch.allclose(found, wanted, rtol=self.tolerance, atol=self.tolerance), why


def _count(tower: nn.Module) -> int:
    """The number of ids of a tower."""
    n = n_ids(tower)
    assert n is not None, f"{type(tower).__name__} has no attribute n, its number of ids"
    return n
