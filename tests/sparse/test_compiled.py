"""Graphs that are made once for arguments of the same shapes."""

import threading

import mlx.core as mx
import pytest

from mlx_snapkv.sparse import compiled as module
from mlx_snapkv.sparse.compiled import compiled
from mlx_snapkv.sparse.residual import Residual


@pytest.fixture
def traced(monkeypatch):
    """A compiled function, two of whose graphs are held, and the shapes that one was made for."""
    monkeypatch.setattr(module, "MAX_GRAPHS", 2)
    made: list[tuple[int, int]] = []

    def scaled(pair, factor: int, rest: mx.array | None = None) -> mx.array:
        first, second = pair
        made.append((first.size, factor))
        return factor * first + second.sum() + (0 if rest is None else rest)

    return compiled(scaled), made


def ones(n: int) -> tuple[mx.array, mx.array]:
    return mx.ones(n), mx.arange(3)


def test_a_graph_is_made_once_for_arguments_of_the_same_shapes(traced):
    function, made = traced
    for _ in range(3):
        assert function(ones(4), 2).tolist() == [5] * 4
    assert function((mx.zeros(4), mx.zeros(3, mx.int32)), 2).tolist() == [0] * 4
    assert made == [(4, 2)]
    assert function(ones(4), 3).tolist() == [6] * 4
    assert function(ones(5), 3, mx.array(10)).tolist() == [16] * 5
    assert made == [(4, 2), (4, 3), (5, 3)]


def test_only_those_of_the_latest_shapes_are_held(traced):
    function, made = traced
    for n in (1, 2, 3, 1, 1):
        assert function(ones(n), 1).tolist() == [4] * n
    assert [n for n, _ in made] == [1, 2, 3, 1]


def test_every_thread_has_its_own_whatever_others_drop(traced):
    """MLX holds a graph by the place in memory of what it is a graph of, which another may take later."""
    function, made = traced
    wrong: list[int] = []

    def ask(n_rounds: int) -> None:
        for i in range(n_rounds):
            n, factor = 1 + i % 3, i % 5
            if function(ones(n), factor).tolist() != [factor + 3] * n:
                wrong.append(i)

    threads = [threading.Thread(target=ask, args=(300,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(made) > 300


def test_named_tuples_stay_what_they_are():
    """As mlx.core's trees promise: a graph's function calls their methods."""
    one = mx.ones(1)
    rest = Residual(one, one, one, one)  # type: ignore[arg-type]
    assert compiled(lambda x: x._replace(log_mass=2 * x.log_mass).log_mass)(rest).item() == 2
