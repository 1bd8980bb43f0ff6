"""Experiments over many trainings: studies (compare, tune, reproduce), diagnoses of negatives, and their reports.

Nothing here is needed to train or serve a run; serving uses only the report and diagnose packages.
"""
