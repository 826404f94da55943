"""Attention over paged KV, written for the CPU: gather once, then few large products."""

from __future__ import annotations

import torch

from ..attention.meta import AttentionMeta
from .attention_plan import FEW, Extend, Keys, plan_for

# Scores of a block of queries stay in the cache of a core: so many float32 of them.
_BLOCK_SCORES = 1 << 18
_MIN_BLOCK, _MAX_BLOCK = 16, 128
# Below this, making oneDNN's kernel for one more shape costs more than it saves.
_MANY_ROWS = 32


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Ops.attention`: q [T, Hq, D] to [T, Hq, D]."""
    keys = plan_for(meta, window).simple
    if keys is not None and not softcap and sinks is None:
        return _Core(scale, 0.0, k_cache, v_cache).read(q, keys)[0].reshape(q.shape)
    return _attend(q, k_cache, v_cache, meta, scale, window, softcap, sinks, None)


def attention_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.attention_lse`: the output, and the log of each denominator [T, Hq] float32."""
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32)
    return _attend(q, k_cache, v_cache, meta, scale, window, softcap, sinks, lse), lse


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    plan = plan_for(meta, window)
    core = _Core(scale, softcap, k_cache, v_cache)
    out = torch.empty(q.shape, dtype=q.dtype)
    if sinks is not None and lse is None:
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32)
    if plan.own:
        # Heads of a group read the same keys: they are rows of one product, [n, Hk, G, D].
        n = meta.num_decodes
        part = torch.zeros((n, *q.shape[1:]), dtype=torch.float32)
        total = torch.full((n, q.shape[1]), -torch.inf, dtype=torch.float32)
        for keys in plan.own:
            y, t = core.read(q, keys)
            part[keys.at] = y.reshape(keys.items, *q.shape[1:]).float()
            total[keys.at] = t.reshape(keys.items, -1)
        for keys in plan.shared:
            _merge(part, total, keys, *core.read_shared(q, keys))
        out[:n] = part
        if lse is not None:
            lse[:n] = total
    window = 0 if window >= meta.max_kv else window
    for extend in plan.extends:
        if extend.last - extend.first <= FEW:
            core.few(q, extend, out, lse)
        else:
            core.extend(q, extend, window, out, lse)
    for first, last in plan.empty:
        out[first:last] = 0
    if sinks is not None and lse is not None:
        # A sink takes its share of each softmax and gives nothing.
        total = torch.logaddexp(lse, sinks.float())
        out.mul_(torch.exp(lse - total).unsqueeze(-1))
        lse.copy_(torch.where(lse > -torch.inf, total, lse))
    return out


def _merge(
    part: torch.Tensor, total: torch.Tensor, keys: Keys, more: torch.Tensor, add: torch.Tensor
) -> None:
    """Add the softmax over further keys (``more`` with denominators ``add``) to items' parts."""
    have, so_far = part[keys.at], total[keys.at]
    share = torch.sigmoid(add - so_far).unsqueeze(-1)
    part[keys.at] = have + (more.float() - have) * share
    total[keys.at] = torch.logaddexp(so_far, add)


class _Core:
    """One layer's attention over keys that a plan names."""

    def __init__(
        self, scale: float, softcap: float, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> None:
        self.scale, self.softcap = scale, softcap
        self.k_cache, self.v_cache = k_cache, v_cache
        self.kv_heads = k_cache.shape[1]

    def read(self, q: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Own keys of decoding items: [n, Hk, G, D] and log denominators [n, Hk, G]."""
        x = q[keys.at]
        x = x.view(x.shape[0], self.kv_heads, -1, x.shape[-1])
        k, v = keys.of(self.k_cache).transpose(1, 2), keys.of(self.v_cache).transpose(1, 2)
        return self._softmax(x, k, v, keys.mask)

    def read_shared(self, q: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys that all n items read: [n, Hq, D] and [n, Hq]. Their queries are rows too."""
        x = q[keys.at]
        n, heads, dim = x.shape
        x = x.view(n, self.kv_heads, -1, dim).transpose(0, 1).reshape(1, self.kv_heads, -1, dim)
        k, v = keys.of(self.k_cache).transpose(1, 2), keys.of(self.v_cache).transpose(1, 2)
        y, total = self._softmax(x, k, v, None)
        y = y.reshape(self.kv_heads, n, -1, dim).transpose(0, 1).reshape(n, heads, dim)
        return y, total.view(self.kv_heads, n, -1).transpose(0, 1).reshape(n, heads)

    def _softmax(
        self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [b, h, M, D] over k and v [b, h, L, D]: the output and log denominators [b, h, M]."""
        if not self.softcap:
            if mask is not None:
                mask = mask.to(x.dtype)
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                x, k.to(x.dtype), v.to(x.dtype), 0.0, False, attn_mask=mask, scale=self.scale
            )
        scores = self._cap((x.float() * self.scale) @ k.float().transpose(-1, -2))
        if mask is not None:
            scores += mask
        total = scores.logsumexp(dim=-1, keepdim=True)
        y = torch.exp(scores - total).to(v.dtype) @ v
        return y.to(x.dtype), total.squeeze(-1)

    def _cap(self, scores: torch.Tensor) -> torch.Tensor:
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores

    def few(
        self, q: torch.Tensor, item: Extend, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """A few queries of one item: one product with a mask over all."""
        keys, count = item.keys, item.last - item.first
        x = q[item.first : item.last].unflatten(1, (self.kv_heads, -1)).permute(1, 2, 0, 3)
        group = x.shape[1]
        x = x.reshape(1, self.kv_heads, group * count, -1)
        mask = None if keys.mask is None else keys.mask.repeat(1, 1, group, 1)
        k, v = keys.of(self.k_cache).transpose(1, 2), keys.of(self.v_cache).transpose(1, 2)
        y, total = self._softmax(x, k, v, mask)
        y = y.reshape(q.shape[1], count, -1)
        out[item.first : item.last] = y.transpose(0, 1)
        if lse is not None:
            lse[item.first : item.last] = total.reshape(-1, count).T

    def extend(
        self,
        q: torch.Tensor,
        item: Extend,
        window: int,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Queries of one item, block after block, each over the keys that its last one sees."""
        heads, dim = q.shape[1:]
        kv_heads, count = self.kv_heads, item.last - item.first
        group = heads // kv_heads
        k = item.keys.of(self.k_cache)[0].transpose(0, 1).float().contiguous()
        v = item.keys.of(self.v_cache)[0].transpose(0, 1).to(q.dtype).contiguous()
        x = q[item.first : item.last].view(count, kv_heads, group, dim)
        y = out[item.first : item.last].view(count, kv_heads, group, dim)
        size = min(_MAX_BLOCK, max(_MIN_BLOCK, _BLOCK_SCORES // (group * item.keys.length)))
        size = min(size, count)
        begin = item.kv_len - count - item.low
        """Index into the item's keys of its first query's own."""
        later = torch.ones((size, size), dtype=torch.bool).triu_(1)
        unseen = item.hidden
        if unseen is not None:
            window = 0
        for a in range(0, count, size):
            b = min(count, a + size)
            low = max(0, begin + a + 1 - window) if window else 0
            rows = (x[a:b].float() * self.scale).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
            parts = []
            for head in range(kv_heads):
                scores = self._cap(_product(rows[head], k[head, low : begin + b]))
                by_query = scores.view(group, b - a, -1)
                if unseen is None:
                    by_query[..., a - b :].masked_fill_(later[: b - a, : b - a], -torch.inf)
                else:
                    some = unseen.shape[1] - (count - b)
                    by_query[..., -some:].masked_fill_(unseen[a:b, :some], -torch.inf)
                if window:
                    # The first query sees all from ``low``; each next one, one key less.
                    late = torch.arange(a, b).unsqueeze(1) + (begin + 1 - window - low)
                    by_query.masked_fill_(torch.arange(scores.shape[-1]) < late, -torch.inf)
                if lse is not None:
                    total = scores.logsumexp(dim=-1).view(group, -1).T
                    mine = slice(head * group, (head + 1) * group)
                    lse[item.first + a : item.first + b, mine] = total
                weights = scores.softmax(dim=-1).to(v.dtype)
                parts.append(torch.mm(weights, v[head, low : begin + b]))
            part = torch.stack(parts).view(kv_heads, group, b - a, dim)
            y[a:b].copy_(part.permute(2, 0, 1, 3))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [N, K] transposed, float32, contiguous. oneDNN does many rows faster."""
    if a.shape[0] >= _MANY_ROWS and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return torch.mm(a, b.T)


def attention_exact(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in float64, item by item: (out [T, Hq, D], lse [T, Hq]), both float64."""
    group = q.shape[1] // k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    starts, kv_lens = meta.q_start.tolist(), meta.kv_lens.tolist()
    for i, row in enumerate(meta.rows.tolist()):
        slots = meta.table[row, : kv_lens[i]].long()
        k = k_cache[slots].double().repeat_interleave(group, dim=1)
        v = v_cache[slots].double().repeat_interleave(group, dim=1)
        at = torch.arange(kv_lens[i])
        position = torch.arange(starts[i], starts[i + 1]).unsqueeze(1) + kv_lens[i] - starts[i + 1]
        place, place_of = position, at
        seen = at <= position
        if meta.ancestry is not None and (first := int(meta.ancestry.starts[i])) < kv_lens[i]:
            begin = int(meta.ancestry.offsets[i]) - first
            ends, depths = meta.ancestry.ends, meta.ancestry.depths
            place_of = at.clone()
            for key in range(first, kv_lens[i]):
                seen[:, key] &= position[:, 0] - first < int(ends[begin + key])
                place_of[key] = first + int(depths[begin + key])
            place = torch.where(position < 0, position, place_of[position.clamp_min(0)])
        if window:
            seen &= place_of > place - window
        mine = slice(starts[i], starts[i + 1])
        scores = torch.einsum("qhd,lhd->qhl", q[mine].double(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
        total = scores.logsumexp(dim=-1)
        some = total > -torch.inf
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double()).where(some, total)
        weights = torch.exp(scores - total.unsqueeze(-1)).where(some.unsqueeze(-1), 0.0)
        out[mine] = torch.einsum("qhl,lhd->qhd", weights, v)
        lse[mine] = total
    return out, lse
