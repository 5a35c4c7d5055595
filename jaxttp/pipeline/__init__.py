"""The parts composed, from names to one frozen result: what CLI, experiments and notebooks call."""

from jaxttp.pipeline.conditioning import NETWORKS as NETWORKS
from jaxttp.pipeline.conditioning import SWEEP_VALUES as SWEEP_VALUES
from jaxttp.pipeline.conditioning import Conditioning as Conditioning
from jaxttp.pipeline.conditioning import ConditionSettings as ConditionSettings
from jaxttp.pipeline.conditioning import condition as condition
from jaxttp.pipeline.conditioning import condition_sweep as condition_sweep
from jaxttp.pipeline.conditioning import network_condition as network_condition
from jaxttp.pipeline.conditioning import sweep_to_json as sweep_to_json
from jaxttp.pipeline.sweeping import START_NAMES as START_NAMES
from jaxttp.pipeline.sweeping import TaskExtrapolation as TaskExtrapolation
from jaxttp.pipeline.sweeping import TaskSweep as TaskSweep
from jaxttp.pipeline.sweeping import compare_task as compare_task
from jaxttp.pipeline.sweeping import extrapolate_task as extrapolate_task
from jaxttp.pipeline.sweeping import starting_points as starting_points
from jaxttp.pipeline.sweeping import sweep_task as sweep_task
from jaxttp.pipeline.tasks import Settings as Settings
from jaxttp.pipeline.tasks import Task as Task
from jaxttp.pipeline.tasks import build_task as build_task
from jaxttp.pipeline.tracking import PrunedRun as PrunedRun
from jaxttp.pipeline.tracking import TrackedRun as TrackedRun
from jaxttp.pipeline.tracking import pruning_runs as pruning_runs
from jaxttp.pipeline.tracking import tracked_run as tracked_run
from jaxttp.pipeline.training_time import Forecast as Forecast
from jaxttp.pipeline.training_time import forecast as forecast
