"""The HTTP service: recommendations, similar items, changes of items and the swap of a newer run, and the web page.

It answers from run folders and their indexes. Training, evaluation and command-line parsing are elsewhere.
"""

from sparring.serving.http.app import Service
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.schema import Limits
from sparring.serving.http.server import run
from sparring.serving.http.store import Store
from sparring.serving.http.telemetry import EventLog

__all__ = ["EventLog", "Limits", "RunRegistry", "Service", "Store", "run"]
