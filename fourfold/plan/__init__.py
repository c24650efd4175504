"""Planning: what a layout needs and how long its steps take, before anything runs."""

from fourfold.cost.memory import memory_of
from fourfold.plan.cluster import Cluster, parse_cluster
from fourfold.plan.planner import Candidate, Plan, candidate_of, plan
from fourfold.plan.steptime import step_time_of

__all__ = [
    "Candidate",
    "Cluster",
    "Plan",
    "candidate_of",
    "memory_of",
    "parse_cluster",
    "plan",
    "step_time_of",
]
