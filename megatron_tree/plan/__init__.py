"""Planning: pure functions from sizes to a schedule."""

from .planner import Plan, Shape, plan_decode, plan_training

__all__ = ["Plan", "Shape", "plan_decode", "plan_training"]
