"""The figure of how clusters were learned."""

from __future__ import annotations

from sparring.experiments.report.clustering import learning


def test_a_single_modality_has_no_panel_of_alignment() -> None:
    """A single modality has no alignment loss and one panel; with an alignment loss there are two."""
    rows = [
        {"phase": "learning", "epoch": e, "align": 0.0, "primary_error": 1.0 / e, "secondary_error": 0.5 / e}
        for e in (1.0, 2.0, 3.0)
    ]
    assert len(learning(rows).axes) == 1
    assert [axes.get_ylabel() for axes in learning([{**row, "align": 2.0} for row in rows]).axes] == [
        "alignment loss, nats",
        "squared error of an item",
    ]
