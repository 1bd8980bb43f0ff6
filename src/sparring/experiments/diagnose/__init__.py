"""Diagnosis of a run's negatives: measures against the full softmax, profiles, negatives of an item, and advice.

A diagnosis never trains and leaves the run unchanged.
"""
