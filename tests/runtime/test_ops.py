"""The list of operations: what may not run is refused, what is not needed is freed."""

import pytest

from rannc_jax import ScheduleError
from rannc_jax.runtime.ops import Op, OpKind, check, freed

A, B, C, D = (("act", name, 0, 0) for name in "abcd")


def run(inputs, outputs, donates=(), name="F0"):
    return Op(
        kind=OpKind.RUN,
        name=name,
        stage=0,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        donates=frozenset(donates),
    )


def free(*keys):
    return Op(kind=OpKind.FREE, name="free", stage=0, inputs=keys)


def test_a_good_list_passes():
    check([run([A], [B]), free(A), run([B], [C], donates=[B])], [A], [C])


@pytest.mark.parametrize(
    ("ops", "wanted", "why"),
    [
        ([run([B], [C])], [], "is not defined"),
        ([free(A), run([A], [B])], [], "was freed or donated before"),
        ([run([A], [B], donates=[A]), run([A], [C])], [], "was freed or donated before"),
        ([run([A], [A])], [], "is defined twice"),
        ([run([A], [B]), free(B), run([A], [B])], [], "is defined twice"),
        ([run([A], [B], donates=[C])], [], "is donated but no input"),
        ([free(A), free(A)], [], "was freed or donated before"),
        ([run([A], [B])], [C], "missing"),
        ([run([A], [B]), free(B)], [B], "missing"),
    ],
)
def test_what_cannot_run_is_refused(ops, wanted, why):
    with pytest.raises(ScheduleError, match=why):
        check(ops, [A], wanted)


def test_the_message_names_operation_and_key():
    with pytest.raises(ScheduleError, match=r"operation 1 \(run B2\)") as error:
        check([run([A], [B]), run([C], [D], name="B2")], [A], [])
    assert "('act', 'c', 0, 0)" in str(error.value)


def test_keys_are_freed_right_behind_their_last_use():
    ops = freed([run([A], [B]), run([A, B], [C]), run([C], [D])], [D])
    assert [(op.kind.value, op.inputs) for op in ops if op.kind is OpKind.FREE] == [
        ("free", (A, B)),
        ("free", (C,)),
    ]
    assert [op.kind for op in ops] == [OpKind.RUN, OpKind.RUN, OpKind.FREE, OpKind.RUN, OpKind.FREE]
    check(ops, [A], [D])


def test_what_nobody_reads_is_freed_at_once():
    ops = freed([run([A], [B, C]), run([C], [D])], [D])
    assert ops[1].kind is OpKind.FREE
    assert set(ops[1].inputs) == {A, B}


def test_donated_and_kept_keys_are_not_freed():
    ops = freed([run([A], [B]), run([B], [C], donates=[B]), run([C], [D])], [C, D])
    assert [op.inputs for op in ops if op.kind is OpKind.FREE] == [(A,)]
    check(ops, [A], [C, D])
