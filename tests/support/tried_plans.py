"""Candidates that a kind of call measures, in place of those that the planner would make."""

from unittest import mock

from megatron_tree.core.attention import tuning


def tried(*others):
    """In this context the planner's plan is tried, and those with these options."""

    def alternatives(plan_on, topology, **_):
        return tuple(plan_on(topology=topology, **options) for options in ({}, *others))

    return mock.patch.object(tuning, "alternatives", alternatives)


def grid_and_heads(world):
    """The planner's plan, a grid whose keys all ranks gather, and all heads exchanged."""
    return tried({"ulysses_size": 1, "grid": (1, world)}, {"ulysses_size": world})


def taken(index):
    """In this context the candidate at this index counts as the fastest, whatever it takes."""
    return mock.patch.object(tuning, "_choice", lambda candidates, seconds: candidates[index])
