"""The table of what mechanisms of the planner are worth: each is switched off and on again, and one is known to matter."""

from __future__ import annotations

from benchmarks.mechanisms import MECHANISMS, TABLES, Row, line, of_when_not, step_s, worth


def test_a_mechanism_is_off_only_while_it_is_switched_off() -> None:
    for mechanism in MECHANISMS:
        before = [vars(owner)[name] for owner, name, _ in mechanism.off]
        with mechanism.switched_off():
            assert [vars(owner)[name] for owner, name, _ in mechanism.off] == [instead for *_, instead in mechanism.off]
        assert [vars(owner)[name] for owner, name, _ in mechanism.off] == before
        assert mechanism.lines > 0 or not mechanism.code


def test_without_weight_gradients_in_waits_the_first_row_is_slower() -> None:
    row = next(of_when_not())
    found = worth(MECHANISMS[0], [row], {row.name: step_s(row.job) or 0.0})
    assert found.losses[row.name] > 0.005
    assert f": {row.name} |" in line(MECHANISMS[0], found)


def test_no_row_counts_as_lost_because_another_one_has_its_name() -> None:
    names = [row.name for table in TABLES.values() for row in table()]
    assert len(names) == len(set(names))


def test_a_row_that_no_longer_fits_is_counted() -> None:
    first = next(of_when_not())
    small = first.job.model_copy(update={"budget": first.job.budget.model_copy(update={"memory_gib": 1.0})})
    found = worth(MECHANISMS[0], [first, Row("small", small)], {first.name: 1.0, "small": 1.0})
    assert found.lost == ("small",)
    assert "1 no longer fit" in line(MECHANISMS[0], found)
