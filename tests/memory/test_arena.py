from __future__ import annotations

import random
import threading

from isles.memory.flow import Arena


def test_grants_are_told_in_their_order_whichever_thread_frees() -> None:
    """A slot's second use was once told before its first, by another thread: it was then emptied under that use."""
    arena, told = Arena(1, used=1), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(30)
        told.append("first")

    arena.want(1, first)
    arena.want(1, lambda: told.append("second"))
    thread = threading.Thread(target=arena.free, args=(1,))
    thread.start()
    assert begun.wait(30)
    arena.free(1)  # grants the second, while the first is still being told
    assert not told
    go_on.set()
    thread.join(30)
    assert told == ["first", "second"]


def test_who_is_told_may_ask_and_free() -> None:
    arena, told = Arena(2), list[int]()

    def tell(number: int) -> None:
        told.append(number)
        if number < 5:
            arena.want(1, lambda: tell(number + 2))
        arena.free(1)

    arena.want(1, lambda: tell(0))
    arena.want(1, lambda: tell(1))
    assert told == [0, 2, 4, 6, 1, 3, 5]
    assert (arena.used, len(arena._requested), arena.peak) == (0, 0, 2)


def test_who_fails_leaves_the_others_theirs() -> None:
    arena, told = Arena(1, used=1), list[str]()

    def fail() -> None:
        raise RuntimeError("told")

    arena.want(0.5, fail)
    arena.want(0.5, lambda: told.append("next"))
    try:
        arena.free(1)
    except RuntimeError:
        arena.free(0.1)
    assert told == ["next"]


def test_many_threads_get_what_there_is_and_no_more() -> None:
    arena, lock, asked, told = Arena(10), threading.Lock(), list[int](), list[int]()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for turn in range(200):
            nbytes, granted = rng.randint(1, 5), threading.Event()

            def mine(number: int = 200 * seed + turn, granted: threading.Event = granted) -> None:
                told.append(number)
                granted.set()

            with lock:  # so that the order of asking is known
                asked.append(200 * seed + turn)
                arena.want(nbytes, mine)
            assert granted.wait(30)
            arena.free(nbytes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert told == asked
    assert arena.used == 0
    assert arena.peak <= 10
