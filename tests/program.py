"""What a traced program is made of, for tests of what it computes and keeps."""

from collections.abc import Iterator

import jax
from jax.extend.core import jaxprs_in_params


def equations(function, *arguments) -> list:
    """Every primitive operation of `function`, those inside loops and called functions included."""
    return list(_inside(jax.make_jaxpr(function)(*arguments).jaxpr))


def shapes_made(function, *arguments) -> set[tuple[int, ...]]:
    """The shapes of everything that those operations return."""
    return {result.aval.shape for equation in equations(function, *arguments) for result in equation.outvars}


def _inside(jaxpr) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _inside(inner)
