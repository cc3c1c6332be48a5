"""When each piece runs: pure functions of small integers, and a clock to try them on."""

from rannc_jax.schedule.action import Action as Action
from rannc_jax.schedule.action import Kind as Kind
from rannc_jax.schedule.check import check_actions as check_actions
from rannc_jax.schedule.check import linearise as linearise
from rannc_jax.schedule.forward import Forward as Forward
from rannc_jax.schedule.fuse import fuse_backwards as fuse_backwards
from rannc_jax.schedule.gpipe import GPipe as GPipe
from rannc_jax.schedule.grid import parse_grid as parse_grid
from rannc_jax.schedule.grid import print_grid as print_grid
from rannc_jax.schedule.held import most_held as most_held
from rannc_jax.schedule.interleaved import Interleaved as Interleaved
from rannc_jax.schedule.one_f_one_b import OneFOneB as OneFOneB
from rannc_jax.schedule.parse import schedule_named as schedule_named
from rannc_jax.schedule.schedule import Grid as Grid
from rannc_jax.schedule.schedule import Schedule as Schedule
from rannc_jax.schedule.simulate import Span as Span
from rannc_jax.schedule.simulate import Timeline as Timeline
from rannc_jax.schedule.simulate import Transfer as Transfer
from rannc_jax.schedule.simulate import simulate as simulate
from rannc_jax.schedule.written import Written as Written
from rannc_jax.schedule.zero_bubble import ZeroBubble as ZeroBubble
