"""Pictures of plans: reads `Plan` and `Timeline` only."""

from rannc_jax.viz.timeline import predicted_timeline as predicted_timeline
from rannc_jax.viz.timeline import timeline_text as timeline_text
