from sparring import core as core
from sparring import data as data
from sparring import evaluation as evaluation
from sparring import losses as losses
from sparring import models as models
from sparring import negatives as negatives
from sparring import recipes as recipes
from sparring import serving as serving
from sparring import testing as testing
from sparring import training as training
from sparring.core.errors import UserError as UserError
from sparring.data.interactions import Interactions as Interactions
from sparring.data.interactions import Split as Split
from sparring.data.prepared.preparation import prepare as prepare
from sparring.data.reading import read as read
from sparring.data.splits import split as split
from sparring.evaluation.ranking import Evaluation as Evaluation
from sparring.evaluation.ranking import evaluate as evaluate
from sparring.experiments.auto import auto as auto
from sparring.experiments.recommender import Recommender as Recommender
from sparring.recipes.run import Run as Run
from sparring.recipes.run import Term as Term
from sparring.recipes.run import compose as compose
from sparring.recipes.settings import build as build
from sparring.recipes.setup import Setup as Setup
from sparring.training.fitting import Fitted as Fitted
from sparring.training.fitting import fit as fit
from sparring.training.fusing import fuse as fuse
from sparring.training.step import describe_batch as describe_batch
from sparring.training.trained import Trained as Trained
from sparring.training.trained import load as load

__version__: str
__all__: list[str]
