"""Heads over Python threads: the same results, threads that are kept, and settings left as they were."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from aah_dist.attention import banded, threads, window_attention


@pytest.fixture
def use(monkeypatch):
    """Sets torch's threads, with calls of any size handed to them."""
    monkeypatch.setattr(banded, "FEW_PRODUCTS", 0)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def results(kv_heads, length, windows, dropout_p):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, length, 16, generator=generator).requires_grad_()
               for heads in (6, kv_heads, kv_heads))
    seeds = torch.arange(12).view(2, 6)
    out = window_attention(q, k, v, windows, backend="banded", dropout_p=dropout_p, dropout_seeds=seeds)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.cos(out.detach()))]


@pytest.mark.parametrize("length, dropout_p", [(191, 0.0), (191, 0.2), (banded.FLASH_MIN_LENGTH + 1, 0.0)])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_any_number_of_threads_gives_the_same_bits(use, kv_heads, length, dropout_p):
    windows = [5, length, 64, 5, 100, length]
    use(1)
    alone = results(kv_heads, length, windows, dropout_p)
    for count in (2, 3):
        use(count)
        for a, b in zip(alone, results(kv_heads, length, windows, dropout_p), strict=True):
            assert torch.equal(a, b)


def test_work_is_spread_and_threads_are_kept(use, monkeypatch):
    use(2)
    ran = []
    forward = banded._Band.forward
    monkeypatch.setattr(banded._Band, "forward", lambda *args: ran.append(threading.get_ident()) or forward(*args))
    together = threading.Barrier(2, timeout=60)  # each of two pieces waits for the other
    assert len(set(threads.for_each(lambda _: together.wait(), range(2)))) == 2
    alive = {thread.ident for thread in threading.enumerate()}
    for _ in range(4):
        results(6, 191, [5, 191, 64, 5, 100, 191], 0.0)
    assert ran and set(ran) <= alive - {threading.get_ident()}
    assert {thread.ident for thread in threading.enumerate()} <= alive  # threads of another size may still be ending


def test_settings(use, monkeypatch):
    monkeypatch.setattr(threads, "_workers", threads._Workers())  # its threads are started here
    use(2)
    inside = threads.for_each(lambda _: (torch.get_num_threads(), torch.is_grad_enabled()), range(4))
    assert inside == [(1, False)] * 4
    assert torch.get_num_threads() == 2 and torch.is_grad_enabled()
    fresh = []
    started = threading.Thread(target=lambda: (torch.ones(1 << 17).exp(), fresh.append(torch.get_num_threads())))
    started.start()
    started.join()
    assert fresh == [2]  # a thread started later does not inherit the workers' one
    with torch.inference_mode():
        q = torch.randn(1, 2, 70, 8)
        assert window_attention(q, q, q, [3, 70], backend="banded").isfinite().all()


def test_an_exception_comes_back(use):
    use(2)

    def refuse(item):
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        threads.for_each(refuse, range(3))
    assert threads.for_each(abs, [-1, -2]) == [1, 2]


def test_an_exception_waits_for_the_pieces_at_work(use):
    """What they write to must not be freed under them: a signal's exception comes in the middle of a wait."""
    use(2)
    entered, ended = threading.Barrier(3, timeout=60), []

    def slow(_):
        entered.wait()
        time.sleep(1)
        ended.append(True)

    def interrupt():
        entered.wait()
        os.kill(os.getpid(), signal.SIGUSR2)

    def refuse(*_):
        raise InterruptedError

    before = signal.signal(signal.SIGUSR2, refuse)
    threading.Thread(target=interrupt).start()
    with pytest.raises(InterruptedError):
        threads.for_each(slow, range(2))
    signal.signal(signal.SIGUSR2, before)
    assert ended == [True, True]


def _in_child(answers):
    answers.put([int(x) for x in threads.for_each(abs, [-1, -2])])


def test_a_forked_process_gets_its_own_threads(use):
    use(2)
    threads.for_each(abs, [-1, -2])
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(answers,))
    child.start()
    assert answers.get(timeout=60) == [1, 2]
    child.join()
