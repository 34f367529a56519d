"""Planning: pure functions from sizes and a topology to a schedule. Read `planner.py`, then `cost.py`."""

from .decode import SelectPlan, plan_select
from .planner import plan_decode, plan_training
from .plans import (
    Arrangement,
    CallSizes,
    Cost,
    DecodePlan,
    HeadSplit,
    PassPlan,
    Shape,
    TrainingPlan,
    check_grid,
    check_heads,
    grids,
)
from .prefill_grid import chunk_sizes, plan_prefill_grid
from .scan import plan_scan
from .stages import Stages, run_stages
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
from .training import Mask

__all__ = [
    "Arrangement",
    "CallSizes",
    "Cost",
    "DecodePlan",
    "HeadSplit",
    "Level",
    "Mask",
    "PassPlan",
    "Placement",
    "SelectPlan",
    "Shape",
    "Stages",
    "Topology",
    "TrainingPlan",
    "check_grid",
    "check_heads",
    "chunk_sizes",
    "default_topology",
    "grids",
    "known_topologies",
    "load_topology",
    "place",
    "plan_decode",
    "plan_prefill_grid",
    "plan_scan",
    "plan_select",
    "plan_training",
    "run_stages",
    "save_topology",
]
