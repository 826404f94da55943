"""Trees of tokens: each node computed once, seen by those that follow it, and where KV goes."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.protocol import BadInputError, ContextLengthError
from ramet.runtime.protocol.errors import QueueFullError
from ramet.runtime.protocol.trie import MAX_NODES, Trie
from ramet.runtime.scheduler.classes import PriorityClass
from ramet.runtime.scheduler.trie import trie_of


def tree(*paths):
    """(tokens, parents) of these paths, depth first."""
    tokens, parents, known = [], [], {(): -1}
    for path in sorted({tuple(path) for path in paths}):
        for end in range(1, len(path) + 1):
            if path[:end] not in known:
                known[path[:end]] = len(tokens)
                tokens.append(path[end - 1])
                parents.append(known[path[: end - 1]])
    return tokens, parents


CHOICES = tree([5, 6, 7], [5, 6, 8, 9], [5], [4, 1], [4, 2], [3])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("step_tokens", [3, 10, 512])
@pytest.mark.parametrize("prompt", [[], [1], list(range(40))])
def test_every_node_is_scored_after_its_path(make_world, overlap, step_tokens, prompt):
    world = make_world(overlap=overlap, step_tokens=step_tokens)
    world.add_trie(1, prompt, *CHOICES)
    world.run()
    world.check_trie(1, prompt, *CHOICES)
    inner = len(set(CHOICES[1]) - {-1})
    assert world.runner.computed == len(prompt) + inner
    assert world.memory.usage().held == 0
    assert world.memory.usage().evictable == len(prompt), "short paths are not kept"


def test_only_what_has_children_is_computed(make_world):
    world = make_world()
    world.add_trie(1, [1, 2, 3], *tree(*([i] for i in range(500))))
    world.run()
    world.check_trie(1, [1, 2, 3], *tree(*([i] for i in range(500))))
    assert world.runner.computed == 3


def test_the_prompt_is_taken_from_the_tree_and_put_there(make_world):
    world = make_world()
    prompt = list(range(30))
    world.add(0, prompt, 1)
    world.run()
    request = world.add_trie(1, [*prompt, 77], *CHOICES)
    world.run()
    assert request.cached_tokens == 30
    before = world.runner.computed
    world.add_trie(2, [*prompt, 77], *CHOICES)
    world.run()
    inner = len(set(CHOICES[1]) - {-1})
    assert world.runner.computed - before == inner + 1
    world.check_trie(2, [*prompt, 77], *CHOICES)


def test_many_of_one_prompt_go_in_one_step(make_world):
    world = make_world(rows=8, step_tokens=256)
    prompt = list(range(100))
    for rid in range(6):
        world.add_trie(rid, prompt, *CHOICES)
    world.step()
    world.run()
    for rid in range(6):
        world.check_trie(rid, prompt, *CHOICES)
    inner = len(set(CHOICES[1]) - {-1})
    assert world.runner.computed == 100 + 6 * inner + 5, "the prompt once, its last token by each"


def test_nodes_are_not_taken_for_what_follows_the_prompt(make_world):
    """A request that goes on as the nodes lie must neither find them nor wait for them."""
    world = make_world(rows=4, step_tokens=16)
    tokens, parents = tree(*([i, i + 100] for i in range(40, 70)))
    world.add_trie(1, list(range(20)), tokens, parents)
    world.step()
    follower = [*range(20), *range(40, 70)]
    world.add(2, follower, 4)
    world.run()
    world.check_trie(1, list(range(20)), tokens, parents)
    world.check(2, follower, 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_long_paths_stay_for_the_stream_that_goes_on(make_world, overlap):
    world = make_world(overlap=overlap)
    prompt = list(range(10))
    first, second = list(range(100, 130)), [*range(100, 120), *range(200, 220)]
    world.add_trie(1, prompt, *tree(first, second, [7, 8]))
    world.run()
    for path in (first, second):
        request = world.add(2, [*prompt, *path, 3], 2)
        world.run()
        assert request.cached_tokens == 10 + len(path) - 1, "all but the leaf"
        world.check(2, [*prompt, *path, 3], 2)
    assert world.memory.usage().held == 0


def test_a_path_that_is_in_the_tree_already_is_not_kept_twice(make_world):
    world = make_world()
    prompt, path = list(range(10)), list(range(100, 130))
    world.add(0, [*prompt, *path], 1)
    world.run()
    had = world.memory.usage().evictable
    other = [*path[:25], *range(300, 310)]
    world.add_trie(1, prompt, *tree(path, other))
    world.run()
    world.check_trie(1, prompt, *tree(path, other))
    assert world.memory.usage().evictable == had + 9
    assert world.memory.usage().held == 0


def test_namespaces_share_nothing(make_world):
    world = make_world()
    prompt, path = list(range(30)), list(range(100, 130))
    for rid, namespace in enumerate((b"one", b"two", b"one")):
        request = world.add_trie(rid, prompt, *tree(path, [7]), namespace=namespace)
        world.run()
        assert request.cached_tokens == (29 if rid == 2 else 0)
        world.check_trie(rid, prompt, *tree(path, [7]))
    for namespace, cached in ((b"one", 58), (b"two", 58), (b"", 0)):
        assert world.memory.peek(np.array([*prompt, *path[:28]]), namespace) == cached


@pytest.mark.parametrize("caching", [False, True])
def test_aborted_halfway_it_leaves_its_prompt(make_world, caching):
    world = make_world(step_tokens=32, caching=caching)
    tokens, parents = tree(*([i, i + 1, i + 2] for i in range(40)))
    world.add_trie(1, list(range(40)), tokens, parents)
    world.step()
    world.step()
    world.abort(1)
    world.run()
    usage = world.memory.usage()
    assert (usage.held, usage.evictable) == (0, 40 if caching else 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_it_scores_again(make_world, overlap):
    world = make_world(slots=128, rows=4, context=128, step_tokens=16, overlap=overlap)
    world.scheduler._admission._ratio = 0.0
    tokens, parents = tree(*([i, i + 1, 5] for i in range(10)))
    prompts = {rid: [rid, *range(8)] for rid in range(3)}
    world.add(0, prompts[0], 90)
    world.add(1, prompts[1], 90)
    world.step()
    for rid in (7, 8):
        world.add_trie(rid, [9, 9, 9], tokens, parents)
    world.run()
    assert world.scheduler.num_retracted > 0
    for rid in (7, 8):
        world.check_trie(rid, [9, 9, 9], tokens, parents)
    for rid in (0, 1):
        world.check(rid, prompts[rid], 90)


def test_a_trie_sent_back_starts_anew(make_world):
    world = make_world(step_tokens=8)
    tokens, parents = tree(*([i, i + 1, 5] for i in range(10)))
    request = world.add_trie(1, list(range(20)), tokens, parents)
    for _ in range(4):
        world.step()
    world.scheduler._send_back(request.row)
    world.run()
    assert request.retractions == 1
    world.check_trie(1, list(range(20)), tokens, parents)


def test_what_cannot_fit_is_refused(make_world):
    world = make_world(slots=256, context=300)
    tokens, parents = tree(list(range(200)))
    with pytest.raises(ContextLengthError, match="100 tokens, and its continuations 199"):
        world.add_trie(1, list(range(100)), tokens, parents)
    with pytest.raises(ContextLengthError, match=r"KV memory holds 256"):
        world.add_trie(1, list(range(90)), tokens, parents)
    world.add_trie(1, list(range(57)), tokens, parents)
    world.run()
    world.check_trie(1, list(range(57)), tokens, parents)


def test_what_is_computed_of_a_trie_counts_in_the_queue_and_for_its_class(make_world):
    world = make_world(rows=1)
    scheduler = world.scheduler
    classes = {**scheduler.limits.classes, "short": PriorityClass(context_length=20)}
    scheduler.limits = dataclasses.replace(
        scheduler.limits, classes=classes, max_waiting_tokens=100
    )
    world.add_trie(1, range(18), *tree([1, 2]), cls="short")
    with pytest.raises(ContextLengthError, match="18 tokens and a continuation 3; the context of"):
        world.add_trie(2, range(18), *tree([1, 2, 3]), cls="short")
    world.add_trie(3, range(40), *tree(list(range(31))))
    with pytest.raises(QueueFullError, match="100 prompt tokens"):
        world.add_trie(4, range(6), *tree(list(range(7))))
    world.add_trie(5, range(5), *tree(list(range(7))))
    world.run()
    assert scheduler.waiting.tokens == 0


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    slots=st.sampled_from([192, 320, 1024]),
    step_tokens=st.sampled_from([7, 64]),
    overlap=st.booleans(),
    policy=st.sampled_from(["fcfs", "lpm", "dfs", "program"]),
    caching=st.booleans(),
)
def test_any_mix(make_world, seed, slots, step_tokens, overlap, policy, caching):
    rng = random.Random(seed)
    world = make_world(slots=slots, rows=4, context=192, step_tokens=step_tokens, overlap=overlap,
                       policy=policy, caching=caching)  # fmt: skip
    stem = [rng.randrange(3) for _ in range(60)]
    wanted = {}
    for rid in range(8):
        prompt = stem[: rng.randrange(1, 60)]
        if rng.random() < 0.6:
            paths = [
                [rng.randrange(3) for _ in range(rng.choice((1, 3, 8, 20, 30)))]
                for _ in range(rng.randrange(1, 5))
            ]
            wanted[rid] = (prompt, tree(*paths))
            world.add_trie(rid, prompt, *wanted[rid][1])
        else:
            wanted[rid] = (prompt, None)
            world.add(rid, prompt, 20)
        for _ in range(rng.randrange(3)):
            world.step()
        if rng.random() < 0.1 and rid in world.requests:
            world.abort(rid)
            del wanted[rid]
    world.run()
    for rid, (prompt, nodes) in wanted.items():
        if nodes is None:
            world.check(rid, prompt, 20)
        else:
            world.check_trie(rid, prompt, *nodes)
    assert world.memory.usage().held == 0


def message(tokens, parents):
    return Trie(
        tokens=np.array(tokens, np.int32).tobytes(), parents=np.array(parents, np.int32).tobytes()
    )


@pytest.mark.parametrize(
    ("tokens", "parents", "complaint"),
    [
        ([1, 2], [-1], "1 parents for 2"),
        ([], [], "0 nodes"),
        ([1] * (MAX_NODES + 1), [-1] * (MAX_NODES + 1), "nodes; there may be"),
        ([1, 50], [-1, 0], "token ids"),
        ([1, -1], [-1, 0], "token ids"),
        ([1, 2], [-1, 1], "parent of node 1 is 1"),
        ([1, 2], [0, -1], "parent of node 0 is 0"),
        ([1, 2], [-2, -1], "parent of node 0 is -2"),
        ([1, 2, 3, 4], [-1, 0, -1, 0], "parent of node 3 is 0"),
        ([1, 2, 3], [-1, 0, 7], "parent of node 2 is 7"),
    ],
)
def test_what_is_no_tree_is_refused(tokens, parents, complaint):
    with pytest.raises(BadInputError, match=complaint):
        trie_of(message(tokens, parents), 50)


def test_half_a_number_is_refused():
    with pytest.raises(BadInputError, match="whole int32"):
        trie_of(Trie(tokens=b"abc", parents=b""), 50)
