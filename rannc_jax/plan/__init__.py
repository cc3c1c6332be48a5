"""The decision, as plain frozen data: made by `partition`, read by `runtime`, saved, diffed, printed."""

from rannc_jax.plan.data import PLAN_VERSION, Block, Crossing, Plan, RunnerUp, Stage, Tie

__all__ = ["PLAN_VERSION", "Block", "Crossing", "Plan", "RunnerUp", "Stage", "Tie"]
