"""What `python -m rannc_jax` offers: the parser, and the short commands.

A command that does more than print something has a file of its own, imported when it is asked for.
"""

import argparse
import sys
from collections.abc import Sequence

from rannc_jax.cli import target
from rannc_jax.errors import ConfigError, RanncError, message
from rannc_jax.plan import Plan
from rannc_jax.viz import predicted_timeline, timeline_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; None takes `sys.argv`.

    Returns:
        The exit status: 0 for success, 1 where the answer is no (plans differ, a demo's numbers do not
        agree), 2 for a mistake.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (RanncError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rannc_jax", description="Cut an unchanged network and train it on many devices."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser(
        "plan",
        help="plan a model for the machines of a mesh file, or cut a cost-annotated graph",
        epilog="BY_STAGE is one value, one a stage (2,auto,1), or by index or module (0=2,encoder.layer.3=1)",
    )
    target.add_arguments(plan)
    plan.set_defaults(run=_plan)

    show = commands.add_parser("show", help="print a saved plan as a table")
    show.add_argument("plan", help="a file that Plan.save wrote")
    show.add_argument("--explain", action="store_true", help="say why the plan is as it is")
    show.set_defaults(run=_show)

    simulate = commands.add_parser("simulate", help="draw a step of a saved plan on the clock")
    simulate.add_argument("plan", help="a file that Plan.save wrote")
    simulate.add_argument("--width", type=int, default=72, help="columns of the picture (default 72)")
    simulate.set_defaults(run=_simulate)

    diff = commands.add_parser("diff", help="say what is different in another plan")
    diff.add_argument("first", help="a file that Plan.save wrote")
    diff.add_argument("second", help="the plan to compare it with")
    diff.set_defaults(run=_diff)

    doctor = commands.add_parser("doctor", help="print versions, settings and devices")
    doctor.set_defaults(run=_doctor)

    calibrate = commands.add_parser("calibrate", help="measure the devices here and write a device file")
    calibrate.add_argument("--out", default=None, help="the file; printed without it")
    calibrate.add_argument("--seconds", type=float, default=60.0, help="about how long (default 60)")
    calibrate.set_defaults(run=_calibrate)

    demo = commands.add_parser("demo", help="train an unchanged BERT in a pipeline on 8 fake CPU devices")
    demo.add_argument("--steps", type=int, default=None, help="optimizer steps")
    demo.add_argument("--short", action="store_true", help="a smaller model and fewer steps")
    demo.set_defaults(run=_demo)
    return parser


def _plan(options: argparse.Namespace) -> int:
    if options.graph is None:
        return target.main(options)
    from rannc_jax.cli import graph

    if options.target is not None or options.devices is None:
        raise ConfigError(message("--graph takes the place of a model, and needs --devices."))
    return graph.main(
        options.graph,
        options.devices,
        objective=options.objective,
        num_microbatches=options.microbatches,
        as_json=options.json,
    )


def _simulate(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    print(timeline_text(plan, predicted_timeline(plan), width=options.width))
    return 0


def _show(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    print(plan.explain() if options.explain else plan)
    return 0


def _diff(options: argparse.Namespace) -> int:
    difference = Plan.load(options.first).diff(Plan.load(options.second))
    print(difference or "no difference")
    return 1 if difference else 0


def _doctor(options: argparse.Namespace) -> int:
    from rannc_jax.cli import doctor  # starts the devices

    del options
    print(doctor.report())
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    from rannc_jax.cli import calibrate  # starts the devices

    return calibrate.main(options.out, options.seconds)


def _demo(options: argparse.Namespace) -> int:
    from rannc_jax.cli import demo  # loads PyTorch

    return demo.main(num_steps=options.steps, short=options.short)
