"""Tree attention on the device: random trees of real sizes, found, cut and attended."""

from __future__ import annotations

import numpy as np
import pytest
import torch

SHAPES = {"qwen2.5-1.5b": (12, 2, 128), "llama-3.1-8b": (32, 8, 128), "smollm2": (9, 3, 64)}


class Trees:
    """Rows of slots at the leaves of a random tree, and what `SegmentFinder` finds in them."""

    def __init__(self, count: int, depth: int, longest: int, seed: int) -> None:
        from ramet.runtime.scheduler.rows import Rows
        from ramet.runtime.scheduler.segments import SegmentFinder, SharingCost

        random = np.random.default_rng(seed)
        self.rows = Rows(count, longest + 8)
        self.lens = np.zeros(count, np.int32)
        self.next = 1
        work = [(np.arange(count), depth)]
        while work:
            some, levels = work.pop()
            at = int(self.lens[some[0]])
            most = max(1, (longest - at) // max(levels, 1))
            size = int(random.integers(1, most + 1))
            if len(some) == 1 or levels <= 1:
                for row in some:
                    self.extend(np.array([row]), int(random.integers(1, most + 1)))
                continue
            self.extend(some, size)
            cuts = np.unique(random.integers(1, len(some), int(random.integers(0, 9))))
            work += [(part, levels - 1) for part in np.split(some, cuts)]
        self.members = random.permutation(count).astype(np.int32)
        self.kv_lens = self.lens[self.members]
        finder = SegmentFinder(self.rows, SharingCost(reader=16, segment=16, step=1))
        self.plan = finder.find(self.members, self.kv_lens)

    def extend(self, some: np.ndarray, size: int) -> None:
        """The same ``size`` new slots for these rows, which all end at one position."""
        at = int(self.lens[some[0]])
        self.rows.slots[some, at : at + size] = np.arange(self.next, self.next + size)
        self.lens[some] += size
        self.next += size

    def list(self, shape):
        from ramet.kernels.attention.worklist import make_list

        plan = self.plan
        made = make_list(
            self.members, self.kv_lens, plan.starts, plan.ends, plan.reader_starts,
            plan.readers, plan.tails, shape,
        )  # fmt: skip
        assert made is not None
        return made


def compare(trees, heads, kv_heads, dim, dtype, kv_dtype=None, scales=(1.0, 1.0)) -> float:
    """Relative distance of tree attention from plain attention, computed in float32 of the same
    tensors; every output poisoned before. Weights and results rounded to bfloat16 alone make
    2.3e-3."""
    from ramet.kernels.attention.decode import decode
    from ramet.kernels.attention.meta import AttentionMeta
    from ramet.kernels.attention.tree import shape_for, tree_decode, work_for

    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    caches = torch.randn(2, trees.next, kv_heads, dim, device=device)
    k, v = caches.to(kv_dtype or dtype)
    q = torch.randn(len(trees.members), heads, dim, device=device).to(dtype)
    table = torch.from_numpy(trees.rows.slots).to(device)
    i32 = {"dtype": torch.int32, "device": device}
    meta = AttentionMeta(
        table, torch.from_numpy(trees.members).to(device), torch.arange(len(q) + 1, **i32),
        torch.from_numpy(trees.kv_lens).to(device), 1, int(trees.kv_lens.max()), len(q),
    )  # fmt: skip
    shape = shape_for(heads, kv_heads, dim, dtype, len(q), device)
    work = work_for(shape, dim, device)
    work.fill(trees.list(shape))
    options = {"k_scale": scales[0], "v_scale": scales[1]}
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for pdl in (False, True, True):
        work.partial.fill_(torch.nan)
        work.logs.fill_(torch.nan)
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=device)
        tree_decode(
            q, k, v, table, meta.kv_lens, work, dim**-0.5, out=out, lse=lse, pdl=pdl, **options
        )
        results.append((out, lse))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    want_lse = torch.empty(q.shape[:2], device=device)
    want = decode(q.float(), k.float(), v.float(), meta, dim**-0.5, lse=want_lse, **options)
    out, lse = results[0]
    assert torch.isfinite(out).all()
    assert (lse - want_lse).abs().max() < (1e-4 if dtype == torch.float32 else 2e-2)
    return float((out.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize(
    ("count", "depth", "longest"), [(256, 3, 8192), (64, 6, 4000), (7, 2, 300)]
)
def test_equals_plain_attention(model, count, depth, longest):
    for seed in range(4):
        trees = Trees(count, depth, longest, seed)
        if trees.plan is not None:
            assert compare(trees, *SHAPES[model], torch.bfloat16) < 3e-3


@pytest.mark.parametrize("seed", range(6))
def test_equals_plain_attention_in_float32(seed):
    trees = Trees(3 + 40 * seed, 2 + seed % 5, 2000, seed)
    assert trees.plan is not None
    assert compare(trees, 12, 2, 128, torch.float32) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 80), (6, 2, 96), (8, 4, 256)])
def test_other_head_sizes(heads, kv_heads, dim):
    trees = Trees(40, 3, 3000, 5)
    assert trees.plan is not None
    assert compare(trees, heads, kv_heads, dim, torch.float16) < 2e-3


def test_float8_cache():
    trees = Trees(40, 3, 3000, 6)
    assert trees.plan is not None
    kinds = torch.bfloat16, torch.float8_e4m3fn
    assert compare(trees, 12, 2, 128, *kinds, scales=(0.5, 2.0)) < 3e-3


def test_a_captured_step_follows_its_list():
    """One graph: other lists, other lengths, and no list at all."""
    from ramet.kernels.attention.decode import decode
    from ramet.kernels.attention.meta import AttentionMeta
    from ramet.kernels.attention.tree import shape_for, tree_decode, work_for

    device = torch.device("cuda", 0)
    heads, kv_heads, dim, size = 12, 2, 128, 64
    dtype = torch.bfloat16
    k, v = torch.randn(2, 200_000, kv_heads, dim, device=device).to(dtype)
    q = torch.randn(size, heads, dim, device=device).to(dtype)
    table = torch.zeros(size, 4096, dtype=torch.int32, device=device)
    kv_lens = torch.ones(size, dtype=torch.int32, device=device)
    shape = shape_for(heads, kv_heads, dim, dtype, size, device)
    work = work_for(shape, dim, device)

    def step() -> torch.Tensor:
        return tree_decode(q, k, v, table, kv_lens, work, dim**-0.5, pdl=True)

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        assert not step().any()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = step()
        for seed, count in ((1, 64), (2, 40), (3, 64), (4, 9)):
            trees = Trees(count, 3, 4000, seed)
            if trees.plan is None:
                continue
            assert trees.next < len(k)
            table.zero_()
            table[:count, : trees.rows.slots.shape[1]] = torch.from_numpy(trees.rows.slots)
            kv_lens.fill_(1)
            kv_lens[:count] = torch.from_numpy(trees.kv_lens)
            work.fill(trees.list(shape))
            graph.replay()
            meta = AttentionMeta(
                table, torch.from_numpy(trees.members).to(device),
                torch.arange(count + 1, dtype=torch.int32, device=device), kv_lens[:count], 1,
                4096, count,
            )  # fmt: skip
            want = decode(q[:count], k, v, meta, dim**-0.5)
            stream.synchronize()
            torch.testing.assert_close(out[:count], want, atol=2e-3, rtol=2**-7)
            assert not out[count:].any()


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_a_runner_that_shares_says_the_same(family, make_runner, drive):
    """Branches of two levels, with rows that come and go: tokens and log-probs as without."""
    from ramet.runtime.scheduler.segments import SegmentFinder, SharingCost

    random = np.random.default_rng(3)
    stem = random.integers(0, 1000, 300).tolist()
    groups = [random.integers(0, 1000, 80).tolist() for _ in range(2)]
    jobs = [
        (stem + groups[i % 2] + random.integers(0, 1000, 5).tolist(), 8 + 3 * i) for i in range(14)
    ]
    found = []
    shared = 0
    for share in (False, True):
        runner = make_runner(family, on="cuda")
        driver = drive(runner, slots=4096)
        if share and runner._trees is not None:
            rows = driver.scheduler.rows
            driver.scheduler._segments = SegmentFinder(rows, SharingCost(8, 8, 8))
            step_for = runner._trees.step_for

            def counted(batch, step_for=step_for):
                nonlocal shared
                step = step_for(batch)
                shared += step is not None
                return step

            runner._trees.step_for = counted
        rids = [driver.add(prompt, new, logprobs=True) for prompt, new in jobs]
        driver.run()
        found.append([(driver.tokens[r], driver.logprobs[r]) for r in rids])
        runner.close()
    assert (shared > 20) is (family != "mistral")  # every layer of it has a window
    for (want, want_logprobs), (have, have_logprobs) in zip(*found):
        same = next((i for i, (a, b) in enumerate(zip(want, have)) if a != b), len(want))
        assert np.allclose(want_logprobs[:same], have_logprobs[:same], atol=1e-3)
        assert same == len(want) or abs(want_logprobs[same] - have_logprobs[same]) < 1e-3
