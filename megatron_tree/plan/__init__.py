"""Planning: pure functions from sizes and a topology to a schedule. Read `planner.py`, then `cost.py`."""

from ..units import parse_grid
from .arrangement import Arrangement, HeadSplit
from .cast import Mask
from .planner import plan_decode, plan_training
from .plans import Cost, DecodePlan, PassPlan, Shape, TrainingPlan
from .topology import (
    Level,
    Placement,
    Topology,
    default_topology,
    known_topologies,
    load_topology,
    place,
    save_topology,
)

__all__ = [
    "Arrangement",
    "Cost",
    "DecodePlan",
    "HeadSplit",
    "Level",
    "Mask",
    "PassPlan",
    "Placement",
    "Shape",
    "Topology",
    "TrainingPlan",
    "default_topology",
    "known_topologies",
    "load_topology",
    "parse_grid",
    "place",
    "plan_decode",
    "plan_training",
    "save_topology",
]
